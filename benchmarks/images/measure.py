"""CPU time and wall time of an iterator of batches, with all threads and child processes counted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

CROP = 224
"""Height and width of what every contender delivers, uint8, in batches of `BATCH`."""

BATCH = 64
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """CPU seconds so far of this process, its living descendants, and those that have ended."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    return total + sum(_of_process(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def _of_process(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def report(batches: Iterable[object], *, warm_up: int, measured: int) -> None:
    """Take batches, and print what one image costs after the warm-up, as one line of JSON.

    Args:
        batches: Endless, each of `BATCH` images.
        warm_up: Batches before the clock starts.
        measured: Batches under the clock.
    """
    iterator = iter(batches)
    for _ in range(warm_up):
        next(iterator)
    started_cpu_s, started_s = cpu_s(), time.perf_counter()
    for _ in range(measured):
        next(iterator)
    images = measured * BATCH
    found = {
        "cpu_ms": (cpu_s() - started_cpu_s) / images * 1e3,
        "wall_ms": (time.perf_counter() - started_s) / images * 1e3,
        "images": images,
    }
    print("RESULT " + json.dumps(found), flush=True)
