"""The output of a container, line by line with its times, and how a client reads it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import IO

_WAIT_S = 0.2


class ContainerLog:
    """What one start of a container has printed."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, bytes]] = []
        self._changed = threading.Condition()
        self.is_over = False

    def take(self, output: IO[bytes]) -> None:
        """Read an output to its end, which may outlive the process that was started."""
        with output:
            for line in output:
                self.add(line)
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def add(self, line: bytes) -> None:
        """Add a line."""
        with self._changed:
            self._lines.append((time.time(), line if line.endswith(b"\n") else line + b"\n"))
            self._changed.notify_all()

    def wait(self, longest_s: float) -> None:
        """Wait for its end."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over, longest_s)

    def text(self) -> str:
        """All of it."""
        with self._changed:
            return b"".join(line for _, line in self._lines).decode(errors="replace")

    def read(self, query: dict[str, str], is_stopping: Callable[[], bool]) -> Iterator[bytes]:
        """Yield lines as the API shows them: `follow`, `tailLines`, `sinceSeconds`, `sinceTime`, `timestamps`, `limitBytes`."""
        follow, stamped = (query.get(name) in ("true", "True") for name in ("follow", "timestamps"))
        left = int(query.get("limitBytes") or 0) or None
        since_s = _since(query)
        with self._changed:
            place = 0
            if query.get("tailLines"):
                place = max(0, len(self._lines) - int(query["tailLines"]))
        while not is_stopping():
            with self._changed:
                if follow and place >= len(self._lines) and not self.is_over:
                    self._changed.wait(_WAIT_S)
                found, over = self._lines[place:], self.is_over
            place += len(found)
            for at_s, line in found:
                if at_s < since_s:
                    continue
                shown = f"{_stamp(at_s)} ".encode() + line if stamped else line
                yield shown if left is None else shown[:left]
                left = left if left is None else max(0, left - len(shown))
                if left == 0:
                    return
            if not follow or (over and not found):
                return


def _since(query: dict[str, str]) -> float:
    if query.get("sinceSeconds"):
        return time.time() - float(query["sinceSeconds"])
    if query.get("sinceTime"):
        return datetime.fromisoformat(query["sinceTime"]).timestamp()
    return 0.0


def _stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
