"""Collects the observations about this process and writes them to a file, in a thread of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

VERSION = 1
"""Version of the file format; the reader ignores files of other versions."""

LOOK_EVERY_S = 0.2
"""Interval between two checks whether the facts are requested, seconds."""

WRITE_EVERY_S = 1.0
"""Minimum interval between two regular writes of the facts, seconds; they are written in case the process is killed."""

WRITE_SHARE = 0.0005
"""Maximum share of the script's time that regular writes take: the script's own thread waits for them."""

MAX_FAILURES = 20


class Facts:
    """Collects the parts of the facts, writes them to one file, and records failures of the watcher."""

    def __init__(self) -> None:
        self.folder = ""
        self.failures: list[str] = []
        self.parts: dict[str, Callable[[], Any]] = {}
        self.forgets: list[Callable[[], None]] = []
        """Functions that a forked child calls to forget the training of its parent."""
        self.looks: list[Callable[[], None]] = []
        """Functions that the watcher's thread calls every LOOK_EVERY_S."""
        self.ends: list[Callable[[], None]] = []
        """Functions that are called before the process ends."""
        self.on = False
        """Whether this process is watched."""
        self.measuring = False
        """Whether the watcher itself is running the script's step."""
        self.changes = 0
        """Counter that grows with every change, e.g. every step: unchanged facts are not written again."""
        self._pid = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Watch this process; a second call does nothing."""
        if self.on:
            return
        # Imported here: in a program without TensorFlow, this import would cost time for nothing.
        from multiprocessing import util

        self.on = True
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._begin_here)
        # A child process of multiprocessing does not run functions that were registered with atexit.
        util.register_after_fork(self, lambda _: util.Finalize(None, self.write, exitpriority=0))
        self._begin_here()

    def _begin_here(self) -> None:
        """Start in this process. It may be a forked child, so first forget all observations about the parent."""
        self._pid, self._lock = os.getpid(), threading.Lock()
        self.failures.clear()
        with self.guarded():
            for forget in self.forgets:
                forget()
            threading.Thread(target=self._keep_writing, name="stoker-watch", daemon=True).start()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Record an error in the `with` body instead of raising it: the script continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Record an error of the watcher itself."""
        if len(self.failures) < MAX_FAILURES:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            at = ""
            if trace is not None:
                code = trace.tb_frame.f_code
                at = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"  # noqa: PTH119 - importing pathlib slows the script's start
            self.failures.append(f"{type(error).__name__}: {error}{at}")

    def write(self) -> None:
        """Write the facts to their file, completely or not at all."""
        if not self.on or os.getpid() != self._pid:
            return
        with self._lock, contextlib.suppress(OSError):
            facts: dict[str, Any] = {
                "version": VERSION,
                "pid": self._pid,
                # Linux reports this value in KiB.
                "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
            for name, part in list(self.parts.items()):
                with self.guarded():
                    facts[name] = part()
            facts["failures"] = list(self.failures)
            path = os.path.join(self.folder, f"facts-{self._pid}.json")  # noqa: PTH118 - importing pathlib slows the script's start
            with open(path + ".part", "w") as stream:  # noqa: PTH123 - importing pathlib slows the script's start
                json.dump(_plain(facts), stream, allow_nan=False)
            os.replace(path + ".part", path)

    def _at_exit(self) -> None:
        for end in self.ends:
            with self.guarded():
                end()
        self.write()

    def _keep_writing(self) -> None:
        wanted = os.path.join(self.folder, "wanted")  # noqa: PTH118 - importing pathlib slows the script's start
        written_s, written, every_s = time.monotonic(), -1, WRITE_EVERY_S
        while True:
            time.sleep(LOOK_EVERY_S)
            for look in self.looks:
                with self.guarded():
                    look()
            requested = os.path.exists(wanted) and not os.path.exists(f"{wanted}-{self._pid}")  # noqa: PTH110 - importing pathlib slows the script's start
            due = self.changes != written and time.monotonic() - written_s > every_s
            if requested or due:
                written_s, written = time.monotonic(), self.changes
                begun_s = time.thread_time()
                # Fails if another thread adds entries at the same time; the facts are then written later.
                with self.guarded():
                    self.write()
                every_s = max(WRITE_EVERY_S, (time.thread_time() - begun_s) / WRITE_SHARE)
            if requested:
                with contextlib.suppress(OSError), open(f"{wanted}-{self._pid}", "w"):  # noqa: PTH123 - importing pathlib slows the script's start
                    pass


def _plain(value: Any) -> Any:
    """Convert a value to JSON: a number that is not finite becomes null, an unknown object its text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in list(value.items())}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in list(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


FACTS = Facts()
"""The facts about this process."""


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a public function or method by `make(original)`.

    Args:
        owner: A module or class.
        name: Name of the original; nothing happens if it does not exist.
        make: Returns the wrapper of an original.
    """
    owner = _definer(owner, name)
    original = getattr(owner, name, None)
    if original is None or getattr(original, "stoker_original", None) is not None:
        return
    wrapped = functools.wraps(original)(make(original))
    wrapped.stoker_original = original  # type: ignore[attr-defined]  # an attribute that the stubs do not know
    # Keras inspects the arguments of a layer's __init__ without following `__wrapped__`, so set the signature.
    import inspect  # here: in a program without TensorFlow, this import would cost time for nothing

    with contextlib.suppress(TypeError, ValueError):
        wrapped.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # an attribute that the stubs do not know
    is_static = isinstance(vars(owner).get(name), staticmethod)
    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def _definer(owner: Any, name: str) -> Any:
    """The class that defines a method: wrapping it in a subclass would look like an override to Keras."""
    classes = owner.__mro__ if isinstance(owner, type) else ()
    return next((each for each in classes if name in vars(each) and each is not object), owner)
