"""Faults on demand: what happens to requests between the client and the server."""

from __future__ import annotations

import random
import re
import threading
from dataclasses import dataclass, field
from enum import Enum, auto


class Fault(Enum):
    """What happens to a request."""

    LOST = auto()
    """It is carried out, and the connection ends without an answer."""

    REFUSED = auto()
    """The connection ends before it is carried out."""

    BUSY = auto()
    """429 with Retry-After."""

    BROKEN = auto()
    """500."""

    CONFLICT = auto()
    """409, which the same request does not meet again: another one has changed an object that it needs."""

    FORBIDDEN = auto()
    """403, as by a policy that an access review knows nothing of."""

    FORGOTTEN = auto()
    """Just before it, the server forgets all versions: 410 for a page or a watch that goes on from one."""

    SILENT = auto()
    """It is carried out, and the connection stays open without an answer."""

    HALF = auto()
    """As `SILENT`, after the first half of the answer; of a stream after its first lines."""

    CUT = auto()
    """A watch or a log that ends in its middle, without the last chunk."""


@dataclass
class _Planned:
    fault: Fault
    method: str
    path: re.Pattern[str]
    times: int


@dataclass
class Faults:
    """The plan; every method may be called by any thread."""

    planned: list[_Planned] = field(default_factory=list)
    counts: dict[Fault, int] = field(default_factory=dict)
    """How many requests each kind has hit."""

    _share: float = 0.0
    _chance: random.Random = field(default_factory=lambda: random.Random(0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, fault: Fault, path: str = "", *, method: str = "", times: int = 1) -> None:
        """Let the next requests fail.

        Args:
            fault: How.
            path: Regular expression that the path and the query must contain; all.
            method: Of HTTP; all.
            times: How many of them.
        """
        with self._lock:
            self.planned.append(_Planned(fault, method, re.compile(path), times))

    def lose(self, share: float, *, seed: int = 30) -> None:
        """Lose the answers of a share of all requests by chance; in turn after and before the work."""
        with self._lock:
            self._share, self._chance = share, random.Random(seed)

    def next(self, method: str, path: str, *, stream: bool) -> Fault | None:
        """Return what happens to a request; None: nothing."""
        with self._lock:
            fault = self._planned(method, path, stream=stream) or self._by_chance()
            if fault is not None:
                self.counts[fault] = self.counts.get(fault, 0) + 1
            return fault

    def _planned(self, method: str, path: str, *, stream: bool) -> Fault | None:
        for each in self.planned:
            fits = each.path.search(path) and each.method in ("", method)
            if fits and each.times > 0 and (each.fault is not Fault.CUT or stream):
                each.times -= 1
                return each.fault
        return None

    def _by_chance(self) -> Fault | None:
        if self._chance.random() >= self._share:
            return None
        return self._chance.choice((Fault.LOST, Fault.REFUSED))
