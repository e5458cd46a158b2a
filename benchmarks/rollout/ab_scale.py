"""What 1,000,000 keys of an A/B test cost: memory and CPU time of a server, and CPU time of the result.

python benchmarks/rollout/ab_scale.py [--keys 1000000] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rollout_parts import RESULTS, Figure, figure, write_part

from stoker.rollout.ab.assignments import AssignmentLog
from stoker.rollout.ab.outcomes import Outcome, OutcomeLog, add_from_command
from stoker.rollout.ab.result import result_of
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state.ab_settings import ABTestSettings

MIB = 1 << 20
AT_ONCE = 10_000
"""Outcomes in one request."""


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def cpu_s(work: Callable[[], object]) -> float:
    """CPU time of this process for a piece of work, seconds."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def costs(count: int, folder: Path) -> list[Figure]:
    """Record all keys, read them as a server that starts, report outcomes, and read the result."""
    test = ABTestSettings(
        arms=((1, 0.5), (2, 0.5)), baseline=1, salt=secrets.token_hex(16), max_value=1.0
    )
    split, hash_of = TrafficSplit(test.shares, salt="m/1"), test.key_hash()
    log = AssignmentLog(folder, server="one", max_keys=test.max_keys)
    other = AssignmentLog(folder, server="two", max_keys=test.max_keys)
    outcomes = OutcomeLog(folder, test, name="one")

    def record() -> None:
        for number in range(count):
            key = b"user-%d" % number
            log.record(hash_of(key), split.version_of(key))

    def record_again() -> None:
        known = hash_of(b"user-1")
        for _ in range(count):
            log.record(known, 1)

    def report() -> None:
        for first in range(0, count, AT_ONCE):
            several = range(first, min(first + AT_ONCE, count))
            given = [Outcome(key=f"user-{n}", value=float(n % 10 == 0)) for n in several]
            outcomes.add(given, unknown=other.unknown)

    last = [Outcome(key=f"user-{count - 1}", value=1.0)]
    before = resident_bytes()
    first_s = cpu_s(record)
    memory, size = resident_bytes() - before, sum(p.stat().st_size for p in folder.iterdir())
    how = f"CPU time of one process, a test of {count:,} keys"
    return [
        figure("A/B test: first request of a key", first_s / count * 1e6, "us", how=how),
        figure("A/B test: a later request", cpu_s(record_again) / count * 1e6, "us", how=how),
        figure("A/B test: memory of a server", memory / MIB, "MiB", how=f"{count:,} keys"),
        figure("A/B test: log of assignments", size / MIB, "MiB", how=f"{count:,} keys"),
        figure("A/B test: a server that starts", cpu_s(other.refresh), "s", how=how),
        figure(
            "A/B test: an outcome",
            cpu_s(report) / count * 1e6,
            "us",
            how=f"{how}, {AT_ONCE:,} at once",
        ),
        figure(
            "A/B test: `stoker rollout outcome`",
            cpu_s(lambda: add_from_command(folder, test, last)),
            "s",
            how=f"{how}, without its start",
        ),
        figure(
            "A/B test: `stoker rollout result`",
            cpu_s(lambda: result_of(folder, test, shares=split.shares())),
            "s",
            how=f"{how}, without its start",
        ),
    ]


def main() -> None:
    """Measure, and write the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_part("ab_scale", costs(given.keys, Path(folder)), results=given.results)


if __name__ == "__main__":
    main()
