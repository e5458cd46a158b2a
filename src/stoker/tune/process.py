"""The process of a trial: it measures an experiment with some settings, and answers requests of its parent.

It may crash, hang or run out of memory, which is a result of the trial. It never outlives its parent.
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
from typing import Any, Literal

from stoker.cluster.processes import Child, ProcessOptions, how_it_ended, last_line
from stoker.core.files import write_json

FailureKind = Literal["refused", "memory", "crash", "hang", "budget"]
"""refused: the settings are invalid, or the user's code fails with them. memory: memory ran out. crash: the
process ended. hang: no answer came in time. budget: the time of the tuning is used up."""

GRACE_S = 2.0
"""Maximum wait for a process to exit, or for all its threads to pause, seconds."""

STOP_POLL_S = 0.0005
"""Poll interval while a process stops, seconds; a process stops in about this time."""


class TrialFailed(Exception):
    """A trial gave no measurement; `kind` and `text` say why."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind: FailureKind = kind
        self.text = text


class TrialProcess:
    """A child process that answers requests; each request and each answer is a line of JSON."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        folder: Path,
        name: str,
        command: tuple[str, ...] = (sys.executable, "-m", "stoker.app.tuning.child", "measure"),
    ) -> None:
        """Start the process.

        Args:
            spec: Input of the process, JSON values.
            folder: Receives the file with the input, and the log with the process's output.
            name: Name of these files, without suffix.
            command: The command; the path of the input file and two file descriptors are appended.
        """
        path = folder / f"{name}.json"
        write_json(path, dict(spec))
        self.log = folder / f"{name}.log"
        questions_read, questions_write = os.pipe()
        answers_read, answers_write = os.pipe()
        try:
            self._child = Child(
                "a trial",
                [*command, str(path), str(questions_read), str(answers_write)],
                ProcessOptions(
                    environ=os.environ,
                    output=self.log,
                    pass_fds=(questions_read, answers_write),
                ),
            )
        except BaseException:
            os.close(questions_write)
            os.close(answers_read)
            raise
        finally:
            os.close(questions_read)
            os.close(answers_write)
        self._questions, self._answers = questions_write, answers_read
        self._unread, self._paused = b"", False

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._child.pid

    def ask(
        self,
        what: str,
        *,
        timeout_s: float,
        progress: Callable[[str], None] = lambda _: None,
        **arguments: Any,
    ) -> Any:
        """Send a request to the process, and wait for the answer.

        Args:
            what: Name of the request.
            timeout_s: Maximum time to wait for the answer, seconds.
            progress: Called with each progress line that comes before the answer.
            arguments: Arguments of the request, JSON values.

        Raises:
            TrialFailed: the request failed, the process ended, or no answer came in time.
        """
        self._continue()
        line = json.dumps({"ask": what, **arguments}) + "\n"
        try:
            os.write(self._questions, line.encode())
        except OSError:
            raise self._exit_failure() from None
        end_s = time.monotonic() + timeout_s
        while True:
            answer = self._read(end_s, what, timeout_s)
            if "progress" in answer:
                progress(answer["progress"])
                continue
            if "failed" in answer:
                raise TrialFailed(answer["failed"], answer["text"])
            return answer["answer"]

    def pause(self) -> None:
        """Stop all threads of the process, including its input pipeline, until the next request.

        So it takes no CPU time from other trials, and does not prepare batches in advance.
        """
        self._child.send(signal.SIGSTOP)
        self._paused = True
        # Each thread continues until it has received the signal.
        end_s = time.monotonic() + GRACE_S
        while not self._is_stopped():
            if time.monotonic() > end_s:
                break  # a thread waits for a disk or a driver, and will stop when that call returns
            time.sleep(STOP_POLL_S)  # waitid has no timeout

    def _continue(self) -> None:
        if self._paused:
            self._child.send(signal.SIGCONT)
            self._paused = False

    def _is_stopped(self) -> bool:
        """Return whether all threads are stopped, or the process has ended."""
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
                    raise self._exit_failure()
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _exit_failure(self) -> TrialFailed:
        """Return the failure of a process that ended without an answer."""
        code = self._child.wait(GRACE_S)
        if code is None:
            return TrialFailed("crash", "it closed the pipe for its answers, but still runs")
        if code == -signal.SIGKILL:
            return TrialFailed("memory", "killed by SIGKILL, as Linux does when memory runs out")
        output = last_line(self.log) or "it printed nothing"
        return TrialFailed("crash", f"it {how_it_ended(code)}; {output}")

    def close(self) -> None:
        """End the process and its children."""
        if self._questions < 0:
            return
        os.close(self._questions)
        os.close(self._answers)
        self._questions = self._answers = -1
        self._continue()
        self._child.end(GRACE_S)
