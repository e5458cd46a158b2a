"""What callbacks do after each batch of `fit`: it is done between two steps, while the device waits.

Only hooks that a callback really has are watched: one of ours would make Keras wait for each step's
values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from typing import Any

from .places import Place, of_code
from .tensorflow_hooks import around

HOOKS = ("on_batch_begin", "on_train_batch_begin", "on_batch_end", "on_train_batch_end")
"""Of `keras.callbacks.Callback`."""

clock = time.perf_counter


class BatchHooks:
    """How long the hooks of one `fit` took."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str, Place], float] = {}
        """Class, hook and its line -> seconds."""
        self.counts = False
        """Whether steps are counted by now: the first ones trace and compile."""
        self._thread = 0
        self._inside = False

    def watch(self, keras: Any, given: Any) -> None:
        """Stand around what these callbacks do for each batch.

        Args:
            keras: The module.
            given: What `fit` was given as `callbacks`.
        """
        global _current  # a hook is the class's, and does not know for which fit
        self._thread, self._inside = get_ident(), False
        plain = keras.callbacks.Callback
        for callback in _flat(keras, given):
            for hook in HOOKS:
                found = getattr(type(callback), hook, None)
                if found is not None and found is not getattr(plain, hook):
                    around(type(callback), hook, partial(_timed, hook))
        _current = self

    def end(self) -> None:
        """The call of `fit` is over."""
        global _current
        _current = None

    def told(self) -> list[dict[str, Any]]:
        """As facts."""
        return [
            {"name": name, "hook": hook, "place": place, "seconds": seconds}
            for (name, hook, place), seconds in list(self.seconds.items())
        ]

    def call(self, original: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Call a hook; what it calls itself is its own."""
        if not self.counts or self._inside or get_ident() != self._thread:
            return original(*args, **kwargs)
        self._inside, begun_s = True, clock()
        try:
            return original(*args, **kwargs)
        finally:
            self._inside = False
            key = type(args[0]).__name__, name, of_code(getattr(original, "__code__", None))
            self.seconds[key] = self.seconds.get(key, 0.0) + clock() - begun_s


_current: BatchHooks | None = None
"""Of the `fit` that runs."""


def _flat(keras: Any, given: Any) -> Iterator[Any]:
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    for each in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(each, keras.callbacks.Callback):
            yield each


def _timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return original(*args, **kwargs)
        return _current.call(original, name, args, kwargs)

    return hook
