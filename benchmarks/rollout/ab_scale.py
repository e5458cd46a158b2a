"""What 1,000,000 keys of an A/B test cost: memory and CPU time of a server, and CPU time of the result.

python benchmarks/rollout/ab_scale.py [KEYS]
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from pathlib import Path

from stoker.rollout.ab.assignments import AssignmentLog
from stoker.rollout.ab.outcomes import Outcome, OutcomeLog, add_from_command
from stoker.rollout.ab.result import result_of
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state.ab_settings import ABTestSettings

MIB = 1 << 20


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main(count: int) -> None:
    """Record all keys, read them as a server that starts, report outcomes, and read the result."""
    test = ABTestSettings(
        arms=((1, 0.5), (2, 0.5)), baseline=1, salt=secrets.token_hex(16), max_value=1.0
    )
    split, hash_of = TrafficSplit(test.shares, salt="m/1"), test.key_hash()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = AssignmentLog(folder, server="one", max_keys=test.max_keys)
        before, began_s = resident_bytes(), time.process_time()
        for number in range(count):
            key = b"user-%d" % number
            log.record(hash_of(key), split.version_of(key))
        took_s = time.process_time() - began_s
        print(f"first request of a key: {took_s / count * 1e6:.1f} us, all in one thread")
        print(f"memory of a server: {(resident_bytes() - before) / MIB:.0f} MiB")
        size = sum(path.stat().st_size for path in folder.glob("assignments-*"))
        print(f"log: {size / MIB:.0f} MiB")

        began_s = time.process_time()
        known = hash_of(b"user-1")
        for _ in range(1_000_000):
            log.record(known, 1)
        print(f"a later request: {(time.process_time() - began_s):.2f} us")
        began_s = time.process_time()
        for _ in range(1_000_000):
            hash_of(b"user-1")
        print(f"hash of a key: {(time.process_time() - began_s):.2f} us")

        began_s = time.process_time()
        again = AssignmentLog(folder, server="two", max_keys=test.max_keys)
        again.refresh()
        print(f"a server that starts reads them in {time.process_time() - began_s:.1f} s")

        outcomes = OutcomeLog(folder, test, name="one")
        began_s = time.process_time()
        for first in range(0, count, 10_000):
            several = range(first, min(first + 10_000, count))
            told = [Outcome(key=f"user-{n}", value=float(n % 10 == 0)) for n in several]
            outcomes.add(told, unknown=again.unknown)
        took_s = time.process_time() - began_s
        print(f"an outcome, of 10,000 at once: {took_s / count * 1e6:.1f} us")

        began_s = time.process_time()
        add_from_command(folder, test, [Outcome(key=f"user-{count - 1}", value=1.0)])
        print(f"`stoker rollout outcome`, besides its start: {time.process_time() - began_s:.1f} s")
        del log, again
        began_s = time.process_time()
        found = result_of(folder, test, shares=split.shares())
        print(f"`stoker rollout result`, besides its start: {time.process_time() - began_s:.1f} s")
        for arm in found.arms:
            print(arm)
        print(found.warnings)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
