"""What a profile costs the step: in one process, by turns with the watcher and without.

python benchmarks/tune/disturbance.py [--turns N] [--steps N]

Two processes differ by more than what is looked for, even where they run at once and change cores: by 3 % either
way. So the script itself takes the watcher away and puts it back, turn by turn; and a turn is short compared with what a
machine's speed takes to change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.scriptprofile import profile_script
from stoker.tune.compare import MIN_PAIRS, gain_of

SCRIPT = Path(__file__).resolve().parent / "steps.py"

MAX_PERCENT = 2.0
"""What the issue allows."""

Turn = tuple[bool, float, float]
"""Whether it was watched; wall clock and CPU time, seconds."""


def taken(kind: str, *, turns: int, steps: int) -> list[Turn]:
    """The turns of a script under its profile."""
    # On one core: what two threads of a small step wait for each other is larger than what is looked for.
    core = str(max(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, str(SCRIPT), kind, str(turns), str(steps)]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "printed").open("w+") as stream:
        profile = profile_script(command, folder=Path(folder), stdout=stream.fileno(), mfu=False)
        stream.seek(0)
        if profile.exit_code or profile.failures or not profile.loops:
            raise RuntimeError(f"the profile failed: {profile.to_json()}")
        return [tuple(json.loads(line)) for line in stream]


def disturbance(kind: str, *, turns: int, steps: int) -> list[dict[str, Any]]:
    """How much longer a step takes under the profile.

    Args:
        kind: `fit` or `loop`.
        turns: With and without the watcher; at least twice `MIN_PAIRS`, and even.
        steps: Of one turn.

    Raises:
        ValueError: so few turns give no interval.

    Returns:
        Figures, wall and CPU: the median over pairs of turns of the extra time, percent.
    """
    if turns < 2 * MIN_PAIRS or turns % 2:
        raise ValueError(f"an even number of turns, at least {2 * MIN_PAIRS}")
    found = taken(kind, turns=turns, steps=steps)
    pairs = [sorted(pair) for pair in zip(found[::2], found[1::2], strict=True)]
    return [
        _figure(
            f"profile: extra {clock} of a step of {kind}",
            [(without[column], with_it[column]) for without, with_it in pairs],
            steps=steps,
            # The issue speaks of the step's time.
            most=MAX_PERCENT if clock == "time" else None,
        )
        for clock, column in (("time", 1), ("CPU time", 2))
    ]


def _figure(
    name: str, pairs: Sequence[tuple[float, float]], *, steps: int, most: float | None
) -> dict[str, Any]:
    gain = gain_of(pairs)
    ratios = [with_it / without for without, with_it in pairs]
    value, low, high = (
        100 * (ratio - 1) for ratio in (statistics.median(ratios), gain.low, gain.high)
    )
    step_ms = 1e3 * statistics.median(without for without, _ in pairs) / steps
    return {
        "name": name,
        "value": float(f"{value:.3g}"),
        "unit": "%",
        "target": most,
        # If the interval is wider than the target, nothing is known.
        "holds": value <= most if most is not None and high - low <= most else None,
        "peer": "",
        "how": f"{len(pairs)} pairs of turns of {steps} steps of {step_ms:.2g} ms, with the watcher "
        f"and without, in one process on one core; median, 95 % [{low:.2g}, {high:.2g}]; what writing its facts "
        "takes besides, at most 0.05 %, is in both",
    }


def main() -> None:
    """Measure both kinds, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    figures = []
    for kind in ("loop", "fit"):
        figures += (found := disturbance(kind, turns=given.turns, steps=given.steps))
        sys.stderr.write(json.dumps(found) + "\n")
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
