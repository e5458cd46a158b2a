"""A trial: a fresh process that measures one setting of an experiment, and is asked what to measure.

It may crash, hang, or run out of memory: that is a result. It never outlives the process that asks it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from stoker.cluster.processes import Child, how_it_ended, last_line
from stoker.core.files import write_json

FailureKind = Literal["refused", "memory", "crash", "hang", "budget"]
"""refused: the settings, or the user's code under them. memory: it did not fit. crash: the process
ended. hang: no answer in time. budget: the tuning's time is over."""

GRACE_S = 2.0
"""How long a trial that is asked to end may take, before it is killed, and one that is stopped
until it is taken to wait in the kernel; seconds."""

STOP_LOOK_S = 0.0005
"""How often a trial that is being stopped is looked at, seconds: it takes about as long."""


class TrialFailed(Exception):
    """A trial gave no measurement, and why."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind: FailureKind = kind
        self.text = text


class Trial:
    """One process; `ask` it, and close it."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        folder: Path,
        name: str,
        command: tuple[str, ...] = (sys.executable, "-m", "stoker.app.tuning.child"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            spec: What it is told, JSON values.
            folder: Takes the file with that, and what it prints.
            name: Of those files.
            command: What is run; the file and two descriptors are added as arguments.
            environment: Added to that of this process.
        """
        path = folder / f"{name}.json"
        write_json(path, dict(spec))
        self.log = folder / f"{name}.log"
        asks_read, asks_write = os.pipe()
        answers_read, answers_write = os.pipe()
        try:
            self._child = Child(
                "a trial",
                [*command, str(path), str(asks_read), str(answers_write)],
                environ=os.environ | dict(environment or {}),
                output=self.log,
                pass_fds=(asks_read, answers_write),
            )
        except BaseException:
            os.close(asks_write)
            os.close(answers_read)
            raise
        finally:
            os.close(asks_read)
            os.close(answers_write)
        self._asks, self._answers = asks_write, answers_read
        self._unread, self._paused = b"", False

    def __enter__(self) -> Self:
        """It runs already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it, whatever happened."""
        self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def ask(
        self,
        what: str,
        *,
        timeout_s: float,
        told: Callable[[str], None] = lambda _: None,
        **arguments: Any,
    ) -> Any:
        """Ask for something, and wait for the answer.

        Args:
            what: Its name.
            timeout_s: Longest wait, seconds.
            told: Called with what it says meanwhile.
            arguments: JSON values.

        Raises:
            TrialFailed: it has no answer.
        """
        self._go_on()
        line = json.dumps({"ask": what, **arguments}) + "\n"
        try:
            os.write(self._asks, line.encode())
        except OSError:
            raise self._ended() from None
        end_s = time.monotonic() + timeout_s
        while True:
            answer = self._read(end_s, what, timeout_s)
            if "told" in answer:
                told(answer["told"])
                continue
            if "failed" in answer:
                raise TrialFailed(answer["failed"], answer["text"])
            return answer["answer"]

    def pause(self) -> None:
        """Stop it where it is, with its input, until it is asked again.

        Whoever is measured meanwhile has the machine alone, and nothing is made in stock. What it
        runs must end with its parent also while it is stopped.
        """
        self._child.send(signal.SIGSTOP)
        self._paused = True
        # A signal is on its way when it is sent: other threads go on until each has seen it.
        end_s = time.monotonic() + GRACE_S
        while not self._stands_still():
            if time.monotonic() > end_s:
                break  # one waits for a disk or a driver: it stops when that lets go
            time.sleep(STOP_LOOK_S)  # no wait of the kernel for a stop takes a limit of time

    def _go_on(self) -> None:
        if self._paused:
            self._child.send(signal.SIGCONT)
            self._paused = False

    def _stands_still(self) -> bool:
        """All its threads are stopped, or it has ended; what is reported stays to be read again."""
        which = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._child.code is not None or bool(os.waitid(os.P_PID, self.pid, which))

    def _read(self, end_s: float, what: str, timeout_s: float) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise TrialFailed("hang", f"no answer to `{what}` in {timeout_s:.0f} s")
                more = os.read(self._answers, 1 << 16)
                if not more:
                    raise self._ended()
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> TrialFailed:
        """It is gone, and answered nothing."""
        code = self._child.wait(GRACE_S)
        if code is None:
            return TrialFailed("crash", "it closed its answers and went on")
        if code == -signal.SIGKILL:
            return TrialFailed("memory", "killed by SIGKILL, as Linux does where memory runs out")
        said = last_line(self.log) or "it printed nothing"
        return TrialFailed("crash", f"it {how_it_ended(code)}; {said}")

    def close(self) -> None:
        """End the process, and what it has started."""
        for descriptor in (self._asks, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._asks = self._answers = -1
        self._go_on()
        self._child.end(GRACE_S)
