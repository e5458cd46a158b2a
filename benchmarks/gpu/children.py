"""Commands as child processes: new ones, or forks of a process that has imported TensorFlow.

On a GPU every command is a new process, like a user's. On the CPU, where the suite only shows that
it still runs, TensorFlow's import (5 s) would take most of the time, so a child is a fork.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent


class TimedOutError(Exception):
    """A command did not end in time."""


class FailedError(Exception):
    """A command ended with an unexpected exit code."""


class _Process(Protocol):
    @property
    def pid(self) -> int: ...

    def exit_code(self) -> int | None: ...


@dataclass(kw_only=True)
class _Fresh:
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def exit_code(self) -> int | None:
        return self.popen.poll()


@dataclass(kw_only=True)
class _Forked:
    process: Any

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def exit_code(self) -> int | None:
        code: int | None = self.process.exitcode
        return code


@dataclass(kw_only=True)
class Child:
    """A command that runs or has ended."""

    argv: tuple[str, ...]
    process: _Process
    out: Path
    """What it printed on standard output."""

    err: Path
    """What it printed on standard error."""

    began_s: float
    """When it was started, by `time.monotonic`."""

    began_at: float
    """The same by `time.time`, which other processes share."""

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; return its exit code.

        Raises:
            TimedOutError: it is still running after this many seconds, and was killed.
        """
        until_s = time.monotonic() + timeout_s
        while (code := self.process.exit_code()) is None:
            if time.monotonic() > until_s:
                self.kill()
                raise TimedOutError(f"no end within {timeout_s:.0f} s: {self}")
            time.sleep(0.01)
        return code

    def done(self, timeout_s: float, *, expect: Sequence[int] = (0,)) -> str:
        """Wait for its end; return its standard output.

        Raises:
            FailedError: it ended with another exit code; the message has the end of its output.
        """
        code = self.wait(timeout_s)
        if code not in expect:
            raise FailedError(f"exit code {code}: {self}")
        return self.out.read_text(errors="replace")

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.exit_code() is None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to it and all its descendants; after SIGKILL wait for its end."""
        while self.running():
            # It may have ended before the signal is sent, or not have its process group yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
                if number != signal.SIGKILL:
                    return
            time.sleep(0.01)

    def __str__(self) -> str:
        """The command, and the end of its output."""
        return f"{' '.join(self.argv)}\n{_end(self.out)}{_end(self.err)}"


def _end(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:] if path.exists() else ""


@dataclass(kw_only=True)
class Children:
    """Starts commands; each gets a file for its output."""

    folder: Path
    """Folder of the output files."""

    forked: bool
    """Fork a process that has imported TensorFlow, instead of starting a new one."""

    started: list[Child] = field(default_factory=list)

    def stoker(self, *arguments: str | Path, env: Mapping[str, str] = {}) -> Child:
        """Start `stoker` with these arguments."""
        return self.python("-m", "stoker", *arguments, env=env)

    def python(self, *arguments: str | Path, env: Mapping[str, str] = {}) -> Child:
        """Start Python with `-m MODULE` or a script, and arguments."""
        self.folder.mkdir(parents=True, exist_ok=True)
        argv = tuple(map(str, arguments))
        base = self.folder / f"{len(self.started):02d}"
        out, err = base.with_suffix(".out"), base.with_suffix(".err")
        start = _fork if self.forked else _fresh
        began_s, began_at = time.monotonic(), time.time()
        process = start(argv, dict(env), out, err)
        child = Child(
            argv=argv, process=process, out=out, err=err, began_s=began_s, began_at=began_at
        )
        self.started.append(child)
        return child

    def json(self, *arguments: str | Path, timeout_s: float, **options: Any) -> dict[str, Any]:
        """Run `stoker ... --json` to its end; return the parsed output."""
        expect = options.pop("expect", (0,))
        child = self.stoker(*arguments, "--json", **options)
        found: dict[str, Any] = json.loads(child.done(timeout_s, expect=expect))
        return found

    def close(self) -> None:
        """Kill all commands that still run."""
        for child in self.started:
            child.kill()


def _fresh(argv: tuple[str, ...], env: dict[str, str], out: Path, err: Path) -> _Process:
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return _Fresh(
            popen=subprocess.Popen(
                [sys.executable, *argv],
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        )


def _fork(argv: tuple[str, ...], env: dict[str, str], out: Path, err: Path) -> _Process:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    # What the fork server imports is found by this path, which it inherits.
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(HERE) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, paths)])
    process = context.Process(target=run_here, args=(argv, env, str(out), str(err)))
    process.start()
    return _Forked(process=process)


def run_here(argv: tuple[str, ...], env: dict[str, str], out: str, err: str) -> None:
    """Become the command, in a process that was forked for it."""
    os.setsid()
    os.environ.update(env)
    for path, number in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    try:
        if argv[0] == "-m":
            sys.argv = [argv[1], *argv[2:]]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
