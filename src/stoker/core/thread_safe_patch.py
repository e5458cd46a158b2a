"""Something of another library's that is ours for a while, also where threads come and go crosswise.

A mirrored strategy traces each replica in a thread of its own and changes to the next one wherever
replicas meet: the second comes in before the first goes out. Were each to put back what it had
found, the second would put back ours, for ever.
"""

from __future__ import annotations

import threading
from typing import Any


class Replaced:
    """A context manager that may be entered by several threads at once."""

    def __init__(self, owner: Any, **values: Any) -> None:
        """Replace nothing yet.

        Args:
            owner: A module or a class.
            values: Names of it -> what they are while anybody is inside.
        """
        self._owner, self._values = owner, values
        self._lock, self._inside = threading.Lock(), 0
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> None:
        """The first one in replaces."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._kept = {name: getattr(self._owner, name) for name in self._values}
                self._set(self._values)

    def __exit__(self, *_: object) -> None:
        """The last one out puts back."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._set(self._kept)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner, name, value)
