"""Kills writers of a rollout's state at each system call, and checks the files that remain.

python -m tests.unit.rollout.state_kills FOLDER

Prints one JSON object: operation -> at how many system calls it was killed. Fails where a kill loses anything.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.rollout.control.controller import Controller, Event, change
from stoker.rollout.counts.counts import MEASURED, read_counts, write_counts
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.state.changes import advance, roll_back, start
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import RolloutState, state_of

CALLS = ("open", "mkdir", "link", "replace", "fsync", "unlink", "chmod", "fchmod")
SERVER = "one"


def counts_of(requests: int) -> dict[int, dict[int, VersionCounts]]:
    """What a server has counted: the baseline measured, and the first stage."""
    latency = Counter({10: requests})
    return {
        MEASURED: {1: VersionCounts(requests=requests, latency=latency)},
        0: {2: VersionCounts(requests=requests, bad=requests // 100, latency=latency)},
    }


def latest(folder: Path) -> tuple[int, RolloutState]:
    """Number and content of the newest state."""
    stored = StateFiles(folder).latest()
    assert stored is not None
    return stored.number, state_of(stored.content["state"])


def append(folder: Path, move: Callable[[RolloutState], RolloutState]) -> None:
    """One change by an operator."""
    files = StateFiles(folder)
    stored = files.latest()
    assert stored is not None
    event = Event(what="change", who="me", why="", at_s=1.0)
    change(files, stored, move(state_of(stored.content["state"])), event)


def template(folder: Path) -> None:
    """A rollout at its first stage, and the counts of a server."""
    state = start(None, 2, serving=1, settings=RolloutSettings(min_requests=0), now_s=0.0)
    change(StateFiles(folder), None, state, Event(what="start", who="me", why="", at_s=0.0))
    append(folder, lambda now: advance(now, now_s=0.0))
    write_counts(folder, counts_of(1_000), {}, rollout=1, server=SERVER)


def promote(folder: Path) -> None:
    """Go to the next stage."""
    append(folder, lambda now: advance(now, now_s=1.0))


def go_back(folder: Path) -> None:
    """Roll back."""
    append(folder, lambda now: roll_back(now, reason="r", now_s=1.0))


def count(folder: Path) -> None:
    """Write counts."""
    write_counts(folder, counts_of(2_000), {}, rollout=1, server=SERVER)


def control(folder: Path) -> None:
    """Take the lease, and judge twice: the second time the stage ends."""
    controller = Controller(folder, clock=lambda: 0.0, now=lambda: 10_000.0)
    for _ in range(3):
        controller.step()


OPERATIONS = {"promote": promote, "roll back": go_back, "count": count, "control": control}


def killed_at(fatal: int, work: Callable[[], Any], *, after: bool) -> int:
    """Run something in a child that kills itself at its n-th call, before or after it is done."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seen = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == fatal and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            mine = seen
            try:
                return real(*arguments, **named)
            finally:
                if mine == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - the parent sees the code, and people this line
        sys.stderr.write(f"{fatal}: {error!r}\n")
        os._exit(1)
    os._exit(0)


def cut_at(size: int, work: Callable[[], Any]) -> int:
    """Run something in a child that the kernel kills as soon as a file would grow beyond a size."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    work()
    os._exit(0)


def check(folder: Path, work: Callable[[Path], None], before: int) -> None:
    """After a kill: a state before or after the change, the counts of before or after, and a way on."""
    number, state = latest(folder)
    assert before <= number, (folder, number)
    assert [each.number for each in StateFiles(folder).history()] == [*range(1, number + 1)]
    assert state.settings == RolloutSettings(min_requests=0)
    counts = read_counts(folder, rollout=1)
    assert counts in (counts_of(1_000), counts_of(2_000)), counts
    if number == before:
        work(folder)
    else:
        assert (state.stage, state.phase.value, state.lease) != (0, "running", 0), state
    append(folder, lambda now: now)
    left = [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]
    # What a killed beat leaves is one small file; a server's end and start is not.
    assert [name for name in left if not name.startswith(".beat.json.")] == []
    assert len(left) <= 1


def main() -> None:
    """Kill each operation at each call, and at several sizes of the file."""
    root, found = Path(sys.argv[1]), {}
    template(root / "template")
    before, _ = latest(root / "template")
    for name, work in OPERATIONS.items():
        for after in (False, True):
            for fatal in range(1, 200):
                folder = root / f"{name}-{after}-{fatal}"
                shutil.copytree(root / "template", folder)
                code = killed_at(fatal, lambda: work(folder), after=after)  # noqa: B023 - called in this turn
                if code == 0:
                    break
                assert code == -signal.SIGKILL, (name, fatal, code)
                check(folder, work, before)
            found[f"{name}, {'after' if after else 'before'}"] = fatal - 1
        for size in (0, 1, 40, 500):
            folder = root / f"{name}-cut-{size}"
            shutil.copytree(root / "template", folder)
            code = cut_at(size, lambda: work(folder))  # noqa: B023 - called in this turn
            assert code in (0, -signal.SIGXFSZ), (name, size, code)
            check(folder, work, before)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
