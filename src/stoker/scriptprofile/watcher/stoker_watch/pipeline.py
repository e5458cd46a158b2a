"""Reads tf.data's own measurements of an iterator's stages, and measures windows of steps and passes."""

from __future__ import annotations

import sys
import time
from typing import Any

from .wall import LOAD, Moment, now

_MAX_NODES = 200


def read_model(iterator: Any) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the stages that actually run, last stage first, and the latest gaps.

    TensorFlow may have fused, replaced or added stages.

    Args:
        iterator: The iterator of a dataset.

    Returns:
        Stages, each with its CPU time so far; and gaps: the times that the consumer took between two elements,
        microseconds, latest last. Both are empty if TensorFlow does not record them: autotune is off, or the
        iterator belongs to a distribution strategy.
    """
    tf: Any = sys.modules["tensorflow"]
    try:
        model = tf.data.experimental.get_model_proto(iterator)
    except (ValueError, AttributeError, tf.errors.OpError):
        return [], []
    nodes: list[dict[str, Any]] = []
    waiting = [(model.output, 0, 1.0)]
    while waiting and len(nodes) < _MAX_NODES:
        number, depth, per_output = waiting.pop(0)
        node = model.nodes[number]
        nodes.append(
            {
                "name": node.name,
                "depth": depth,
                "elements": int(node.num_elements),
                "cpu_s": int(node.processing_time) / 1e9,
                "ratio": float(node.ratio),
                "per_output": per_output,
                "buffered_bytes": int(node.buffered_bytes),
                "buffered": int(node.buffered_elements),
                "parameters": {
                    each.name: [float(each.value), bool(each.tunable)] for each in node.parameters
                },
            }
        )
        waiting.extend(
            (inner, depth + 1, per_output * taken)
            for inner, taken in _inputs_of(node, model.nodes).items()
        )
    return nodes, [float(gap) for gap in model.gap_times]


_INTERLEAVES = (1, 2)
"""`NodeClass` of stages that make a pipeline for each element: interleave, flat_map."""


def _inputs_of(node: Any, nodes: Any) -> dict[int, float]:
    """The inputs of an interleave or flat_map, each with the number of its elements per output element.

    Such a node makes a pipeline for each element of its first input; its other inputs are these pipelines. For
    all other nodes, 1.0 is returned, because their `ratio` has the number, if it is known.
    """
    inputs = list(node.inputs)
    if node.node_class not in _INTERLEAVES or not inputs:
        return dict.fromkeys(inputs, 1.0)
    given = {key: int(nodes[key].num_elements) for key in inputs}
    first, in_turn = inputs[0], max(1, sum(given[key] for key in inputs[1:]))
    return {
        key: count / (max(1, int(node.num_elements)) if key == first else in_turn)
        for key, count in given.items()
    }


def rows_of(element: Any) -> int:
    """Number of rows of an element: the first dimension of its first tensor with rows; 0 if unknown."""
    tf: Any = sys.modules["tensorflow"]
    for tensor in tf.nest.flatten(element, expand_composites=True):
        shape: Any = getattr(tensor, "shape", None)
        if getattr(shape, "rank", None) and shape[0]:
            return int(shape[0])
    return 0


MAX_PASSES = 8
"""Maximum number of timed passes: later passes are only needed for comparison with the first."""


class CacheFill:
    """Measures the first passes over a dataset with a cache; the first whole pass fills the cache."""

    def __init__(self) -> None:
        self.passes_s: list[float] = []
        """Durations of the first whole passes, seconds; for a loop in the user's own code, their waits for input."""
        self.wall_s = 0.0
        """Wall time of the first pass, seconds."""
        self.away = 0.0
        """Share of this wall time that other programs on the machine caused."""
        self.nodes: list[dict[str, Any]] = []
        """The stages that TensorFlow ran in the first pass."""
        self.nodes_s = 0.0
        """Time from the start of the first pass until these stages were read, seconds."""
        self._begun_s = 0.0
        self._moment: Moment | None = None

    def is_filling(self) -> bool:
        """Whether no whole pass has ended yet."""
        return not self.passes_s

    def begin_pass(self) -> None:
        """Begin a pass."""
        if self.is_filling():
            self._begun_s, self._moment = time.perf_counter(), now()

    def end_pass(self, took_s: float) -> None:
        """End a whole pass.

        Args:
            took_s: Duration of the pass, seconds; for a loop in the user's own code, its wait for input.
        """
        if self.is_filling():
            self.wall_s = time.perf_counter() - self._begun_s
            self.away = LOAD.between(self._moment, now()).away()
        if len(self.passes_s) < MAX_PASSES:
            self.passes_s.append(took_s)

    def look(self, nodes: list[dict[str, Any]]) -> None:
        """Record the input's stages if this is the first pass."""
        if self.is_filling() and len(nodes) >= len(self.nodes):
            self.nodes, self.nodes_s = nodes, time.perf_counter() - self._begun_s

    def as_json(self) -> dict[str, Any]:
        """Return these passes as facts."""
        names = ("passes_s", "wall_s", "away", "nodes", "nodes_s")
        return {name: getattr(self, name) for name in names}


WINDOW_S = 0.3
"""Minimum duration of a window of steps, seconds: long compared with a time slice of the scheduler (some ms)."""

MAX_WINDOW_CALLS = 90
"""Maximum number of calls in a window: tf.data keeps only the last 100 gaps."""

MAX_GAPS = 98
"""Maximum number of gaps that are used: a little less than the 100 that tf.data keeps."""

MIN_WINDOW_CALLS = 4


class Window:
    """A window of consecutive steps with real data."""

    def __init__(self) -> None:
        self.calls = self.latest_calls = 0
        self.seconds = self.latest_s = 0.0
        self._fresh = True

    def add(self, period_s: float) -> None:
        """Add a step."""
        self.calls += 1
        self.seconds += period_s
        if self._fresh:
            # Leave out the first step: the gap before its batch includes time from before the window.
            self._fresh = False
            return
        self.latest_calls += 1
        self.latest_s += period_s

    def pause(self) -> None:
        """End an epoch: the time until the next epoch does not count; the next epoch has a new iterator."""
        self.latest_calls, self.latest_s, self._fresh = 0, 0.0, True

    def gap(self, gaps_us: list[float], per_call: int) -> tuple[float, float] | None:
        """For the latest consecutive calls, seconds: sum of the gaps between elements, and duration of the calls.

        None if there are too few calls, or more elements than recorded gaps.
        """
        elements = self.latest_calls * per_call
        if self.latest_calls < MIN_WINDOW_CALLS or elements > min(len(gaps_us), MAX_GAPS):
            return None
        return sum(gaps_us[-elements:]) / 1e6, self.latest_s

    def is_full(self) -> bool:
        """Whether the window is long enough, or as long as the recorded gaps allow."""
        long_enough = self.seconds >= WINDOW_S and self.calls > MIN_WINDOW_CALLS
        return long_enough or self.calls >= MAX_WINDOW_CALLS
