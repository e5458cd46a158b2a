"""One attempt to train with several processes: either all of them succeed, or all are ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.cluster.launch.member import Beat, Command, Log, Member
from stoker.cluster.launch.watchdog import Hang, Watchdog
from stoker.cluster.processes import Child, ProcessOptions, how_it_ended
from stoker.core.errors import (
    EXIT_CHECK,
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_SUPERSEDED,
    EXIT_USER,
)
from stoker.core.signals import ASKING, heard


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a group ended before its work was done."""

    rank: int
    """Rank of the process that caused the end; if several processes did, the rank of the first one."""

    name: str
    """Name of the process that caused the end, or names of several."""

    reason: str
    """A clause, e.g. `was killed by SIGKILL`."""

    code: int | None
    """Exit code, negative for a signal; None if it hung."""

    tail: tuple[str, ...]
    """The last lines that the process printed."""

    @property
    def is_final(self) -> bool:
        """Whether another attempt would end in the same way."""
        return self.code in (EXIT_USER, EXIT_CHECK, EXIT_SUPERSEDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt ended."""

    failure: Failure | None
    """Why the group failed; None if all work was done, or if the launcher itself got a signal to end."""

    signaled: bool
    """Whether the launcher itself got a signal to end."""

    preempted: bool
    """Whether a worker was preempted before the work was done."""

    began: bool
    """Whether any worker had begun to train."""

    step: int
    """The highest step that a heartbeat has reported."""


class StopRequest:
    """Counts how often this process got a signal to end."""

    def __init__(self, wake: int) -> None:
        """Start at 0.

        Args:
            wake: Descriptor that becomes readable whenever a signal arrives.
        """
        self.times = 0
        self.wake = wake

    def clear(self) -> None:
        """Read all bytes from the descriptor, so that it is no longer readable."""
        with suppress(BlockingIOError):
            os.read(self.wake, 64)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Count the termination signals, including Ctrl-C, inside the `with` block."""
    wake, pull = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    stop = StopRequest(wake)

    def count(_: signal.Signals) -> None:
        stop.times += 1
        with suppress(BlockingIOError):
            os.write(pull, b"!")

    try:
        with heard([*ASKING, signal.SIGINT], count):
            yield stop
    finally:
        os.close(wake)
        os.close(pull)


POLL_S = 0.2
"""Maximum pause between two checks for ended workers, seconds. Output and heartbeats are read as soon as they
arrive."""

SETTLE_S = 0.5
"""Pause between the first failure and the search for its cause, seconds. The cause may be another worker: if a worker
is killed, its peers fail, too."""

FAILURE_GRACE_S = 3.0
"""After a worker has failed, the other workers get this many seconds to end. They cannot continue without the failed
one."""

STACKS_S = 2.0
"""A worker that hangs gets this many seconds to write the stacks of its threads."""

OWN_PAUSE_S = 5.0
"""If more seconds than this pass between two checks, the launcher itself was not running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimits:
    """Limits after which a group's processes are ended or restarted."""

    watchdog_s: float
    """Maximum time without a heartbeat, or without a step, seconds."""

    grace_s: float
    """Maximum time between a request to end and the exit of all processes, seconds."""

    alone_restarts: int
    """Maximum number of restarts of processes with `Command.alone`, in total."""

    unheard_grace_s: float = FAILURE_GRACE_S
    """Replaces `grace_s` until a heartbeat reports that a process trains, seconds: before that, there is nothing to
    save. For processes without heartbeats it must equal `grace_s`."""


class Group:
    """Processes that start and end together."""

    def __init__(
        self,
        commands: Sequence[Command],
        limits: GroupLimits,
        *,
        stop: StopRequest,
        log: Log,
        on_beat: Callable[[Beat], None],
    ) -> None:
        """Start all processes; if one cannot be started, end the started ones.

        Args:
            commands: The commands to start; the rank of a process is its index here.
            limits: When processes are ended or restarted.
            stop: Counts the termination signals that this process receives.
            log: Receives the output lines of all processes, and the events.
            on_beat: Receives every heartbeat.

        Raises:
            UserError: the kernel does not allow another process.
        """
        self._stop, self._times_signaled, self._grace_s = stop, 0, limits.grace_s
        self._unheard_grace_s = limits.unheard_grace_s
        self._log, self._on_beat = log, on_beat
        self._commands = list(commands)
        self._members: list[Member] = []
        self._again_left = limits.alone_restarts
        self._watchdog = Watchdog(limits.watchdog_s)
        self._failed: list[Member] = []
        self._failed_s = self._deadline_s = float("inf")
        self._failure: Failure | None = None
        self._dismissed = self._began = False
        self._step = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(stop.wake, selectors.EVENT_READ, stop.clear)
        self._orphan_killer = _OrphanKiller()
        try:
            for rank in range(len(commands)):
                self._start(rank)
        except BaseException:
            self._kill()
            self._close()
            raise

    def run(self) -> Outcome:
        """Watch the processes until all have ended; return how the attempt ended."""
        try:
            looked_s = time.monotonic()
            while self._live:
                self._listen(POLL_S)
                now_s = time.monotonic()
                if now_s - looked_s > OWN_PAUSE_S:
                    self._watchdog.forgive(now_s - looked_s)
                looked_s = now_s
                self._look(now_s)
        except BaseException:
            self._kill()
            raise
        finally:
            self._close()
        if self._failed and self._failure is None and not self._times_signaled:
            self._failure = self._cause(time.monotonic())
        signaled = self._times_signaled > 0
        taken_away = self._failure is not None and self._failure.code == EXIT_PREEMPTED
        return Outcome(
            failure=self._failure,
            signaled=signaled,
            preempted=bool(self._failed) if signaled else taken_away,
            began=self._began,
            step=self._step,
        )

    @property
    def _live(self) -> list[Member]:
        return [member for member in self._members if member.code is None]

    def _start(self, rank: int) -> None:
        member = Member(self._commands[rank], self._log)
        self._members[rank : rank + 1] = [member]
        self._orphan_killer.began(member.child.pid)
        self._watchdog.began(rank, now_s=time.monotonic())
        for stream, read in (
            (member.child.output, lambda: self._read_output(member)),
            (member.beats, lambda: self._read_beats(member, rank)),
        ):
            self._selector.register(stream, selectors.EVENT_READ, read)

    def _listen(self, longest_s: float) -> None:
        for key, _ in self._selector.select(longest_s):
            key.data()

    def _read_output(self, member: Member) -> None:
        if not member.lines.read():
            self._selector.unregister(member.child.output)

    def _read_beats(self, member: Member, rank: int) -> None:
        beats, more = member.read_beats()
        for beat in beats:
            self._began |= beat.phase not in ("start", "serve")
            self._step = max(self._step, beat.step)
            if beat.rank == rank:
                self._watchdog.heard(beat, now_s=time.monotonic())
                self._on_beat(beat)
        if not more:
            self._selector.unregister(member.beats)

    def _look(self, now_s: float) -> None:
        self._see_ends(now_s)
        if self._stop.times > self._times_signaled:
            self._end_as_asked(now_s)
        if self._deadline_s < float("inf"):
            if now_s > self._deadline_s:
                self._log(f"{_names(self._live)} did not end in time: killed")
                self._deadline_s = now_s + self._grace_s
                self._kill()
        elif now_s - self._failed_s > SETTLE_S:
            self._give_up(self._cause(now_s), now_s)
        elif hang := self._watchdog.hang(now_s):
            self._log_stacks(hang)
            self._give_up(self._hung(hang), now_s)
        elif self._watchdog.all_done():
            self._dismiss(now_s)

    def _see_ends(self, now_s: float) -> None:
        for rank, member in enumerate(self._members):
            if member.code is not None or not member.has_ended():
                continue
            self._orphan_killer.ended(member.child.pid)
            # A worker whose work is done may still exit with an error, because a peer is already gone.
            done = self._dismissed or self._watchdog.is_done(rank)
            self._watchdog.ended(rank)
            if member.code == EXIT_DONE or done:
                continue
            if self._may_start_alone(rank):
                self._start_alone(rank)
                continue
            self._failed.append(member)
            self._failed_s = min(self._failed_s, now_s)

    def _may_start_alone(self, rank: int) -> bool:
        ending = self._failed or self._times_signaled or self._deadline_s < float("inf")
        return self._commands[rank].alone and self._again_left > 0 and not ending

    def _start_alone(self, rank: int) -> None:
        self._again_left -= 1
        member = self._members[rank]
        how = how_it_ended(member.code or 0)
        self._log(
            f"{member.name} {how}; it is started again (and after that {self._again_left} more times at most)"
        )
        self._forget(member)
        self._start(rank)

    def _forget(self, member: Member) -> None:
        for stream in (member.child.output, member.beats):
            with contextlib.suppress(KeyError):
                self._selector.unregister(stream)
        member.close()

    def _dismiss(self, now_s: float) -> None:
        self._dismissed = True
        self._deadline_s = now_s + self._grace_s
        for member in self._live:
            member.let_go()
            if member.serves:
                member.child.send(signal.SIGTERM)

    def _end_as_asked(self, now_s: float) -> None:
        if not self._times_signaled:
            # Until training begins, TensorFlow ignores the signal, and there is nothing to save.
            grace_s = self._grace_s if self._began else self._unheard_grace_s
            self._log(f"ending on a signal: workers save and end within {grace_s:g} s")
            self._deadline_s = min(self._deadline_s, now_s + grace_s)
        self._times_signaled = self._stop.times
        for member in self._live:
            member.child.send(signal.SIGTERM)

    def _give_up(self, failure: Failure, now_s: float) -> None:
        self._failure = failure
        self._deadline_s = now_s + FAILURE_GRACE_S
        for member in self._live:
            member.child.send(signal.SIGTERM)

    def _cause(self, now_s: float) -> Failure:
        if silent := self._watchdog.silent(now_s):
            hang = Hang(ranks=silent, why="no heartbeat, and others fail")
            self._log_stacks(hang)
            return self._hung(hang)
        # A worker that was killed by a signal from outside is the cause. An error or TensorFlow's own abort may be
        # only an effect.
        by_signal = [m for m in self._failed if (m.code or 0) < 0 and m.code != -signal.SIGABRT]
        member = (by_signal or self._failed)[0]
        return Failure(
            rank=self._members.index(member),
            name=member.name,
            reason=how_it_ended(member.code or 0),
            code=member.code,
            tail=tuple(member.lines.tail),
        )

    def _hung(self, hang: Hang) -> Failure:
        members = [self._members[rank] for rank in hang.ranks]
        return Failure(
            rank=hang.ranks[0],
            name=_names(members),
            reason=f"hangs: {hang.why}",
            code=None,
            tail=tuple(members[0].lines.tail),
        )

    def _log_stacks(self, hang: Hang) -> None:
        names = _names([self._members[rank] for rank in hang.ranks])
        self._log(f"{names}: {hang.why}; the stacks of all workers follow")
        for member in self._live:
            member.ask_for_stacks()
        until_s = time.monotonic() + STACKS_S
        while (left_s := until_s - time.monotonic()) > 0:
            self._listen(left_s)

    def _kill(self) -> None:
        for member in self._live:
            member.child.kill()

    def _close(self) -> None:
        for member in self._members:
            while not member.has_ended():
                # The process was killed; the kernel needs a moment to free its memory.
                time.sleep(0.01)
            self._orphan_killer.ended(member.child.pid)
            member.close()
        self._selector.close()
        self._orphan_killer.close()


def _names(members: Sequence[Member]) -> str:
    return " and ".join(member.name for member in members)


class _OrphanKiller:
    """A process that ends the workers if this process is killed; see `orphan_killer.py`."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("orphan_killer.py"))
        self._child = Child(
            "the orphan killer",
            [sys.executable, "-S", "-E", program],
            ProcessOptions(stdin=subprocess.PIPE, parent_death=None),
        )

    def began(self, group: int) -> None:
        self._tell(f"+{group}")

    def ended(self, group: int) -> None:
        self._tell(f"-{group}")

    def close(self) -> None:
        self._child.close_input()
        self._child.wait()

    def _tell(self, line: str) -> None:
        # The orphan killer may be gone. If the launcher is then killed, the kernel still kills the workers; only their
        # child processes could remain.
        with contextlib.suppress(BrokenPipeError):
            self._child.tell(line)
