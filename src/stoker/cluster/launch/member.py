"""One process of a group: started in a session of its own, listened to, ended with all it began."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.cluster.launch.beats import FD_VARIABLE, Beat, read_beat
from stoker.core.errors import Plain, UserError

TAIL_LINES = 20
"""Last lines of a worker's output that are kept to tell of its end."""

LINE_BYTES = 1 << 16
"""Longest line that is waited for."""

STACKS = signal.SIGUSR2
"""At which a worker writes the stacks of its threads; SIGUSR1 is Slurm's notice of the end."""

_SHIM = Path(__file__).with_name("exec_shim.py")

Log = Callable[[str], None]
"""Takes one line for a person."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What one process of a group is to be."""

    name: str
    """How a person calls it, e.g. `worker 1`."""

    argv: tuple[str, ...]
    """Program and arguments."""

    environ: Mapping[str, str]
    """Its whole environment."""

    cores: tuple[int, ...] = ()
    """The only cores that it may use; empty: any."""

    serves: bool = False
    """Whether it works for another one and ends only when it is ended."""

    alone: bool = False
    """Whether it may be started again while the others go on."""


class Member:
    """A process that runs."""

    def __init__(self, command: Command, log: Log) -> None:
        """Start it.

        Raises:
            UserError: the kernel refuses a process or its descriptors.
        """
        self.name, self.serves = command.name, command.serves
        self.code: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._log = log
        self._said = bytearray()
        try:
            # Messages come whole or not at all.
            self.beats, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _refused(command.name, error) from None
        with theirs:
            try:
                self._process = _start(command, theirs.fileno())
            except OSError as error:
                self.beats.close()
                raise _refused(command.name, error) from None
        assert self._process.stdout is not None
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.beats.setblocking(False)

    @property
    def pid(self) -> int:
        """Its process id, and that of its session and group."""
        return self._process.pid

    def read_output(self) -> bool:
        """Pass on the lines that have come; False where there will be no more."""
        while True:
            block = self.output.read(LINE_BYTES)
            if not block:
                if block == b"":
                    self._say_rest()
                return block is None
            *lines, rest = (bytes(self._said) + block).split(b"\n")
            self._said[:] = rest
            for line in lines:
                self._say(line)
            if len(self._said) > LINE_BYTES:
                self._say_rest()

    def read_beats(self) -> tuple[list[Beat], bool]:
        """The beats that have come, and whether more may come."""
        beats = []
        try:
            while message := self.beats.recv(LINE_BYTES):
                beats.append(read_beat(message))
        except BlockingIOError:
            return beats, True
        except ConnectionResetError:
            pass
        return beats, False

    def has_ended(self) -> bool:
        """Whether it is over; what it had started is then killed, and its last lines are read."""
        if self.code is None and os.waitid(
            os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            # It is not reaped yet, so nobody else can have been given its number.
            self.kill()
            self.code = self._process.wait()
            self.read_output()
            self._say_rest()
        return self.code is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it alone: what it has started is its own to end."""
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and all that it has started in its group."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def ask_for_stacks(self) -> None:
        """Have it write the Python stacks of its threads, also where it was stopped."""
        self.send(STACKS)
        self.send(signal.SIGCONT)

    def let_go(self) -> None:
        """Tell it that everyone's work is done, which it waits for."""
        with contextlib.suppress(OSError):
            self.beats.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give its descriptors back; it must have ended."""
        self.beats.close()
        self.output.close()

    def _say_rest(self) -> None:
        if self._said:
            self._say(bytes(self._said))
            self._said.clear()

    def _say(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        self.tail.append(line)
        self._log(f"[{self.name}] {line}")


def _start(command: Command, beats: int) -> subprocess.Popen[bytes]:
    cores = ",".join(map(str, command.cores)) or "-"
    shim = [sys.executable, "-S", "-E", str(_SHIM), str(os.getpid()), cores]
    return subprocess.Popen(
        [*shim, *command.argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env={**command.environ, FD_VARIABLE: str(beats)},
        pass_fds=[beats],
        start_new_session=True,
    )


def _refused(name: str, error: OSError) -> UserError:
    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        raise error
    return UserError(
        f"the kernel must allow {name} to be started",
        got=Plain(error.strerror or str(error)),
        fix="Raise the limits of open files (`ulimit -n`) and processes (`ulimit -u`), or start "
        "fewer workers.",
    )
