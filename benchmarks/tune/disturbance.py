"""What a profile costs the step: the same script with and without it, in turn.

python benchmarks/tune/disturbance.py [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stoker.tune.attach import profile_script

SCRIPT = Path(__file__).resolve().parent / "steps.py"

LEAST_STEPS = 1_400
"""In the first half of so many the windows on a resident batch are over, also those of the shortest
steps."""

MOST_PERCENT = 2.0
"""What the design allows."""


def plain(kind: str, steps: int) -> dict[str, float]:
    """Seconds a step of the script by itself."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(steps)], capture_output=True, text=True, check=True
    )
    return json.loads(ended.stdout)


def watched(kind: str, steps: int) -> dict[str, float]:
    """Seconds a step under the profile."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "printed").open("w+") as stream:
        command = [sys.executable, str(SCRIPT), kind, str(steps)]
        profile = profile_script(command, folder=Path(folder), stdout=stream.fileno())
        stream.seek(0)
        if profile.exit_code or profile.failures or not profile.loops:
            raise RuntimeError(f"the profile failed: {profile.to_json()}")
        return json.loads(stream.read())


def disturbance(kind: str, *, rounds: int, steps: int, clock: str) -> dict[str, Any]:
    """How much longer a step takes under the profile.

    Args:
        kind: `fit` or `loop`.
        rounds: Pairs; which of a pair runs first alternates.
        steps: Of one run.
        clock: `wall_s` or `cpu_s`.

    Raises:
        ValueError: so few steps would not be timed apart from the profile's own windows.

    Returns:
        A figure: the median over the pairs of the extra time, percent.
    """
    if steps < LEAST_STEPS:
        raise ValueError(f"steps must be at least {LEAST_STEPS}: the first half is not timed")
    extra, step_s = [], []
    for number in range(rounds):
        order = (plain, watched) if number % 2 == 0 else (watched, plain)
        took = {run.__name__: run(kind, steps)[clock] for run in order}
        extra.append(100 * (took["watched"] / took["plain"] - 1))
        step_s.append(took["plain"])
    value = statistics.median(extra)
    noise = statistics.stdev(extra) / len(extra) ** 0.5 if rounds > 1 else float("inf")
    return {
        "name": f"profile: extra time of a step of {kind}, {clock.removesuffix('_s')}",
        "value": float(f"{value:.3g}"),
        "unit": "%",
        "target": MOST_PERCENT,
        # Where the pairs differ by more than is asked for, nothing is known.
        "holds": value <= MOST_PERCENT if noise <= MOST_PERCENT else None,
        "peer": "",
        "how": f"{rounds} pairs of runs of {steps} steps of {1e3 * statistics.median(step_s):.3g} ms, "
        f"{min(extra):.2g} to {max(extra):.2g} %",
    }


def main() -> None:
    """Measure both kinds by both clocks, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4_000)
    asked = parser.parse_args()
    for kind in ("loop", "fit"):
        for clock in ("wall_s", "cpu_s"):
            figure = disturbance(kind, rounds=asked.rounds, steps=asked.steps, clock=clock)
            sys.stdout.write(json.dumps(figure) + "\n")


if __name__ == "__main__":
    main()
