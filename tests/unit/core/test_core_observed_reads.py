"""The observer of reads in a process that forks: its own process has no TensorFlow and no pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORKING = """
import os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from stoker.core.observed_reads import Observer, Reads, observing, snapshot
folder = Path({folder!r})
observer = Observer(
    folder, at_begin=snapshot(folder), before=Reads(), outputs=(), followed=(), write=lambda reads: None
)
with observing(observer):
    from users_code import read
    over = threading.Event()
    def busy():
        # The lock is held most of the time while this process forks.
        while not over.is_set():
            with observer._lock:
                time.sleep(0.002)
    thread = threading.Thread(target=busy)
    thread.start()
    for _ in range(40):
        child = os.fork()
        if child == 0:
            read(folder / "list.csv")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    over.set()
    thread.join()
    read(folder / "list.csv")
print(sorted(observer.reads.files))
"""

USERS_CODE = """
import os
def read(path):
    os.environ.get("PATH")
    with open(path) as file:
        return file.read()
"""


def test_forked_children_do_not_wait_for_a_lock_of_the_observer(tmp_path: Path) -> None:
    (tmp_path / "users_code.py").write_text(USERS_CODE)
    (tmp_path / "list.csv").write_text("a,b\n")

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING.format(folder=str(tmp_path))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "list.csv" in done.stdout
