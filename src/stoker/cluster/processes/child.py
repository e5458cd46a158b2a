"""A child process in a session of its own, ended with everything that it started there."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from stoker.core.errors import Plain, UserError
from stoker.core.files import full_disk_is_named

FIRST_LOOK_S, LAST_LOOK_S = 0.001, 0.05
"""Pauses between two looks at a child that is waited for, seconds; each is twice the one before."""

_SHIM = Path(__file__).with_name("exec_shim.py")


class Child:
    """A process, its session and its process group, which all have the same number.

    A child that has ended keeps its number until it is reaped, so a signal never reaches a process of
    somebody else: `code` kills what is left of the group before it reaps the child, and nothing is
    sent to a child that is reaped. All methods may be called from any thread.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        output: int | Path | None = None,
        pass_fds: Sequence[int] = (),
        cores: Sequence[int] = (),
        parent_death: signal.Signals | None = signal.SIGKILL,
        ready_file: Path | None = None,
        ends_group: bool = True,
    ) -> None:
        """Start it.

        Args:
            name: For messages, e.g. `worker 1`.
            argv: Program and arguments. With `parent_death` or `cores`, a program that cannot be
                started is exit code 127, with the reason as its last line.
            environ: The whole environment; None: that of this process.
            stdin: `DEVNULL`; None: that of this process; or `PIPE`: `close_input` closes it, and so does
                the end of this process.
            output: None: stdout and stderr of this process. A descriptor or `DEVNULL`: for stdout.
                `PIPE`: both as the stream `output`. A path: both into this file.
            pass_fds: Descriptors that it inherits under their numbers.
            cores: The only cores that it may use; empty: all.
            parent_death: The signal that it gets when the thread that starts it ends, e.g. because
                this process is killed. None: no signal.
            ready_file: Written by the child when it is ready; a file of this name is removed first.
            ends_group: Whether what it started is killed when it has ended.

        Raises:
            UserError: the limits of processes, memory or open files do not allow it; or the disk of
                its log is full.
            OSError: without `parent_death` and `cores`: the program cannot be started.
        """
        self.name = name
        self._ready_file, self._ends_group = ready_file, ends_group
        self._lock = threading.RLock()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
        if parent_death or cores:
            shim = [sys.executable, "-S", "-E", str(_SHIM), str(os.getpid())]
            argv = [*shim, str(int(parent_death or 0)), ",".join(map(str, cores)) or "-", *argv]
        both = isinstance(output, Path) or output == subprocess.PIPE
        with contextlib.ExitStack() as stack:
            if isinstance(output, Path):
                stack.enter_context(full_disk_is_named(output))
                output = stack.enter_context(output.open("wb")).fileno()
            try:
                self._popen = subprocess.Popen(
                    argv,
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT if both else None,
                    bufsize=0,
                    env=environ,
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
            except OSError as error:
                raise refused(name, error) from None

    @property
    def pid(self) -> int:
        """Its process id, and that of its session and group."""
        return self._popen.pid

    @property
    def output(self) -> IO[bytes]:
        """Its stdout and stderr, if started with `PIPE`."""
        assert self._popen.stdout is not None
        return self._popen.stdout

    @property
    def is_ready(self) -> bool:
        """Whether its ready file exists."""
        return self._ready_file is not None and self._ready_file.is_file()

    def has_ended(self) -> bool:
        """Whether it has ended; it is not reaped, and what it started may go on."""
        which = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with self._lock:
            reaped = self._popen.returncode is not None
            return reaped or os.waitid(os.P_PID, self.pid, which) is not None

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. Reaps it when it has ended."""
        with self._lock:
            if self._popen.returncode is None and self.has_ended():
                if self._ends_group:
                    self._signal_group(signal.SIGKILL)
                self._popen.wait()
                self.close_input()
            return self._popen.returncode

    def wait(self, timeout_s: float = math.inf) -> int | None:
        """Wait for its end; its exit code, None if it still runs after this time."""
        _wait_until(lambda: self.code is not None, timeout_s)
        return self.code

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait for its ready file; False if it has ended, or after this time."""
        _wait_until(lambda: self.is_ready or self.has_ended(), timeout_s)
        return self.is_ready

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        with self._lock:
            if self._popen.returncode is None:
                os.kill(self.pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """Send a signal to it and to everything that it started in its group."""
        with self._lock:
            if self._popen.returncode is None:
                self._signal_group(number)

    def kill(self) -> None:
        """Kill it, and everything that it started in its group."""
        self.send_group(signal.SIGKILL)

    def tell(self, line: str) -> None:
        """Write a line to its standard input, which is a `PIPE`.

        Raises:
            BrokenPipeError: it does not read any more.
        """
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{line}\n".encode())

    def close_input(self) -> None:
        """Close its standard input, which asks some programs to end."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()

    def end(self, grace_s: float) -> bool:
        """Wait for its end, and kill it after this time; whether it ended in time."""
        in_time = self.wait(grace_s) is not None
        self.kill()
        self.wait()
        return in_time

    def wait_for_group(self, timeout_s: float) -> None:
        """Wait until it and everything that it started in its group has ended, at most this time."""
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


def _wait_until(claim: Callable[[], bool], timeout_s: float) -> None:
    end_s, pause_s = time.monotonic() + timeout_s, FIRST_LOOK_S
    while not claim() and time.monotonic() < end_s:
        time.sleep(pause_s)  # /proc and files send no notification
        pause_s = min(2 * pause_s, LAST_LOOK_S)


def how_it_ended(code: int) -> str:
    """A clause about an exit code; a negative code is the number of a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def refused(name: str, error: OSError) -> Exception:
    """The error to raise if a child cannot be started: the limit, if one was reached.

    Args:
        name: Of the child.
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
