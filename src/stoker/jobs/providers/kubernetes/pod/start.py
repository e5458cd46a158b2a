"""Pods of a job agree on the start that they belong to, by files in the job's folder.

A scheduler that starts all tasks together allocates one number for them (`stoker job-start`). A cluster replaces single
pods, so here each pod claims its rank in the newest start:

    incarnations/N              the start exists
    incarnations/N.pods/RANK    UID of the pod that has this rank in it, created exclusively
    incarnations/N.pods/RANK.exit   how its command has ended
    incarnations/N.pods/given-up    a pod has waited for the others for too long: the start never begins

A pod that finds its rank claimed is a replacement: it begins the next start. All others of the old one
see that (`Superseded`), end, are replaced themselves, and claim their ranks in the new one.
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
"""How long a pod waits before it begins a start, seconds: rank 0 not at all, higher ranks longer, so that usually
one of them begins it for all. Two starts would only use up one more number."""

LOG_EVERY_S = 60.0
"""Interval at which a waiting pod logs that it waits, seconds."""

GIVEN_UP = "given-up"
"""File of an abandoned start. Without it, a later pod that replaces one which gave up would complete the start, and
work alone; so would one of a second submission."""

SHOWN = 10
"""Most ranks in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One pod of a job."""

    place: Path
    """The job's folder."""

    rank: int
    pod: str
    """Its UID, unique in the cluster forever."""

    pods: int
    """Number of pods of a start; of an elastic job the most."""

    sizes: tuple[int, ...] = ()
    """Numbers of workers that a start of an elastic job may have; empty: every start has `pods`."""

    log: Callable[[str], None]

    def folder(self, number: int) -> Path:
        """Return the folder of the claims of a start."""
        return self.place / INCARNATIONS / f"{number}.pods"

    def newest(self) -> int:
        """Return the number of the newest start; 0 before the first."""
        with contextlib.suppress(FileNotFoundError):
            names = (path.name for path in (self.place / INCARNATIONS).iterdir())
            return max((int(name) for name in names if name.isdecimal()), default=0)
        return 0


def join_start(member: Member, *, save_s: float, start_s: float) -> Incarnation:
    """Return the start of this pod and all others, once all have joined.

    Args:
        member: This pod.
        save_s: How long pods of an earlier start may still save.
        start_s: Longest wait for all pods.

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
                # For example from a node that was cut off: it must not take the rank back, or the two would begin start after start.
                member.log("another pod has this one's rank: ends")
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
                fix="The others have freed their GPUs. `stoker jobs show` says why pods wait; request fewer "
                "workers, or set `queue` of the target: Kueue starts all pods together.",
            )
        if time.monotonic() - logged_s > LOG_EVERY_S:
            logged_s = time.monotonic()
            member.log(f"waits for the pods of worker {_ranks(missing)}")
        time.sleep(POLL_S)  # a shared file system sends no notification


def workers_of_start(member: Member, number: int) -> int:
    """Return how many workers a start has that has begun; pods with a higher rank are not needed."""
    decided = read_size(member.folder(number)) if member.sizes else None
    return member.pods if decided is None else decided[0]


def write_exit(member: Member, number: int, code: int) -> None:
    """Record how the command of this pod ended; a failing disk loses it."""
    with contextlib.suppress(OSError):
        _create(member.folder(number) / f"{member.rank}.exit", str(code))


def exits(member: Member, number: int) -> dict[int, int]:
    """Return rank -> exit code of the pods of a start whose command has ended."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in member.folder(number).glob("*.exit"):
            with contextlib.suppress(OSError, ValueError):
                found[int(path.stem)] = int(path.read_text())
    return found


def all_done(member: Member, number: int, *, longest_s: float) -> bool:
    """Wait until the commands of all pods of a start have ended; return whether all are done.

    A pod that ended as done on its own would not be replaced, and the others would miss it in the next start.
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
    """Wait for a sign that another pod of the start explains, or counts, the failure of this pod.

    That is a pod that was killed (it has recorded no end, and its replacement begins the next start), or, of several that
    failed, the one with the lowest rank: pods that fail together count exactly once.
    One that has saved does not count: it may have done so because of this failure.
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
    """Whether another pod has this one's rank in a start."""
    with contextlib.suppress(FileNotFoundError):
        return (member.folder(number) / str(member.rank)).read_text() != member.pod
    return False


def _is_given_up(member: Member, number: int) -> bool:
    return (member.folder(number) / GIVEN_UP).exists()


def _wait_for_saves(member: Member, number: int, *, save_s: float) -> None:
    """Let pods of an earlier start finish their saves: the next start would end them."""
    if exits(member, number).get(member.rank) != EXIT_PREEMPTED:
        return  # it was killed or failed: the others have nothing to save, and may hang
    until_s = time.monotonic() + save_s
    while time.monotonic() < until_s and member.newest() == number:
        members = min(len(_claimed(member, number)), workers_of_start(member, number))
        if len(exits(member, number)) == members:
            return
        time.sleep(POLL_S)  # a shared file system sends no notification


def _missing(member: Member, number: int, settling: Settling) -> list[int]:
    """Return the ranks that a start waits for."""
    claimed = _claimed(member, number)
    missing = sorted(set(range(member.pods)) - claimed)
    if not member.sizes:
        return missing
    if member.rank == 0 and (settling.is_over(len(claimed)) or not missing):
        decide_size(member.folder(number), claimed, member.sizes)
    return (missing or [0]) if read_size(member.folder(number)) is None else []


def _claim(member: Member, number: int) -> bool:
    """Claim this pod's rank in a start; False if another pod has it, or an elastic start has begun without it."""
    decided = read_size(member.folder(number)) if member.sizes else None
    if decided is not None and member.rank >= decided[1]:
        return False
    path = member.folder(number) / str(member.rank)
    return _create(path, member.pod) or path.read_text() == member.pod


def _create(path: Path, content: str) -> bool:
    """Create a file with its content in one step, unless it is there."""
    path.parent.mkdir(exist_ok=True)
    handle, made = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(content)
        # Unlike a rename, a link refuses an existing name, also on NFS.
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
