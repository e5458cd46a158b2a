"""Pods of a job agree on the start to which they belong, through files in the job's folder.

A scheduler that starts all tasks together allocates a number for the start (`stoker job-start`). But a Kubernetes
cluster replaces single pods, so here each pod claims its rank in the newest start:

    incarnations/N                  the start exists
    incarnations/N.pods/RANK        UID of the pod that has this rank in start N; only one pod can create the file
    incarnations/N.pods/RANK.exit   exit code of that pod's command
    incarnations/N.pods/given-up   a pod has waited too long for the other pods: the start never begins

A pod whose rank is already claimed is a replacement: it begins the next start. All other pods of the old start notice
that (`Superseded`) and end. They are replaced, too, and the new pods claim their ranks in the new start.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import EXIT_DONE, EXIT_PREEMPTED, Plain, UserError
from stoker.core.incarnation import INCARNATIONS, Incarnation, take_next
from stoker.jobs.providers.kubernetes.pod.size import SETTLED_S, Settling, decide_size, read_size

POLL_S = 0.3
"""Poll interval in seconds: a shared file system sends no notification of a remote change."""

FIRST_S, STEP_S, MAX_STEPS = 1.0, 0.5, 18
"""Time that a pod waits before it begins a start, seconds: rank 0 does not wait, and higher ranks wait longer, so that
usually only one pod begins a start. If two pods do, the number of one start is unused."""

LOG_EVERY_S = 60.0
"""Interval at which a waiting pod logs that it waits, seconds."""

GIVEN_UP = "given-up"
"""File that marks a start as abandoned. Without it, a replacement of a pod that gave up, or a pod of a second
submission, would later complete the start, and would work alone."""

SHOWN = 10
"""Maximum number of ranks that a message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One pod of a job."""

    place: Path
    """The job's folder."""

    rank: int
    pod: str
    """UID of the pod; no other pod of the cluster ever gets it."""

    pods: int
    """Number of pods of a start; for an elastic job, the maximum number."""

    sizes: tuple[int, ...] = ()
    """Numbers of workers that a start of an elastic job may have; empty: every start has `pods` workers."""

    log: Callable[[str], None]

    def folder(self, number: int) -> Path:
        """Return the folder with the claims of a start."""
        return self.place / INCARNATIONS / f"{number}.pods"

    def newest(self) -> int:
        """Return the number of the newest start; 0 before the first."""
        with contextlib.suppress(FileNotFoundError):
            names = (path.name for path in (self.place / INCARNATIONS).iterdir())
            return max((int(name) for name in names if name.isdecimal()), default=0)
        return 0


def join_start(member: Member, *, save_s: float, start_s: float) -> Incarnation:
    """Join a start, and return it once all pods have joined.

    Args:
        member: This pod.
        save_s: Time that pods of an earlier start get to finish their saves, seconds.
        start_s: Maximum wait for all pods, seconds.

    Raises:
        UserError: some pods did not join in time.
    """
    until_s, logged_s = time.monotonic() + start_s, time.monotonic()
    settling = Settling(min(SETTLED_S, start_s / 2))
    number = _claim_newest(member, save_s=save_s)
    while True:
        missing = _missing(member, number, settling)
        given_up = _is_given_up(member, number)
        if member.newest() > number or (given_up and not missing):
            if _has_other(member, member.newest()):
                # This pod was replaced, e.g. because its node was cut off. If it claimed its rank again, the two pods
                # would begin one start after another.
                member.log("another pod has the rank of this pod, which ends")
                raise SystemExit(EXIT_PREEMPTED)
            number = _claim_newest(member, save_s=save_s)
            continue
        if not missing:
            return Incarnation(job=member.place, number=number)
        if given_up or time.monotonic() > until_s:
            _create(member.folder(number) / GIVEN_UP, member.pod)
            raise UserError(
                f"all {member.pods} pods of a job must start within {start_s:g} s of each other",
                got=Plain(f"nothing from the pods of worker {_ranks(missing)}"),
                fix="The other pods have freed their GPUs. `stoker jobs show` says why pods wait; request fewer "
                "workers, or set `queue` of the target: Kueue starts all pods together.",
            )
        if time.monotonic() - logged_s > LOG_EVERY_S:
            logged_s = time.monotonic()
            member.log(f"waits for the pods of worker {_ranks(missing)}")
        time.sleep(POLL_S)  # a shared file system sends no notification


def workers_of_start(member: Member, number: int) -> int:
    """Return the number of workers of a start that has begun; pods with a higher rank are not needed."""
    decided = read_size(member.folder(number)) if member.sizes else None
    return member.pods if decided is None else decided[0]


def write_exit(member: Member, number: int, code: int) -> None:
    """Record the exit code of this pod's command; if the disk fails, the record is lost without an error."""
    with contextlib.suppress(OSError):
        _create(member.folder(number) / f"{member.rank}.exit", str(code))


def exits(member: Member, number: int) -> dict[int, int]:
    """Return rank -> exit code, for the pods of a start whose command has ended."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in member.folder(number).glob("*.exit"):
            with contextlib.suppress(OSError, ValueError):
                found[int(path.stem)] = int(path.read_text())
    return found


def all_done(member: Member, number: int, *, longest_s: float) -> bool:
    """Wait until the commands of all pods of a start have ended; return whether all exited with 0.

    A pod that exited with 0 before the others would not be replaced, and would be missing if there is a next start.
    """
    until_s = time.monotonic() + longest_s
    while time.monotonic() < until_s and member.newest() == number:
        codes = exits(member, number)
        if any(code != EXIT_DONE for code in codes.values()):
            return False
        if len(codes) == member.pods:
            return True
        time.sleep(POLL_S)  # a shared file system sends no notification
    return False


def another_counts(member: Member, number: int, *, longest_s: float) -> bool:
    """Return whether another pod caused the failure of this pod, or is counted for it; wait for a sign of that.

    The other pod may have been killed: then it has recorded no exit code, and its replacement begins the next start.
    Or several pods failed: then only the pod with the lowest rank is counted, so that pods that fail together are
    counted once. A pod that has saved is not a sign: it may have saved because of this failure.
    """
    until_s = time.monotonic() + longest_s
    while True:
        others = exits(member, number)
        others.pop(member.rank, None)
        failed = [rank for rank, code in others.items() if code not in (EXIT_DONE, EXIT_PREEMPTED)]
        if min(failed, default=member.rank) < member.rank:
            return True
        if len(others) == member.pods - 1:
            return False
        if member.newest() > number:
            return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(POLL_S)  # a shared file system sends no notification


def _claim_newest(member: Member, *, save_s: float) -> int:
    while True:
        number = member.newest()
        if number and not _is_given_up(member, number) and _claim(member, number):
            return number
        _wait_for_saves(member, number, save_s=save_s)
        delay_s = FIRST_S + STEP_S * min(member.rank, MAX_STEPS) if member.rank else 0.0
        until_s = time.monotonic() + delay_s
        while time.monotonic() < until_s and member.newest() == number:
            time.sleep(POLL_S)  # another pod may begin the start
        if member.newest() == number:
            took = take_next(member.place)
            member.log(f"begins start {took}")


def _has_other(member: Member, number: int) -> bool:
    """Whether another pod has the rank of this pod in a start."""
    with contextlib.suppress(FileNotFoundError):
        return (member.folder(number) / str(member.rank)).read_text() != member.pod
    return False


def _is_given_up(member: Member, number: int) -> bool:
    return (member.folder(number) / GIVEN_UP).exists()


def _wait_for_saves(member: Member, number: int, *, save_s: float) -> None:
    """Wait until pods of an earlier start have finished their saves, because the next start would end them."""
    if exits(member, number).get(member.rank) != EXIT_PREEMPTED:
        return  # the earlier pod was killed or failed: the other pods cannot save, and may hang
    until_s = time.monotonic() + save_s
    while time.monotonic() < until_s and member.newest() == number:
        members = min(len(_claimed(member, number)), workers_of_start(member, number))
        if len(exits(member, number)) == members:
            return
        time.sleep(POLL_S)  # a shared file system sends no notification


def _missing(member: Member, number: int, settling: Settling) -> list[int]:
    """Return the ranks for which a start still waits."""
    claimed = _claimed(member, number)
    missing = sorted(set(range(member.pods)) - claimed)
    if not member.sizes:
        return missing
    if member.rank == 0 and (settling.is_over(len(claimed)) or not missing):
        decide_size(member.folder(number), claimed, member.sizes)
    return (missing or [0]) if read_size(member.folder(number)) is None else []


def _claim(member: Member, number: int) -> bool:
    """Claim this pod's rank in a start; False if another pod has the rank, or the start began without this pod."""
    decided = read_size(member.folder(number)) if member.sizes else None
    if decided is not None and member.rank >= decided[1]:
        return False
    path = member.folder(number) / str(member.rank)
    return _create(path, member.pod) or path.read_text() == member.pod


def _create(path: Path, content: str) -> bool:
    """Create a file with its content in one step; return False if the file exists."""
    path.parent.mkdir(exist_ok=True)
    handle, made = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(content)
        # Create a link, not a rename: a link fails if the name exists, also on NFS.
        os.link(made, path)
    except FileExistsError:
        return False
    finally:
        Path(made).unlink(missing_ok=True)
    return True


def _claimed(member: Member, number: int) -> set[int]:
    with contextlib.suppress(FileNotFoundError):
        names = [path.name for path in member.folder(number).iterdir()]
        return {int(name) for name in names if name.isdecimal()}
    return set()


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ", ".join(map(str, ranks[:SHOWN])) + more
