"""Takes one short trace of the device during the script's training, in the watcher's own thread.

It is taken after U has been measured, or when it is known that U cannot be measured. The script's steps do not change.
The script has precedence: if it starts TensorFlow's profiler itself, our trace is stopped and dropped.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .places import NOWHERE, Place
from .watch import FACTS, wrap

STAND_IN = "STOKER_TRACE_CPU"
"""Environment variable for Stoker's tests: if it is `1`, the CPU is traced on a machine without a GPU."""

TRACED_STEPS = 5
MIN_S, MAX_S = 0.3, 2.0
"""Duration of a trace: the time of TRACED_STEPS steps, but at least MIN_S and at most MAX_S seconds."""

MIN_STEPS = 5
"""Minimum number of steps that must end during the trace; with fewer, it is taken again. For a loop inside a
tf.function, a whole call is a step, so the minimum is 0."""

POLL_S = 0.02
"""Interval between two checks of whether to end the trace."""

END_S = 5.0
"""Maximum time that the exit of the process waits for a trace that is being written, seconds."""

MAX_TRIES = 5
MAX_LAYERS = 5000


class Tracer:
    """Takes the trace of one training loop."""

    def __init__(self) -> None:
        self._lines: Callable[[], list[Any]] = list
        self._fits: Callable[[], list[Any]] = list
        self._layers: Callable[[], list[tuple[str, str, Place]]] = list
        self._tries = 0
        self._done = False
        self._lock, self._taking = threading.Lock(), threading.Lock()
        self._running = self._is_on = self._spoiled = False

    def install(self, tf: Any, *, lines: Callable[[], list[Any]]) -> None:
        """Prepare the trace, and watch whether the script starts TensorFlow's profiler itself.

        Args:
            tf: TensorFlow.
            lines: Returns all training loops outside `fit`; each has `steps`, `step_s()`, `is_measured()`,
                `whole_passes()` and `trace`.
        """
        self._lines = lines
        wrap(tf.profiler.experimental, "start", self._gives_way)
        FACTS.looks.append(self.look)
        FACTS.forgets.append(self.forget)
        FACTS.ends.append(self.at_exit)

    def forget(self) -> None:
        """Forget everything, because this is a forked child."""
        self._tries, self._done, self._running, self._is_on = 0, False, False, False
        self._lock, self._taking = threading.Lock(), threading.Lock()

    def knows_keras(
        self, fits: Callable[[], list[Any]], layers: Callable[[], list[tuple[str, str, Place]]]
    ) -> None:
        """Set the functions that return all `fit` loops and all live layers; called once Keras is imported."""
        self._fits, self._layers = fits, layers

    def look(self) -> None:
        """Take the trace if a loop is ready for it; the watcher's thread waits until it is taken."""
        with self._taking:
            self._look()

    def at_exit(self) -> None:
        """End a trace in progress, and wait until it is written: the process ends."""
        self._running = False
        if self._taking.acquire(timeout=END_S):
            self._done = True
            self._taking.release()

    def _look(self) -> None:
        if self._done or FACTS.measuring:
            return
        line = next((each for each in (*self._fits(), *self._lines()) if each.is_measured()), None)
        if line is None:
            return
        if not _has_device():
            self._done = True
            return
        self._tries += 1
        self._done = self._tries >= MAX_TRIES
        steps = line.steps
        try:
            self._take(line, min(MAX_S, max(MIN_S, TRACED_STEPS * line.step_s())))
        except Exception as error:  # noqa: BLE001 - the script continues
            self._done = True
            line.trace = {"why": _first(error)}
            return
        if self._spoiled:
            self._done = True
            line.trace = {"why": "the script uses TensorFlow's profiler itself"}
        elif line.steps - steps >= _min_steps(line) or self._done:
            self._done = True
            layers = [[name, kind, *at] for name, kind, at in self._layers()[:MAX_LAYERS]]
            line.trace = {"folder": _folder(), "layers": layers}
        FACTS.changes += 1

    def _take(self, line: Any, seconds: float) -> None:
        """Trace until the time is over, the epoch or the process ends, or facts are requested."""
        tf: Any = sys.modules["tensorflow"]
        level = 2 if _is_stand_in() else 1
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=level, python_tracer_level=0, device_tracer_level=1
        )
        with self._lock:
            start = tf.profiler.experimental.start  # by now, this is our wrapper
            start.stoker_original(_path(), options=options)
            self._running = self._is_on = True
            self._spoiled = False
        wanted = os.path.join(FACTS.folder, "wanted")  # noqa: PTH118 - importing pathlib slows the script's start
        until_s, passes = time.monotonic() + seconds, line.whole_passes()
        while self._running and time.monotonic() < until_s:
            if line.whole_passes() != passes or os.path.exists(wanted):  # noqa: PTH110 - importing pathlib slows the script's start
                break
            time.sleep(POLL_S)  # lets the script train during the trace
        self._end()

    def _end(self) -> None:
        """End a trace in progress."""
        with self._lock:
            if self._is_on:
                self._running = self._is_on = False
                sys.modules["tensorflow"].profiler.experimental.stop()

    def _gives_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            with FACTS.guarded():
                self._spoiled = self._is_on or self._spoiled
                self._done = True
                self._end()
            return original(*args, **kwargs)

        return start


def _min_steps(line: Any) -> int:
    return 0 if getattr(line, "kind", "") == "inside" else MIN_STEPS


def _is_stand_in() -> bool:
    tf: Any = sys.modules["tensorflow"]
    return os.environ.get(STAND_IN) == "1" and not tf.config.get_visible_devices("GPU")


def _has_device() -> bool:
    tf: Any = sys.modules["tensorflow"]
    return bool(tf.config.get_visible_devices("GPU")) or _is_stand_in()


def _folder() -> str:
    return f"trace-{os.getpid()}"


def _path() -> str:
    return os.path.join(FACTS.folder, _folder())  # noqa: PTH118 - importing pathlib slows the script's start


def _first(error: Exception) -> str:
    if type(error).__name__ == "AlreadyExistsError":
        return "another profiler is running"
    lines = str(error).strip().splitlines()
    return f"TensorFlow's profiler failed ({lines[0][:200] if lines else type(error).__name__})"


TRACER = Tracer()
"""The tracer of this process."""


def layer_names(places: dict[int, tuple[Any, Place]]) -> list[tuple[str, str, Place]]:
    """Return name, type and line of every live layer whose line is known.

    Args:
        places: ID of a layer -> a weak reference to it, and the line that created it.
    """
    found = []
    for reference, at in list(places.values()):
        layer = reference()
        if layer is not None and at != NOWHERE:
            found.append((str(layer.name), type(layer).__name__, at))
    return found
