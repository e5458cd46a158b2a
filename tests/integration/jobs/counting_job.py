"""A stand-in for `stoker job-start` and `stoker job-task`, without TensorFlow: each worker counts.

On Kubernetes it replaces only `stoker train`, inside the real `stoker job-task` (`in_task`).

A worker appends one number after the other to its file and goes on from the last of it; USR1 and TERM end it
with exit code 75 after it has "saved", which takes the longer the higher its rank. An older start of the job
writes nothing once there is a newer one.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STEP_S = 0.05
ASKED: list[int] = []


@contextmanager
def alone(place: Path) -> Iterator[None]:
    with (place / "lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def newest(place: Path) -> int:
    names = [each.name for each in (place / "incarnations").iterdir()]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def start(place: Path) -> None:
    """Take the next number, and print it."""
    (place / "incarnations").mkdir(exist_ok=True)
    with alone(place):
        number = newest(place) + 1
        (place / "incarnations" / str(number)).touch(exist_ok=False)
    print(number)


def say(log: Path, line: str) -> None:
    with log.open("a") as stream:
        stream.write(f"{line}\n")


def position(numbers: Path) -> int:
    return len(numbers.read_text().split()) if numbers.exists() else 0


def own_rank() -> int:
    if "SLURM_PROCID" in os.environ:
        return int(os.environ["SLURM_PROCID"])
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}")
    return int(cluster.get("task", {}).get("index", 0))


def count(place: Path, incarnation: int) -> int:
    """Count to the end; the exit code."""
    rank = own_rank()
    _, end, *how = json.loads((place / "job.json").read_text())["command"]
    numbers = place / f"numbers-{rank}"
    log = place / "logs" / f"task-{rank}.log"
    (place / "run").write_text(f"{place.parent.parent}/count/20261128T0102Z-{incarnation:04x}")
    say(log, f"start {incarnation} goes on from {position(numbers)}")
    for name in filter(None, (how[1] if how[:1] == ["needs"] else "").split(",")):
        say(log, f"{name} has {len(os.environ[name])} characters")
    while True:
        with alone(place):
            if newest(place) != incarnation:
                (place / f"overtaken-{incarnation}-{rank}").touch()
                return 1
            reached = position(numbers)
            if reached >= int(end):
                return 0
            # Until something ends it: a slow machine may take its time for that.
            holds = how[:1] == ["hold"] and reached >= int(how[1]) and incarnation <= int(how[2])
            if not holds:
                with numbers.open("a") as stream:
                    stream.write(f"{reached}\n")
                if "STOKER_INCARNATION" in os.environ:
                    print(f"counts {reached}", flush=True)
        if (
            how[:1] == ["fail"]
            and rank == 0
            and reached >= int(how[1])
            and incarnation <= int(how[3])
        ):
            return int(how[2])
        if ASKED:
            time.sleep(0.1 + rank)
            (place / f"saved-{incarnation}-{rank}").touch()
            return 75
        time.sleep(STEP_S)


def take(number: int, _: FrameType | None) -> None:
    ASKED.append(number)


def main(arguments: list[str]) -> int:
    """Do as `stoker` does."""
    verb, place, *rest = arguments
    if verb == "job-start":
        start(Path(place))
        return 0
    listen()
    return count(Path(place), int(rest[1]))


def in_task() -> int:
    """Count as the command of a task: the job's folder and the number of the start are in a variable."""
    listen()
    place, _, number = os.environ["STOKER_INCARNATION"].rpartition(":")
    return count(Path(place), int(number))


def listen() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, take)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
