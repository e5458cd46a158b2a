"""How often an A/B test is wrong that is looked at after each key: 2,000 simulated tests of 20,000 keys for each case.

python benchmarks/rollout/ab_false_alarms.py [--runs 2000] [--results FOLDER]

docs/explanation/rollout.md shows the figures.
The interval is computed for all looks at once; at some of them it is compared with the product's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rollout_parts import RESULTS, Figure, figure, write_part

from stoker.rollout.statistics.confidence_sequence import ALPHA, TIGHTEST_AT, ArmTotals, difference

KEYS = 20_000
COMPARED = (3_000, 9_999, KEYS - 1)
Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]


def rate(share: float) -> Draw:
    """Outcomes of 1 with this probability, else 0."""
    return lambda random, count: (random.random(count) < share).astype(float)


def amount(random: np.random.Generator, count: int) -> Floats:
    """Heavy-tailed: one key in five buys, for a log-normal amount."""
    return np.where(random.random(count) < 0.2, random.lognormal(0, 1.5, count), 0.0)


def excludes_zero(values: Floats, arm: NDArray[np.bool_], *, bounded: bool) -> NDArray[np.bool_]:
    """Whether the interval after each key says that the arms differ.

    Args:
        values: [keys] outcome of each key, in the order in which they came.
        arm: [keys] whether it is in the arm, not in the baseline.
        bounded: whether outcomes have a bound.
    """
    columns = (np.ones(len(values)), values, values**2, (values != 0).astype(float))
    whole = [column.cumsum() for column in columns]
    mine = [(column * arm).cumsum() for column in columns]
    rest = [all_ - own for all_, own in zip(whole, mine, strict=True)]
    least = 50 if bounded else 100
    from_ = int(np.searchsorted(np.minimum(mine[3], rest[3]), least))
    n, s, q, _ = (column[from_:] for column in whole)
    together = np.maximum(q / n - (s / n) ** 2, 0.0)
    variance, means = np.zeros(len(n)), []
    for count, total, squares, _ in ([c[from_:] for c in mine], [c[from_:] for c in rest]):
        own = squares / count - (total / count) ** 2
        variance += np.maximum(together, own) / count
        means.append(total / count)
    logarithm = -2.0 * np.log(ALPHA)
    tuned = n * (logarithm + np.log1p(logarithm)) / TIGHTEST_AT
    width = np.sqrt(variance * 2 * (tuned + 1) / tuned * np.log(np.sqrt(tuned + 1) / ALPHA))
    found = np.zeros(len(values), dtype=bool)
    found[from_:] = np.abs(means[0] - means[1]) > width
    for look in COMPARED:
        if look < len(values):
            base, other = (totals(each, look) for each in (rest, mine))
            product = difference(base, other, bounded=bounded)
            says = product is not None and not product.low <= 0.0 <= product.high
            if says != found[look]:
                raise AssertionError(f"look {look}: the product says {product}")
    return found


def totals(columns: list[Floats], look: int) -> ArmTotals:
    """What an arm has at a look."""
    count, total, squares, nonzero = (float(column[look]) for column in columns)
    return ArmTotals(keys=int(count), total=total, squares=squares, nonzero=int(nonzero))


def false_alarms(runs: int, random: np.random.Generator) -> list[Figure]:
    """Share of the tests without a difference that ever show one, for each kind of outcome and split."""
    cases: list[tuple[str, Draw, bool]] = [
        ("2 %", rate(0.02), True),
        ("10 %", rate(0.1), True),
        ("50 %", rate(0.5), True),
        ("a heavy-tailed amount", amount, False),
    ]
    found = []
    for name, draw, bounded in cases:
        for split, share in (("50/50", 0.5), ("90/10", 0.1)):
            alarms = sum(
                excludes_zero(
                    draw(random, KEYS), random.random(KEYS) < share, bounded=bounded
                ).any()
                for _ in range(runs)
            )
            found.append(
                figure(
                    f"A/B tests without a difference that show one, outcome {name}, {split}",
                    100.0 * alarms / runs,
                    "%",
                    at_most=100.0 * ALPHA,
                    how=f"{runs:,} tests of {KEYS:,} keys, looked at after every key",
                )
            )
    return found


def power(runs: int, random: np.random.Generator) -> Figure:
    """Share of the tests that find 15 % against 10 %."""
    found = 0
    for _ in range(runs):
        arm = random.permutation(4_000) < 2_000
        values = np.where(arm, rate(0.15)(random, 4_000), rate(0.1)(random, 4_000))
        found += bool(excludes_zero(values, arm, bounded=True).any())
    return figure(
        "A/B tests that find 15 % against 10 %",
        100.0 * found / runs,
        "%",
        at_least=90.0,
        how=f"{runs:,} tests of 2,000 keys in each arm",
    )


def main() -> None:
    """Simulate, and write the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2_000, help="Simulated tests of each case.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    random = np.random.default_rng(21)
    found = [*false_alarms(given.runs, random), power(given.runs, random)]
    write_part("ab_false_alarms", found, results=given.results)


if __name__ == "__main__":
    main()
