"""How many requests a canary needs until a fault rolls it back: simulated, in half a minute.

python benchmarks/rollout/simulate.py     prints the table of docs/explanation/rollout.md

The gates are Stoker's own code with its default settings; only the answers are drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.rollout.statistics.evidence import ALLOWED_RATIO, FACTORS, log_threshold

RUNS = 400
GATES = 4
SHARES = (0.01, 0.1, 0.5)
RATES = (0.0001, 0.001, 0.01)
FAULTS = (0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
MAX = 20_000_000
"""Requests after which a run counts as not found."""


def requests_needed(
    share: float, baseline: float, candidate: float, random: np.random.Generator
) -> NDArray[np.float64]:
    """[RUNS] requests of both versions until the evidence reaches the threshold; inf: not within `MAX`."""
    bad = (1.0 - share) * baseline + share * candidate
    of_candidate = share * candidate / bad
    odds = share * ALLOWED_RATIO / (1.0 - share)
    fair, worse = odds / (odds + 1.0), odds * FACTORS / (odds * FACTORS + 1.0)
    up, down = np.log(worse / fair), np.log((1.0 - worse) / (1.0 - fair))
    count, needed = np.zeros((RUNS, 2)), np.full(RUNS, np.inf)
    requests = np.zeros(RUNS)
    while (open_ := np.isinf(needed) & (requests < MAX)).any():
        steps = random.geometric(bad, (open_.sum(), 256)).cumsum(1)
        mine = (random.random(steps.shape) < of_candidate).cumsum(1)
        theirs = np.arange(1, 257) - mine
        logs = (count[open_, 0, None] + mine)[..., None] * up
        logs += (count[open_, 1, None] + theirs)[..., None] * down
        top = logs.max(-1)
        evidence = top + np.log(np.exp(logs - top[..., None]).mean(-1))
        hit = evidence >= log_threshold(gates=GATES)
        first = np.where(hit.any(1), hit.argmax(1), -1)
        rows = np.flatnonzero(open_)
        for row, at, taken in zip(rows, first, steps, strict=True):
            if at >= 0:
                needed[row] = requests[row] + taken[at]
        requests[open_] += steps[:, -1]
        count[open_, 0] += mine[:, -1]
        count[open_, 1] += theirs[:, -1]
    return needed


def shown(requests: float) -> str:
    """A count with two digits."""
    if not np.isfinite(requests):
        return "-"
    digits = 10 ** max(0, len(str(int(requests))) - 2)
    return f"{int(np.ceil(requests / digits) * digits):,}"


def main() -> None:
    """Print the table: the requests, of both versions, that nine of ten rollbacks need."""
    random = np.random.default_rng(2026)
    print(
        "| candidate's share | bad answers of the baseline | "
        + " | ".join(f"{fault:.0%}" for fault in FAULTS)
        + " |"
    )
    print("|---" * (2 + len(FAULTS)) + "|")
    for share in SHARES:
        for rate in RATES:
            cells = [
                shown(float(np.quantile(requests_needed(share, rate, fault, random), 0.9)))
                if fault > rate * ALLOWED_RATIO
                else "not worse"
                for fault in FAULTS
            ]
            print(f"| {share:.0%} | {rate:.2%} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
