"""What checkpoints cost, and how soon a killed run goes on; writes train-checkpoints.json.

python benchmarks/train/checkpoints.py [--rounds N] [--steps N] [--kills N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import RESULTS, Figure, figure, spread, write

HERE = Path(__file__).resolve().parent

Line = dict[str, Any]

ENDLESS = 100_000

STEPS_AFTER_CHECKPOINT = 10
"""How far the run has got past its start when it is killed."""


@contextmanager
def running(folder: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """A training run; it is killed at the end of the block."""
    command = [sys.executable, str(HERE / "checkpoint_run.py"), str(folder), str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str]) -> Iterator[Line]:
    """What it says, as it comes."""
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("{"):
            yield json.loads(text)


def finished(steps: int) -> list[Line]:
    """A complete run."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), steps) as run:
        found = list(lines(run))
        if run.wait():
            raise RuntimeError(f"a run ended with exit code {run.returncode}")
    return found


@dataclass(frozen=True)
class Cycle:
    """From the end of a call that a checkpoint follows to that of the next such call."""

    spent_s: float
    """How long it took."""

    usual_s: float
    """How long, had each call been as those of its second half: the checkpoint is written by then."""


def cycles(output: list[Line], key: str) -> list[Cycle]:
    """Each checkpoint with the calls between it and the next, so that both saw the same machine."""
    calls = [line for line in output if line["event"] in ("call", "steps")]
    ended = [line[key] for line in calls[1::2]]
    due = [number for number, line in enumerate(calls[0::2]) if line["due"]]
    found = []
    for first, last in itertools.pairwise(due):
        middle = (first + last) // 2
        usual_s = (ended[last] - ended[middle]) / (last - middle) * (last - first)
        found.append(Cycle(ended[last] - ended[first], usual_s))
    return found


def stalls(output: list[Line]) -> tuple[list[float], float]:
    """How long each checkpoint held the steps up, and the share of the time, both by wall clock."""
    calls = [line for line in output if line["event"] in ("call", "steps")]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for begun, ended, after in zip(calls[0::2], calls[1::2], calls[2::2], strict=False):
        gaps[bool(begun["due"])].append(after["at_s"] - ended["at_s"])
    usual_s = statistics.median(gaps[False])
    found = [gap - usual_s for gap in gaps[True]]
    return found, sum(found) / (calls[-1]["at_s"] - calls[0]["at_s"])


def cost(rounds: int, steps: int) -> list[Figure]:
    """Stall and overhead at the default rate."""
    runs = [finished(steps) for _ in range(rounds)]
    measured = [stalls(output) for output in runs]
    all_stalls = [stall for found, _ in measured for stall in found]
    wall, cpu = (
        [cycle for output in runs for cycle in cycles(output, key)] for key in ("at_s", "cpu_s")
    )
    if not wall:
        raise RuntimeError("no two checkpoints were due: take more --steps")
    parameters = next(line["parameters"] for line in runs[0] if "parameters" in line)
    model = f"MLP of {parameters / 1e6:.1f} M parameters, Adam, batch 64"
    seen = f"{model}; {len(all_stalls)} checkpoints in {rounds} runs of {steps} steps"
    every = f"one every {statistics.median(cycle.spent_s for cycle in wall):.0f} s"
    how = f"{seen}, {every}; from each to the next, compared with the second half of that time"
    return [
        figure(
            "checkpoint: time that the steps stand still",
            statistics.median(all_stalls),
            "s",
            how=f"{seen}, {spread(all_stalls)}",
        ),
        figure(
            "checkpoint: share of the time that the steps stand still",
            100 * statistics.median(share for _, share in measured),
            "%",
            at_most=3.5,
            how=f"{seen}, at the default rate",
        ),
        figure(
            "checkpoints at the default rate: overhead",
            _overhead(wall),
            "%",
            at_most=3.5,
            how=f"{how}, {spread([_overhead([cycle]) for cycle in wall])}",
        ),
        figure(
            "checkpoints at the default rate: overhead in CPU time",
            _overhead(cpu),
            "%",
            how=f"{how}, {spread([_overhead([cycle]) for cycle in cpu])}; the machine's idle cores "
            "take no time from the steps",
        ),
    ]


def _overhead(found: list[Cycle]) -> float:
    """Per cent of the time without checkpoints, over all of it."""
    return 100 * (sum(cycle.spent_s for cycle in found) / sum(cycle.usual_s for cycle in found) - 1)


def killed_and_resumed() -> dict[str, float]:
    """Seconds from kill -9 to the first new step, and what of it is the import of TensorFlow."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(folder, ENDLESS) as run:
            for line in lines(run):
                if line["event"] == "steps" and line["step"] >= STEPS_AFTER_CHECKPOINT:
                    break
            killed_s = time.monotonic()
            os.kill(run.pid, 9)
            run.wait()
        with running(folder, ENDLESS) as run:
            event: dict[str, Line] = {}
            for line in lines(run):
                event[line["event"]] = line
                if line["event"] == "steps":
                    break
    return {
        "all_s": event["steps"]["at_s"] - killed_s,
        "import_s": event["imported"]["at_s"] - killed_s,
        "build_s": event["built"]["at_s"] - event["imported"]["at_s"],
        "first_call_s": event["steps"]["at_s"] - event["call"]["at_s"],
    }


def restart(kills: int) -> list[Figure]:
    """From the kill to the first new step."""
    found = [killed_and_resumed() for _ in range(kills)]
    middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
    how = (
        f"median of {kills}; of it {middle['import_s']:.2f} s until TensorFlow, Keras "
        f"and Stoker are imported, {middle['build_s']:.2f} s data and model, {middle['first_call_s']:.2f} s the "
        "first call with its tracing; the rest is the checkpoint, read and verified, and the ceiling"
    )
    own_s = middle["all_s"] - middle["import_s"]
    return [
        figure("kill -9 to the first new step", middle["all_s"], "s", how=how),
        figure("kill -9 to the first new step, without the imports", own_s, "s", how=how),
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "train-checkpoints.json")
    options = parser.parse_args()
    write(options.out, [*cost(options.rounds, options.steps), *restart(options.kills)])


if __name__ == "__main__":
    main()
