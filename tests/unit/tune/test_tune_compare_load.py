"""What others take of the cores: by counters that are made up, and by processes that really run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.tune.compare import Load, busy_s, watched_load

STAT = """\
cpu  100 20 30 4000 50 6 7 8 90 1
cpu0 50 10 15 2000 25 3 3 4 45 1
cpu1 50 10 15 2000 25 3 4 4 45 0
cpu10 7 0 0 0 0 0 0 0 0 0
intr 5 5
"""


def test_a_core_is_busy_unless_idle_and_guest_time_counts_once() -> None:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")

    assert busy_s(STAT, {0}) == pytest.approx((50 + 10 + 15 + 3 + 3 + 4) * tick_s)
    assert busy_s(STAT, {1, 10}) == pytest.approx((86 + 7) * tick_s)
    assert busy_s(STAT, set()) == 0


def test_a_machine_is_quiet_if_other_processes_use_almost_nothing() -> None:
    assert Load(cores=8, others=0.8).is_quiet
    assert not Load(cores=8, others=0.9).is_quiet
    assert Load(cores=8, others=0.94).text() == "other processes used 0.9 of its 8 cores"


SPIN = "import time\nend_s = time.monotonic() + 60\nwhile time.monotonic() < end_s: pass"


@contextmanager
def spinning() -> Iterator[int]:
    """A process in a session of its own that computes until it is killed."""
    with subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def took_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_every_process_outside_the_measured_sessions_counts_as_load() -> None:
    """Both by what the process itself got, on a machine that others use as well."""
    with spinning() as pid:
        with watched_load(pid) as ours, watched_load(os.getpid()) as without:
            begun_s, own_s = time.monotonic(), took_s(pid)
            while time.monotonic() - begun_s < 10 and took_s(pid) - own_s < 0.3:
                time.sleep(0.02)  # until it has got some CPU time, however busy the machine is
            own_s, wall_s = took_s(pid) - own_s, time.monotonic() - begun_s
        found, other = ours(), without()

    assert found is not None
    assert other is not None
    assert other.cores == found.cores == len(os.sched_getaffinity(0))
    # Counters go by ticks, and the two look at them one after the other.
    slack = 0.1 * own_s / wall_s + 8 / os.sysconf("SC_CLK_TCK") / wall_s
    assert other.others - found.others == pytest.approx(own_s / wall_s, abs=slack)


def test_a_process_that_ends_meanwhile_is_not_an_error() -> None:
    with spinning() as pid, watched_load(pid) as load:
        os.kill(pid, 9)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    assert load() is not None
