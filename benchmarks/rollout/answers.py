"""100,000 checked answers while versions come and go and processes are killed: none is wrong, none is lost (8 minutes).

python benchmarks/rollout/answers.py [--answers 100000] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
from pathlib import Path

from checked_answers import Checked, Fleet, actions, ask_while, prepare
from rollout_parts import RESULTS, Figure, figure, write_part


def figures(found: Checked) -> list[Figure]:
    """How many were wrong, lost, or in a killed process."""
    shares = ", ".join(f"version {v}: {n:,}" for v, n in sorted(found.by_version.items()))
    how = f"{found.answers:,} answers ({shares}), {found.kills} processes killed by signal 9"
    examples = itertools.islice(itertools.chain(found.wrong, found.lost), 3)
    how += "".join(f"; {each}" for each in examples)
    return [
        figure("checked answers: wrong", len(found.wrong), "answers", at_most=0, how=how),
        figure("checked answers: lost", len(found.lost), "answers", at_most=0, how=how),
        figure("checked answers: in a killed process", found.killed, "requests", how=how),
    ]


async def main() -> None:
    """Ask, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=100_000, help="How many at least.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as folder:
        rollouts = prepare(Path(folder) / "models", Path(folder) / "versions")
        with Fleet(root=Path(folder) / "models", scratch=Path(folder)) as fleet:
            found = await ask_while(
                fleet, rollouts, actions(rollouts, fleet), answers=given.answers
            )
    write_part("answers", figures(found), results=given.results)


if __name__ == "__main__":
    asyncio.run(main())
