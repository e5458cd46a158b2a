"""From the fault to the webhook, through Prometheus and Alertmanager (3 minutes).

python benchmarks/monitor/fire.py [--rounds 5] [--out FILE]

Scrape and evaluation every second, `group_wait: 1s`, `--time-scale 60`. In each round both programs start new, run
healthy for 20 s, and then get all faults at once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))  # `figures`

from faults import FAULTS, fire_all, stack_of, wiring_of
from figures import RESULTS, figure, spread, write
from player import inbox, machine

WITHIN_S = 15.0
HEALTHY_S = 20.0


def one_round() -> tuple[dict[str, float], set[str]]:
    """Times of one round, and the alerts that came before the faults."""
    with tempfile.TemporaryDirectory() as place, inbox() as notes:
        folder = Path(place)
        with machine(folder / "runs") as found:
            stack = stack_of(folder / "state")
            stack.up(wiring_of(found, notes))
            try:
                time.sleep(
                    HEALTHY_S
                )  # of the clock that plays the metrics: alerts now are false ones
                false = set(notes.seen_s) - {"Watchdog"}
                return fire_all(found, notes, timeout_s=60.0), false
            finally:
                stack.down()


def main() -> int:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "monitor_fire.json")
    given = parser.parse_args()
    rounds = [one_round() for _ in range(given.rounds)]
    figures = []
    for alert in FAULTS:
        took = [times.get(alert, float("inf")) for times, _ in rounds]
        figures.append(
            figure(
                f"from the fault to the webhook, {alert}",
                max(took),
                "s",
                at_most=WITHIN_S,
                how=f"slowest of {len(took)} rounds, {spread(took)} s; scrape 1 s, time scale 60",
            )
        )
    false = sum(len(before) for _, before in rounds)
    figures.append(
        figure(
            "alerts without a fault",
            false,
            "",
            at_most=0,
            how=f"{len(rounds)} times {HEALTHY_S:.0f} s, which stand for {HEALTHY_S:.0f} minutes",
        )
    )
    write(given.out, figures)
    return 0 if all(each["holds"] for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
