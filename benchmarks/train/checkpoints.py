"""What checkpoints cost, and how soon a killed run goes on; writes train-checkpoints.json.

python benchmarks/train/checkpoints.py [--rounds N] [--steps N] [--kills N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import RESULTS, Figure, figure, spread, write

HERE = Path(__file__).resolve().parent

Line = dict[str, Any]

SKIPPED_CALLS = 2
"""Calls that hold tracing and the input's start."""

ENDLESS = 100_000

STEPS_AFTER_CHECKPOINT = 10
"""How far the run has got past its start when it is killed."""


@contextmanager
def running(folder: Path, steps: int, checkpoint: str) -> Iterator[subprocess.Popen[str]]:
    """A training run; it is killed at the end of the block."""
    command = [sys.executable, str(HERE / "checkpoint_run.py"), str(folder), str(steps), checkpoint]
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


def finished(steps: int, checkpoint: str) -> list[Line]:
    """A whole run."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), steps, checkpoint) as run:
        told = list(lines(run))
        if run.wait():
            raise RuntimeError(f"a run ended with exit code {run.returncode}")
    return told


def spent(told: list[Line], key: str) -> float:
    """Seconds of all calls but the first, with the checkpoints between them."""
    calls = [line for line in told if line["event"] in ("call", "steps")]
    first = [line for line in calls if line["event"] == "call"][SKIPPED_CALLS]
    return calls[-1][key] - first[key]


def stalls(told: list[Line]) -> tuple[list[float], float]:
    """How long each checkpoint held the steps up, and the share of the time, both by wall clock."""
    calls = [line for line in told if line["event"] in ("call", "steps")]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for begun, ended, after in zip(calls[0::2], calls[1::2], calls[2::2], strict=False):
        gaps[bool(begun["due"])].append(after["at_s"] - ended["at_s"])
    usual_s = statistics.median(gaps[False])
    found = [gap - usual_s for gap in gaps[True]]
    return found, sum(found) / (calls[-1]["at_s"] - calls[0]["at_s"])


def cost(rounds: int, steps: int) -> list[Figure]:
    """Stall and overhead at the default rate."""
    runs: dict[str, list[list[Line]]] = {"default": [], "seldom": []}
    for number in range(rounds):
        for name in sorted(runs, reverse=bool(number % 2)):
            runs[name].append(finished(steps, name))
            sys.stderr.write(f"round {number + 1}, {name}: {spent(runs[name][-1], 'at_s'):.2f} s\n")
    measured = [stalls(told) for told in runs["default"]]
    all_stalls = [stall for found, _ in measured for stall in found]
    if not all_stalls:
        raise RuntimeError("no checkpoint was due: take more --steps")
    wall, cpu = (
        [
            100 * (spent(ours, key) / spent(theirs, key) - 1)
            for ours, theirs in zip(runs["default"], runs["seldom"], strict=True)
        ]
        for key in ("at_s", "cpu_s")
    )
    parameters = next(line["parameters"] for line in runs["default"][0] if "parameters" in line)
    model = f"MLP of {parameters / 1e6:.1f} M parameters, Adam, batch 64"
    how = f"{model}; runs of {steps} steps with the default rate and with none in turn, {rounds} rounds"
    seen = f"{model}; {len(all_stalls)} checkpoints in {rounds} runs"
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
            statistics.median(wall),
            "%",
            at_most=3.5,
            how=f"{how}, {spread(wall)}",
        ),
        figure(
            "checkpoints at the default rate: overhead in CPU time",
            statistics.median(cpu),
            "%",
            how=f"{how}, {spread(cpu)}; the machine's idle cores take it from nobody",
        ),
    ]


def killed_and_resumed() -> dict[str, float]:
    """Seconds from kill -9 to the first new step, and what of it is the import of TensorFlow."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(folder, ENDLESS, "default") as run:
            for line in lines(run):
                if line["event"] == "steps" and line["step"] >= STEPS_AFTER_CHECKPOINT:
                    break
            killed_s = time.monotonic()
            os.kill(run.pid, 9)
            run.wait()
        with running(folder, ENDLESS, "default") as run:
            told: dict[str, Line] = {}
            for line in lines(run):
                told[line["event"]] = line
                if line["event"] == "steps":
                    break
    return {
        "all_s": told["steps"]["at_s"] - killed_s,
        "import_s": told["imported"]["at_s"] - killed_s,
        "build_s": told["built"]["at_s"] - told["imported"]["at_s"],
        "first_call_s": told["steps"]["at_s"] - told["call"]["at_s"],
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
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "train-checkpoints.json")
    options = parser.parse_args()
    write(options.out, [*cost(options.rounds, options.steps), *restart(options.kills)])


if __name__ == "__main__":
    main()
