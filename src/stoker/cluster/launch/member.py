"""One process of a group: its output, its end, and its heartbeats.

A heartbeat is one JSON message a second, over an inherited socket.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from stoker.cluster.processes import Child, Lines, ProcessOptions, refused

FD_VARIABLE = "STOKER_HEARTBEAT_FD"
"""Environment variable: the descriptor of the worker's end of the socket."""

EVERY_S = 1.0
"""Pause between two heartbeats, seconds."""

Phase = Literal["start", "train", "validate", "save", "serve", "done"]
"""The phase of a worker. Only in `train` must its step grow within the limit of the watchdog; a process
that serves the chief of parameter servers has no steps of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One heartbeat."""

    rank: int
    """Rank of the worker."""

    phase: Phase
    """The worker's phase."""

    step: int
    """Number of optimizer updates."""

    at_s: float
    """The worker's monotonic clock, seconds."""

    line: str = ""
    """Its last progress line."""

    share: float | None = None
    """Progress from 0 to 1; None if unknown."""

    def to_message(self) -> bytes:
        """The message to send."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def read_beat(message: bytes) -> Beat:
    """The heartbeat in a message."""
    return Beat(**json.loads(message))


MESSAGE_BYTES = 1 << 16
"""Longest message of a heartbeat."""

STACKS = signal.SIGUSR2
"""Signal that makes a worker write the stacks of its threads; Slurm uses SIGUSR1 to announce the end."""

Log = Callable[[str], None]
"""Receives one line for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The command of one process in a group."""

    name: str
    """Its name for messages, e.g. `worker 1`."""

    argv: tuple[str, ...]
    """Program and arguments."""

    environ: Mapping[str, str]
    """The complete environment."""

    cores: tuple[int, ...] = ()
    """The only cores that it may use; empty: all."""

    serves: bool = False
    """Whether it works for another process and ends only on request."""

    alone: bool = False
    """Whether it may be restarted while the others continue."""

    has_heartbeats: bool = True
    """Whether it gets the descriptor for heartbeats; its child processes would use it as their own."""


class Member:
    """A running process."""

    def __init__(self, command: Command, log: Log) -> None:
        """Start it.

        Args:
            command: Its command.
            log: Receives each line that it prints.

        Raises:
            UserError: the kernel refuses a process or its descriptors.
        """
        self.name, self.serves = command.name, command.serves
        self.code: int | None = None
        try:
            # Messages arrive complete or not at all.
            self.beats, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise refused(command.name, error) from None
        self.beats.setblocking(False)
        fd = theirs.fileno() if command.has_heartbeats else None
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.enter_context(self.beats)
            self.child = Child(
                command.name,
                command.argv,
                ProcessOptions(
                    environ={**command.environ, **({FD_VARIABLE: str(fd)} if fd else {})},
                    output=subprocess.PIPE,
                    pass_fds=[fd] if fd else [],
                    cores=command.cores,
                ),
            )
            on_failure.pop_all()
        self.lines = Lines(self.child.output, lambda line: log(f"[{command.name}] {line}"))

    def read_beats(self) -> tuple[list[Beat], bool]:
        """The received heartbeats, and whether more may follow."""
        beats = []
        try:
            while message := self.beats.recv(MESSAGE_BYTES):
                beats.append(read_beat(message))
        except BlockingIOError:
            return beats, True
        except ConnectionResetError:
            pass
        return beats, False

    def has_ended(self) -> bool:
        """Whether it has ended; its last lines are then read."""
        if self.code is None and self.child.code is not None:
            self.lines.read()
            self.lines.flush()
            self.code = self.child.code
        return self.code is not None

    def ask_for_stacks(self) -> None:
        """Make it write the Python stacks of its threads, even if it is stopped."""
        self.child.send(STACKS)
        self.child.send(signal.SIGCONT)

    def let_go(self) -> None:
        """Signal that the work of all members is done; it waits for that."""
        with contextlib.suppress(OSError):
            self.beats.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close its descriptors; it must have ended."""
        self.beats.close()
        self.child.output.close()
