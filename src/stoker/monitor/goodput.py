"""Reports how the wall time of a run was spent, over all its processes and the time between them.

It reads `train/wall_time.json`, which training keeps up to date, so it also works for a run that is still running or
was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import ConfigError, DataError, Plain
from stoker.telemetry.account import read_account
from stoker.telemetry.wall_time import OTHER_STAGES, PARTS, REPEATED, STEPS

ACCOUNT = "wall_time.json"
"""File with the account of a training's wall time, in the folder of the stage `train`."""

STAGE = "train"
"""Folder of the stage `train` in a run's folder."""

INPUT_WAIT, WAITING = "input_wait", "waiting"

_FIRST = (STEPS, INPUT_WAIT, "compile", "checkpoints", "validation", REPEATED, WAITING)
"""Parts that are shown first, in this order; all other parts follow, in the order of `PARTS`."""

_LABELS = {part.name: part.label for part in PARTS} | {
    STEPS: "steps",
    INPUT_WAIT: "waiting for input",
    REPEATED: "lost work, done again",
    WAITING: "waiting for machines",
}

_ADVICE = {part.name: part.advice for part in PARTS} | {
    STEPS: "",
    INPUT_WAIT: "`stoker profile` shows which part of the input is slow",
    WAITING: "this is the time from the end of one process to the start of the next",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePart:
    """One part of a run's wall time."""

    name: str
    """Name of the part in `--json`."""

    label: str
    """Name of the part for the user."""

    seconds: float
    """Total time of the part over all processes, seconds."""

    share: float
    """This time as a share of the run's wall time."""

    advice: str
    """How to reduce the time of the part; "" for the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGoodput:
    """How the wall time of a run was spent."""

    run: str
    """ID of the run."""

    wall_s: float
    """Time from the start of the first process to the end of the last process, seconds."""

    goodput: float
    """Time in steps that were not repeated, as a share of the wall time without the stages before training."""

    processes: int
    """Number of processes that trained, one after the other."""

    restarts: dict[str, int]
    """How a process ended -> how often the run was continued after such an end."""

    repeated_steps: int
    """Number of steps that had to be repeated."""

    parts: tuple[TimePart, ...]
    """All parts that took any time; the sum of their seconds is `wall_s`."""


def goodput_of(run: Path) -> RunGoodput:
    """Return how the wall time of a run was spent.

    Args:
        run: Folder of the run.

    Raises:
        ConfigError: The folder does not belong to a run that has begun to train.
        DataError: The account of the wall time is missing or damaged.
    """
    folder = run if (run / ACCOUNT).is_file() and run.name == STAGE else run / STAGE
    if not folder.is_dir():
        raise ConfigError(
            "RUN must be the folder of a run that has begun to train",
            got=Plain(str(run)),
            fix="E.g. runs/NAME/20261127T184133Z-4f1a.",
        )
    try:
        account = read_account(folder / ACCOUNT)
    except FileNotFoundError:
        raise DataError(
            f"{folder / ACCOUNT} must exist; training writes it",
            got=Plain("no such file"),
            fix="Train again; a training with parameter servers does not write this file.",
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder / ACCOUNT} must be as training wrote it", got=Plain(str(error))
        ) from error
    seconds = dict(account["parts"])
    wait_s = min(account["input_wait_s"], seconds[STEPS])
    good_s = seconds[STEPS]
    seconds |= {STEPS: good_s - wait_s, INPUT_WAIT: wait_s, WAITING: account["waiting_s"]}
    wall_s = sum(seconds.values())
    training_s = wall_s - seconds[OTHER_STAGES]
    names = [*_FIRST, *(part.name for part in PARTS if part.name not in _FIRST)]
    return RunGoodput(
        run=folder.resolve().parent.name,
        wall_s=wall_s,
        goodput=good_s / training_s if training_s > 0 else 0.0,
        processes=account["processes"],
        restarts=account["restarts"],
        repeated_steps=account["repeated_steps"],
        parts=tuple(
            TimePart(
                name=name,
                label=_LABELS[name],
                seconds=seconds[name],
                share=seconds[name] / wall_s,
                advice=_ADVICE[name],
            )
            for name in names
            if seconds[name] > 0
        ),
    )


def restarts_line(report: RunGoodput) -> str:
    """Return how often the run was continued and after what, e.g. `2 restarts: 1 killed, 1 preempted`."""
    count = sum(report.restarts.values())
    if not count:
        return "no restarts"
    causes = ", ".join(f"{times} {cause}" for cause, times in sorted(report.restarts.items()))
    return f"{count} restart{'s' if count > 1 else ''}: {causes}"


def find_run(named: Path) -> Path:
    """Return the folder of a run; `named` is its path, or its ID if it is in `runs` of the current folder.

    Raises:
        ConfigError: The run does not exist.
    """
    if named.is_dir():
        return named
    found: Sequence[Path] = sorted(Path("runs").glob(f"*/{named.name}"))
    if named.name != str(named) or not found:
        raise ConfigError(
            "RUN must be the folder of a run, or the ID of a run in the folder runs",
            got=Plain(str(named)),
            fix="E.g. runs/NAME/20261127T184133Z-4f1a.",
        )
    return found[0]
