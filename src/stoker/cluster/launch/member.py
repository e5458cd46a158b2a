"""One process of a group: reads its output and heartbeats, and notices its end.

A process sends a heartbeat every second: a JSON message over a socket that it inherits.
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
"""Environment variable with the number of the descriptor on which the worker sends its heartbeats."""

EVERY_S = 1.0
"""Pause between two heartbeats, seconds."""

Phase = Literal["start", "train", "validate", "save", "serve", "done"]
"""The phase of a worker. The watchdog requires new steps only in `train`. `serve` is the phase of a process that works
for the chief in a training with parameter servers; it has no steps of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One heartbeat."""

    rank: int
    """Rank of the worker."""

    phase: Phase
    """The worker's phase."""

    step: int
    """Number of optimizer updates so far."""

    at_s: float
    """Time on the worker's monotonic clock, seconds."""

    line: str = ""
    """The worker's last progress line."""

    share: float | None = None
    """Share of the work that is done, from 0 to 1; None if unknown."""

    def to_message(self) -> bytes:
        """Return the heartbeat as a message to send."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def read_beat(message: bytes) -> Beat:
    """Return the heartbeat that a message contains."""
    return Beat(**json.loads(message))


MESSAGE_BYTES = 1 << 16
"""Maximum size of a heartbeat's message, bytes."""

STACKS = signal.SIGUSR2
"""Signal that makes a worker write the stacks of its threads. It is not SIGUSR1, with which Slurm announces the
end of a job."""

Log = Callable[[str], None]
"""Receives one line for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The command of one process in a group."""

    name: str
    """Name of the process in messages, e.g. `worker 1`."""

    argv: tuple[str, ...]
    """Program and arguments."""

    environ: Mapping[str, str]
    """The complete environment of the process."""

    cores: tuple[int, ...] = ()
    """Numbers of the cores that the process may use; empty: all cores."""

    serves: bool = False
    """Whether the process works for a chief, and ends only when it gets a signal."""

    alone: bool = False
    """Whether the process may be restarted while the other processes continue."""

    has_heartbeats: bool = True
    """Whether the process gets the descriptor for heartbeats. False if its child processes would inherit it, and send
    heartbeats of their own."""


class Member:
    """A running process of a group."""

    def __init__(self, command: Command, log: Log) -> None:
        """Start the process.

        Args:
            command: The command of the process.
            log: Receives each line that the process prints.

        Raises:
            UserError: the kernel refuses another process, or the descriptors that it needs.
        """
        self.name, self.serves = command.name, command.serves
        self.code: int | None = None
        try:
            # This kind of socket delivers a message completely or not at all.
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
        """Return the heartbeats that have arrived, and whether more may follow."""
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
        """Whether the process has ended; if so, its last lines have been read."""
        if self.code is None and self.child.code is not None:
            self.lines.read()
            self.lines.flush()
            self.code = self.child.code
        return self.code is not None

    def ask_for_stacks(self) -> None:
        """Make the process write the Python stacks of its threads, even if it is suspended."""
        self.child.send(STACKS)
        self.child.send(signal.SIGCONT)

    def let_go(self) -> None:
        """Tell the process that the work of all members is done; until then it waits."""
        with contextlib.suppress(OSError):
            self.beats.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the descriptors of the process, which must have ended."""
        self.beats.close()
        self.child.output.close()
