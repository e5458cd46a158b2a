"""The chain up to one stage, as the command line runs it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.app.runs.resume import NEWEST, Resume
from stoker.cli.stdout import print_result
from stoker.telemetry.run_time import seconds_of_run, until_now
from stoker.telemetry.wall_time import WallTime, goodput

if TYPE_CHECKING:
    from stoker.app.chain import StageOutcome
    from stoker.app.context import Work
    from stoker.app.experiment import Experiment

Works = Callable[["Experiment", Callable[[str], None]], "Mapping[str, Work]"]
"""An experiment, and whom to tell a line -> stage -> what does its work instead."""


def trained_as_worker(asked: Experiment, log: Callable[[str], None]) -> bool:
    """Train with others where `TF_CONFIG` says that another process leads; whether it does.

    Args:
        asked: What this process was started with, without a lock file.
        log: Takes lines for a person.
    """
    from stoker.app.task.worker import task_of, train_as_worker

    cluster = task_of(os.environ)
    if cluster is None or cluster.leads:
        return False
    train_as_worker(asked, cluster, log)
    return True


@contextlib.contextmanager
def coordinated(asked: Experiment, log: Callable[[str], None]) -> Iterator[Mapping[str, Work]]:
    """What training does instead where `TF_CONFIG` makes this process lead others; they hear if it fails."""
    from stoker.app.task.worker import coordinate, task_of

    cluster = task_of(os.environ)
    if cluster is None:
        yield {}
        return
    with coordinate(asked, cluster, log) as works:
        yield works


def run_until(
    stage: str,
    experiment: Path,
    overrides: list[str],
    *,
    again: bool,
    as_json: bool,
    resume: Resume = NEWEST,
    works: Works | None = None,
) -> None:
    """Run the chain up to a stage, and print where its output lies.

    Args:
        stage: The last one.
        experiment: The folder with stoker.yaml.
        overrides: `key=value`, each overrides a setting.
        again: Do the last stage even where nothing has changed.
        as_json: Print its facts as JSON instead, with the warnings of all stages.
        resume: Which run is gone on with.
        works: Which stages are worked on otherwise; None: as `TF_CONFIG` says, where there is one.
    """
    from stoker.app.chain import run_chain
    from stoker.app.tuned_settings import load_tuned
    from stoker.cli.progress import ConsoleListener

    wall = WallTime.of_process()
    loaded = load_tuned(experiment, overrides=overrides)
    with ConsoleListener(loaded.lock_note) as listener:
        trains = _trains(stage)
        if trains and works is None and trained_as_worker(loaded.asked, listener.log):
            return
        with contextlib.ExitStack() as held:
            others: Mapping[str, Work] = {}
            if trains:
                others = (
                    held.enter_context(coordinated(loaded.asked, listener.log))
                    if works is None
                    else works(loaded.used, listener.log)
                )
            result = run_chain(
                loaded.used,
                listener,
                until=stage,
                again=again,
                resume=resume,
                works=others,
                wall=wall,
            )
    last = result.outcomes[-1]
    if as_json:
        facts = {"run": str(result.run), "output": str(last.output), "skipped": last.skipped}
        facts |= _until_now(last, wall) | {"warnings": result.warnings}
        print_result(json.dumps(facts, indent=2))
    else:
        print_result(str(last.output))


def _until_now(outcome: StageOutcome, wall: WallTime) -> dict[str, Any]:
    """The facts of a stage; those of a training in this process also account for its shutdown."""
    facts, report = outcome.result, outcome.result.get("wall_time")
    # If several workers trained, this is the account of the first one.
    if outcome.stage != "train" or outcome.skipped or report is None or "workers" in facts:
        return facts
    report = until_now(report, wall)
    trained = facts["goodput"] is not None
    return facts | {
        "goodput": goodput(seconds_of_run(report)) if trained else None,
        "wall_time": report,
    }


def _trains(stage: str) -> bool:
    """Whether the chain up to a stage trains."""
    from stoker.app.stages import STAGES

    names = [each.name for each in STAGES]
    return names.index(stage) >= names.index("train")
