"""Runs a child process in a separate session, and ends it together with everything that it started there."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stoker.core.errors import Plain, UserError
from stoker.core.files import full_disk_is_named

FIRST_LOOK_S, LAST_LOOK_S = 0.001, 0.05
"""First and longest pause between two checks while this process waits for a child, seconds; pauses double."""

_SHIM = Path(__file__).with_name("exec_shim.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOptions:
    """Options of a child: its environment, its streams, and how it ends."""

    environ: Mapping[str, str] | None = None
    """The complete environment of the child; None: the environment of this process."""

    stdin: int | None = subprocess.DEVNULL
    """Standard input of the child: `DEVNULL`; None for the input of this process; or `PIPE`, which is closed by
    `Child.close_input` and by the end of this process."""

    output: int | Path | None = None
    """Where stdout and stderr go. None: to those of this process. A descriptor or `DEVNULL`: stdout goes there,
    and stderr to that of this process. `PIPE`: both go to the stream `Child.output`. A path: both go to this file."""

    pass_fds: Sequence[int] = ()
    """Descriptors that the child inherits with the same numbers."""

    cores: Sequence[int] = ()
    """Numbers of the cores that the child may use; empty: all cores."""

    parent_death: signal.Signals | None = signal.SIGKILL
    """The signal that the child gets when the thread that started it ends, e.g. because this process is killed. None:
    no signal."""

    ready_file: Path | None = None
    """A file that the child writes when it is ready; an existing file of this name is removed first."""

    ends_group: bool = True
    """Whether the child's own child processes are killed when the child has ended."""


class Child:
    """A child process, its session and its process group, which all have the same number.

    The kernel does not reuse the number of an ended child until the child is reaped. `code` kills the rest of the
    group before it reaps the child, and no signal is sent to a reaped child. So a signal never reaches another process
    that gets the same number. All methods may be called from any thread.
    """

    def __init__(
        self, name: str, argv: Sequence[str], options: ProcessOptions = ProcessOptions()
    ) -> None:
        """Start the child.

        Args:
            name: Name of the child for messages, e.g. `worker 1`.
            argv: Program and arguments. If the program cannot be started and the options have `parent_death` or
                `cores`, the child prints the reason as its last line and exits with code 127.
            options: Options of the child.

        Raises:
            UserError: the limits of processes, memory or open files do not allow another process, or the disk of its
                log is full.
            OSError: the program cannot be started, and the options have neither `parent_death` nor `cores`.
        """
        self.name = name
        self._ready_file, self._ends_group = options.ready_file, options.ends_group
        self._lock = threading.RLock()
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            output = options.output
            both = isinstance(output, Path) or output == subprocess.PIPE
            if isinstance(output, Path):
                stack.enter_context(full_disk_is_named(output))
                output = stack.enter_context(output.open("wb")).fileno()
            try:
                self._popen = subprocess.Popen(
                    _with_shim(argv, options),
                    stdin=options.stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT if both else None,
                    bufsize=0,
                    env=options.environ,
                    pass_fds=options.pass_fds,
                    start_new_session=True,
                )
            except OSError as error:
                raise refused(name, error) from None

    @property
    def pid(self) -> int:
        """The child's process ID, which is also the ID of its session and of its process group."""
        return self._popen.pid

    @property
    def output(self) -> IO[bytes]:
        """The child's stdout and stderr as one stream, if it was started with `PIPE`."""
        assert self._popen.stdout is not None
        return self._popen.stdout

    @property
    def is_ready(self) -> bool:
        """Whether the child's ready file exists."""
        return self._ready_file is not None and self._ready_file.is_file()

    def has_ended(self) -> bool:
        """Whether the child has ended. Does not reap the child; its own child processes may still run."""
        which = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with self._lock:
            reaped = self._popen.returncode is not None
            return reaped or os.waitid(os.P_PID, self.pid, which) is not None

    @property
    def code(self) -> int | None:
        """The child's exit code, negative for a signal; None while it runs. Reaps the child when it has ended."""
        with self._lock:
            if self._popen.returncode is None and self.has_ended():
                if self._ends_group:
                    self._signal_group(signal.SIGKILL)
                self._popen.wait()
                self.close_input()
            return self._popen.returncode

    def wait(self, timeout_s: float = math.inf) -> int | None:
        """Wait for the child's end; return its exit code, or None if it still runs after this time."""
        _wait_until(lambda: self.code is not None, timeout_s)
        return self.code

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait for the child's ready file; return False if the child has ended, or after this time."""
        _wait_until(lambda: self.is_ready or self.has_ended(), timeout_s)
        return self.is_ready

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child alone."""
        with self._lock:
            if self._popen.returncode is None:
                os.kill(self.pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """Send a signal to the child and to everything that it started in its process group."""
        with self._lock:
            if self._popen.returncode is None:
                self._signal_group(number)

    def kill(self) -> None:
        """Kill the child, and everything that it started in its process group."""
        self.send_group(signal.SIGKILL)

    def tell(self, line: str) -> None:
        """Write a line to the child's standard input, which must be a `PIPE`.

        Raises:
            BrokenPipeError: the child no longer reads.
        """
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{line}\n".encode())

    def close_input(self) -> None:
        """Close the child's standard input, which makes some programs end."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()

    def end(self, grace_s: float) -> bool:
        """Wait for the child's end, and kill it after this time; return whether it ended in time."""
        in_time = self.wait(grace_s) is not None
        self.kill()
        self.wait()
        return in_time

    def wait_for_group(self, timeout_s: float) -> None:
        """Wait at most this time until the child, and everything that it started in its process group, has ended."""
        _wait_until(lambda: not self._group_lives(), timeout_s)

    def _group_lives(self) -> bool:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group, *_ = stat.read_text().rpartition(") ")[2].split()
                if int(group) == self.pid and state not in "ZX":
                    return True
        return False

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _with_shim(argv: Sequence[str], options: ProcessOptions) -> Sequence[str]:
    """Return the arguments of a process that sets its parent-death signal and its cores, then executes the program."""
    if not options.parent_death and not options.cores:
        return argv
    cores = ",".join(map(str, options.cores)) or "-"
    shim = [sys.executable, "-S", "-E", str(_SHIM), str(os.getpid())]
    return [*shim, str(int(options.parent_death or 0)), cores, *argv]


def _wait_until(claim: Callable[[], bool], timeout_s: float) -> None:
    end_s, pause_s = time.monotonic() + timeout_s, FIRST_LOOK_S
    while not claim() and time.monotonic() < end_s:
        time.sleep(pause_s)  # /proc and files send no notification
        pause_s = min(2 * pause_s, LAST_LOOK_S)


def how_it_ended(code: int) -> str:
    """Return a clause about an exit code; a negative code is the negated number of a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def refused(name: str, error: OSError) -> Exception:
    """Return the error for a child that cannot be started; the error names the limit, if a limit was reached.

    Args:
        name: Name of the child.
        error: Why it cannot be started.
    """
    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        return error
    return UserError(
        f"the kernel must allow {name} to be started",
        got=Plain(error.strerror or str(error)),
        fix="Raise the limits of open files (`ulimit -n`) and processes (`ulimit -u`), or start "
        "fewer processes.",
    )


TAIL_LINES = 20
"""Number of last lines of the output that are kept."""

LINE_BYTES = 1 << 16
"""Maximum length of a line, bytes; a longer line is split into pieces."""

DRAIN_S = 5.0
"""Maximum wait for the end of the output of an ended child, seconds."""

LOG_TAIL_BYTES = 4096
"""Number of bytes at the end of a log file that are searched for its last line."""


class Lines:
    """Reads the lines of a stream; `tail` holds the last lines."""

    def __init__(self, stream: IO[bytes], on_line: Callable[[str], None]) -> None:
        """Prepare a stream; nothing is read yet.

        Args:
            stream: The child's unbuffered output. It becomes non-blocking, until `follow` is called.
            on_line: Called with each line, without the line break.
        """
        self.stream = stream
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._partial = b""
        os.set_blocking(stream.fileno(), False)

    def read(self) -> bool:
        """Pass the available lines to `on_line`; return False at the end of the stream."""
        while block := self.stream.read(LINE_BYTES):
            *lines, self._partial = (self._partial + block).split(b"\n")
            for line in lines:
                self._pass_on(line)
            if len(self._partial) > LINE_BYTES:
                self.flush()
        if block == b"":
            self.flush()
        return block is None

    def flush(self) -> None:
        """Pass an incomplete last line to `on_line`."""
        if self._partial:
            self._pass_on(self._partial)
            self._partial = b""

    def follow(self) -> None:
        """Read in a thread until the end of the stream, then close it."""
        os.set_blocking(self.stream.fileno(), True)
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Wait until the thread of `follow` has passed on all output of an ended child."""
        # A process that left the child's session may keep the stream open.
        self._thread.join(DRAIN_S)

    def _follow(self) -> None:
        with self.stream:
            self.read()

    def _pass_on(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        self.tail.append(line)
        self._on_line(line)


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log file, "" if there is none, or why the file cannot be read."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = stream.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        return f"its log {log} cannot be read: {error.strerror or error}"
    return lines[-1].strip() if lines else ""
