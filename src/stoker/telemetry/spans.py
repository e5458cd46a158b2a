"""What a program was doing when: named spans of time, kept in a ring, shown as a timeline.

Recording one costs some microseconds and no memory that grows, so it may stay on beside a step.
Shown by https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stoker.core.files import write_json

NEWEST = 65_536
"""Spans that are kept where nobody says: some minutes of a step's parts, some 20 MB."""

Clock = Callable[[], int]
"""Nanoseconds that never jump: not the time of day, which is set and corrected."""

Facts = Mapping[str, str | int | float | bool]
"""What is told beside a span's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time."""

    name: str
    """What was done."""

    began_ns: int
    """When it began, by the recorder's clock."""

    ended_ns: int
    """When it ended."""

    thread: int
    """Who did it: the thread's number in the kernel."""

    thread_name: str
    """The thread's name."""

    facts: Facts = field(default_factory=dict)
    """What is told beside it."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.ended_ns - self.began_ns) * 1e-9


class Spans:
    """A recorder; any thread may record, and any may ask."""

    def __init__(self, *, newest: int = NEWEST, clock: Clock = time.monotonic_ns) -> None:
        """Record nothing yet.

        Args:
            newest: How many are kept; older ones are forgotten.
            clock: What tells the time.
        """
        if newest < 1:
            raise ValueError("a recorder keeps at least one span")
        self._clock = clock
        self._began_ns = clock()
        self._lock = threading.Lock()
        self._kept: deque[Span] = deque(maxlen=newest)
        self._recorded = 0

    @contextmanager
    def span(self, name: str, **facts: str | float | bool) -> Iterator[None]:
        """Record the body of a `with`, also where it raises."""
        began_ns = self._clock()
        try:
            yield
        finally:
            self.add(name, began_ns=began_ns, ended_ns=self._clock(), facts=facts)

    def add(self, name: str, *, began_ns: int, ended_ns: int, facts: Facts | None = None) -> None:
        """Record what this thread has done.

        Args:
            name: What was done.
            began_ns: When it began, by the recorder's clock.
            ended_ns: When it ended, not before that.
            facts: What is told beside it.

        Raises:
            ValueError: it ended before it began.
        """
        if ended_ns < began_ns:
            raise ValueError(f"{name} ended before it began")
        made = Span(
            name=name,
            began_ns=began_ns,
            ended_ns=ended_ns,
            thread=threading.get_native_id(),
            thread_name=threading.current_thread().name,
            facts=dict(facts or {}),
        )
        with self._lock:
            self._kept.append(made)
            self._recorded += 1

    @property
    def forgotten(self) -> int:
        """How many were recorded and are not kept any more."""
        with self._lock:
            return self._recorded - len(self._kept)

    def kept(self) -> tuple[Span, ...]:
        """The newest spans, in the order in which they ended."""
        with self._lock:
            return tuple(self._kept)

    def trace(self) -> dict[str, object]:
        """A timeline as JSON values; times in microseconds from where the recorder was made.

        Source: Google, "Trace Event Format", complete events ("X") and metadata events ("M").
        """
        spans, process = self.kept(), os.getpid()
        named: list[dict[str, object]] = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": process,
                "tid": thread,
                "args": {"name": name},
            }
            for thread, name in {span.thread: span.thread_name for span in spans}.items()
        ]
        events: list[dict[str, object]] = [
            {
                "name": span.name,
                "ph": "X",
                "ts": (span.began_ns - self._began_ns) / 1000,
                "dur": (span.ended_ns - span.began_ns) / 1000,
                "pid": process,
                "tid": span.thread,
                "args": dict(span.facts),
            }
            for span in sorted(spans, key=lambda span: span.began_ns)
        ]
        return {
            "traceEvents": named + events,
            "displayTimeUnit": "ms",
            "otherData": {"forgotten": self.forgotten},
        }

    def write(self, path: Path) -> None:
        """Write the timeline to a file, whole or not at all.

        Raises:
            ValueError: a fact is a number that JSON does not have.
        """
        write_json(path, self.trace())
