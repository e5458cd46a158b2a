"""The clock of the machine is set by a day while a run is written down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static long shift_s = 0;
void shift(long by_s) { shift_s = by_s; }
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += shift_s;
    return failed;
}
"""
"""A library that is loaded before the C library and returns another time of day."""

CHILD = """
import ctypes, json, sys, time
from pathlib import Path
from tensorboard.compat.proto.event_pb2 import Event
from stoker.telemetry.wall_time import TimeLeft
from stoker.telemetry.writers.tensorboard import EventFile

shift = ctypes.CDLL(sys.argv[1]).shift
folder, day = Path(sys.argv[2]), 86400
folder.mkdir()
seen, left, began_s = [], TimeLeft(), time.time()
file = EventFile(folder)
for number, by_s in enumerate((0, day, -day, 0)):
    shift(ctypes.c_long(by_s))
    event = Event()
    file.add(event)
    seen.append((time.time() - began_s, event.wall_time - began_s, left.seconds(number / 10)))
    time.sleep(0.05)
shift(ctypes.c_long(-day))
EventFile(folder)
print(json.dumps({"seen": seen, "files": [path.stat().st_ino for path in sorted(folder.iterdir())],
                  "first": file._file.path.stat().st_ino}))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_clock_that_jumps_by_a_day_moves_neither_stamps_nor_time_left(tmp_path: Path) -> None:
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(shim), str(tmp_path / "events")],
        capture_output=True,
        text=True,
        env=os.environ | {"LD_PRELOAD": str(shim)},
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)

    of_day, stamped, left = zip(*facts["seen"], strict=True)
    # The clock did jump,
    assert [round(s / 86400) for s in of_day] == [0, 1, -1, 0]
    # and no code was affected.
    assert list(stamped) == sorted(stamped)
    assert stamped[-1] < 60
    assert left[0] is None
    assert all(0 < seconds < 60 for seconds in left[1:])
    # What is written after a jump back is still read after what was written before it.
    assert facts["files"][0] == facts["first"]
