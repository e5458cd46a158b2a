"""Measures every step of `keras.Model.fit`, in windows that alternate with the same step on a resident batch."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from . import ceiling, pipeline
from .ceiling import LONGEST_STEP_S, MAX_CEILING_S, MAX_DRAINED, ROUNDS
from .loops import LOOK_AT_STEPS, MAX_SHOWN, clock
from .model_facts import write_graph
from .pipeline import MAX_GAPS, Window
from .places import Place
from .wall import LOAD, BatchHooks, Moment, now
from .watch import FACTS

WARM_CALLS = 4
"""Number of first calls of the train function that are not measured: they trace, compile and fill buffers."""

LATEST = 2
"""The shortest of this many latest calls gives the duration of a step."""

FIRST_DRAINED = 3
"""Number of calls that are not measured after the resident batch was taken: taking it from the input delays them."""


class Fit:
    """The calls of `fit` in one line, for one model."""

    def __init__(self, place: Place, model: Any) -> None:
        self.place = place
        self._model = weakref.ref(model)
        self.model: dict[str, Any] = {}
        self.stages: list[int] = []
        self.nodes: list[dict[str, Any]] = []
        self.hooks = BatchHooks()
        self.cache: pipeline.CacheFill | None = None
        """For a dataset with a cache, its first epochs; the first one fills the cache. None without a cache."""
        self.passes = self.steps = self.measured_steps = 0
        self.first_s = self.period_s = self.call_s = 0.0
        self.starts: list[float] = []
        """For each epoch except the very first: seconds from its start to the end of its first step."""
        self.rows = 0
        self.timeline: list[list[float]] = []
        self.rounds: list[dict[str, float]] = []
        self.gaps: list[tuple[float, float]] = []
        """For some series of steps: sum of the gaps between consecutive input elements, and total time, seconds."""
        self.no_ceiling = ""
        """Why the step on a resident batch was not measured; "" if it was, or may still be."""
        self.step: dict[str, Any] = {}
        """File with the graph of a step, or why it was not written."""
        self.trace: dict[str, Any] = {}
        """Folder with a trace of the device, or why it is missing."""
        self.measuring_s = 0.0
        """Time that the measurement itself took, seconds."""
        self.iterator: Any = None
        self._begun_s = self._last_end_s = self._began_epoch_s = 0.0
        self._row = Window()
        self._window: Window | None = None
        self._moment: Moment | None = None
        """When the window of real steps began."""
        self._drain = 0
        """Number of next steps that are not measured."""
        self._is_plain = False
        self._has_no_model = False
        self._look_at = 0
        """Number of steps up to which only their time is measured."""
        self._latest_s: deque[float] = deque(maxlen=LATEST)
        """Durations of the latest calls, seconds."""
        self._original: Any = None
        self._ceiling: ceiling.Ceiling | None = None

    def is_of(self, model: Any) -> bool:
        """Whether these calls of `fit` belong to this model."""
        return self._model() is model

    def watch(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the function that replaces the train function."""
        self._original = function

        def train_function(iterator: Any) -> Any:
            begun_s = clock()
            if self._is_plain and self._last_end_s:
                logs = function(iterator)
                self._did_plainly(begun_s, clock())
                return logs
            if self._wants_ceiling():
                self._row = Window()
                logs = self._first_on_resident(function, iterator)
                # This step is counted, but not measured: its time includes our preparations.
                self.steps += 1
                self._last_end_s = clock()
                return logs
            logs = function(iterator)
            try:
                self._did(iterator, begun_s, clock())
            except Exception as error:  # noqa: BLE001 - the script continues
                FACTS.failed(error)
            return logs

        return train_function

    def is_measured(self) -> bool:
        """Whether `fit` is training now, and U has been measured or cannot be measured."""
        done = len(self.rounds) >= ROUNDS or bool(self.no_ceiling)
        return self._original is not None and self.measured_steps > 0 and done

    def whole_passes(self) -> int:
        """Number of completed epochs; a trace ends with the epoch, since no step runs between epochs."""
        return self.passes

    def step_s(self) -> float:
        """Duration of a call of the train function, seconds."""
        return self.period_s / max(1, self.measured_steps)

    def begin_epoch(self) -> None:
        """Begin an epoch: the time since the last step does not belong to a step."""
        self._last_end_s = 0.0
        self._row = Window()
        self._began_epoch_s = clock()
        if self.cache is not None:
            self.cache.begin_pass()

    def end_epoch(self) -> None:
        """End an epoch after its last step, and release its iterator."""
        self.passes += 1
        if self.cache is not None and self._last_end_s:
            self.cache.end_pass(self._last_end_s - self._began_epoch_s)
            if self.passes == 1:
                self._forget_filling()
        self.iterator = None
        if self._window is not None:
            self._window.pause()

    def _forget_filling(self) -> None:
        """Start the figures again: from here on, the input is read from a cache, and the old figures do not apply."""
        self.first_s += self.period_s
        self.measured_steps, self.period_s, self.call_s = 0, 0.0, 0.0
        self.nodes, self.gaps = [], []
        self._latest_s.clear()

    def end(self, model: Any) -> None:
        """Restore the model's train function after `fit`, even after an error."""
        self.iterator, self._window, self._ceiling = None, None, None
        self.hooks.end()
        if self._original is not None:
            model.train_function = self._original
        self._original = None
        FACTS.changes += 1

    def _wants_ceiling(self) -> bool:
        warm = self.steps >= WARM_CALLS and len(self._latest_s) == LATEST
        ready = warm and len(self.rounds) < ROUNDS and not self._is_filling()
        return ready and not self.no_ceiling and self._ceiling is None

    def _is_filling(self) -> bool:
        """Whether a cache is being filled that later epochs will read."""
        return self.cache is not None and self.passes == 0 and self.model.get("epochs", 1) > 1

    def _first_on_resident(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Take the batch of this step, run the step with it, and keep it as the resident batch."""
        begun_s = clock()
        made = None
        if min(self._latest_s) > LONGEST_STEP_S:
            self.no_ceiling = "running such a long step again would delay the training"
            return function(iterator)
        FACTS.measuring = True
        try:
            with FACTS.guarded():
                self.no_ceiling = "the watcher failed"
                made, self.no_ceiling = ceiling.prepare(function, iterator, self._model())
            if made is None:
                return function(iterator)
            # From here on the batch has been read, so the step must be run with it, even after an error.
            step_input, self._ceiling = made.take(iterator)
            self.no_ceiling = "" if self._ceiling is not None else "the watcher failed"
            with FACTS.guarded():
                self.step = write_graph(made.concrete, batch=step_input.batches[0])
        finally:
            FACTS.measuring = False
            self.measuring_s += clock() - begun_s
        self._drain = FIRST_DRAINED
        self.rows = pipeline.rows_of(step_input.batches[0])
        return function(step_input.once)

    def _per_call(self) -> int:
        """Number of input elements per call of the train function."""
        return int(self.model.get("steps_per_execution", 1))

    def _did(self, iterator: Any, begun_s: float, ended_s: float) -> None:
        self.iterator = iterator
        period_s = ended_s - self._last_end_s if self._last_end_s else None
        self._last_end_s = ended_s
        self._latest_s.append(ended_s - begun_s)
        self.steps += 1
        FACTS.changes += 1
        if self.steps == 1:
            self._begun_s = begun_s
        if self.cache is not None and self._is_filling() and self.steps & (self.steps - 1) == 0:
            # After steps 1, 2, 4, 8, ...
            self.cache.look(self._model_of_input()[0])
        if len(self.timeline) < MAX_SHOWN:
            spent_s = ended_s - begun_s
            self.timeline.append([begun_s - self._begun_s, 0.0, spent_s, 0.0, period_s or spent_s])
        if period_s is None:
            if self.steps > 1 and len(self.starts) < MAX_SHOWN:
                self.starts.append(ended_s - self._began_epoch_s)
            return
        self.hooks.counts = self.steps >= WARM_CALLS
        if self.steps <= WARM_CALLS:
            self.first_s += period_s
            return
        self._row.add(period_s)
        if self.steps in LOOK_AT_STEPS:
            self._read_nodes()
        self.measured_steps += 1
        self.period_s += period_s
        self.call_s += ended_s - begun_s
        self._in_window(period_s)

    def _did_plainly(self, begun_s: float, ended_s: float) -> None:
        """Record a step like `_did`, but only its time: each line here costs the script time."""
        self.steps += 1
        self.measured_steps += 1
        self.period_s += ended_s - self._last_end_s
        self.call_s += ended_s - begun_s
        self._last_end_s = ended_s
        FACTS.changes += 1
        self._is_plain = self.steps < self._look_at

    def _in_window(self, period_s: float) -> None:
        if self._ceiling is None or len(self.rounds) >= ROUNDS:
            # Before the next check of the input, a series of MAX_GAPS steps is measured in full.
            looks = (steps for steps in LOOK_AT_STEPS if steps > self.steps)
            self._look_at = min(looks, default=sys.maxsize) - MAX_GAPS
            shown = self.steps > MAX_SHOWN and not self._wants_ceiling()
            self._is_plain = shown and self.steps < self._look_at
            if self._is_plain:
                self._row = Window()
            return
        if self._drain > 0:
            self._drain -= 1
            return
        if self._window is None:
            self._ceiling.settle()
            self._window, self._moment = Window(), now()
            # The wait for the device in `settle` belongs to no step.
            self._last_end_s = clock()
            self._row = Window()
            return
        self._window.add(period_s)
        if self._window.is_full():
            self._close(self._window, self._ceiling)

    def _close(self, window: Window, resident: ceiling.Ceiling) -> None:
        settled_s = resident.settle()
        real_away = LOAD.between(self._moment, now()).away()
        nodes, gaps_us = self._model_of_input()
        self._keep(nodes)
        begun_s = clock()
        FACTS.measuring = True
        try:
            calls = max(1, min(window.calls, int(MAX_CEILING_S * window.calls / window.seconds)))
            ceiling_s, ceiling_away = resident.measure(calls)
            ceiling_s *= window.calls / calls
            transfer_s = resident.transfer_s() * window.calls
        except Exception as error:  # noqa: BLE001 - whatever a step can raise: the script continues
            self.no_ceiling = f"the step failed on a resident batch: {type(error).__name__}"
            self._ceiling = None
            return
        finally:
            FACTS.measuring = False
            self._window, self._row = None, Window()
            self.measuring_s += clock() - begun_s
            self._last_end_s = clock()
        measured = {
            "calls": window.calls,
            "real_s": window.seconds + settled_s,
            "ceiling_s": ceiling_s,
            "real_away": real_away,
            "ceiling_away": ceiling_away,
            "transfer_s": transfer_s,
        }
        gap = window.gap(gaps_us, self._per_call())
        if gap is not None:
            measured["gap_s"], measured["gap_of_s"] = gap
        self.rounds.append(measured)
        ahead = sum(node["buffered"] for node in nodes if node["depth"] <= 3)
        prefetched = sum(node["parameters"].get("buffer_size", [0])[0] for node in nodes)
        self._drain = int(min(MAX_DRAINED, 2 + max(ahead if ahead < 1000 else 0, prefetched)))
        if len(self.rounds) >= ROUNDS:
            self._ceiling = None

    def _read_nodes(self) -> None:
        if self.iterator is None:
            return
        nodes, gaps_us = self._model_of_input()
        self._keep(nodes)
        gap = self._row.gap(gaps_us, self._per_call())
        if gap is not None:
            self.gaps.append(gap)

    def _model_of_input(self) -> tuple[list[dict[str, Any]], list[float]]:
        if self._has_no_model:
            return [], []  # do not request it again: TensorFlow would print a warning each time
        nodes, gaps_us = pipeline.read_model(self.iterator)
        self._has_no_model = not nodes
        return nodes, gaps_us

    def _keep(self, nodes: list[dict[str, Any]]) -> None:
        # Near the end of a pass, TensorFlow has already dropped the inner stages: keep the longer list.
        if len(nodes) >= len(self.nodes):
            self.nodes = nodes

    def as_json(self) -> dict[str, Any]:
        """Return these calls of `fit` as facts."""
        plain = (
            "place", "model", "stages", "nodes", "passes", "steps", "measured_steps",
            "first_s", "period_s", "call_s", "starts", "rows", "timeline",
            "rounds", "gaps", "no_ceiling", "step", "measuring_s", "trace",
        )  # fmt: skip
        facts = {name: getattr(self, name) for name in plain}
        facts["kind"] = "fit"
        facts["cache"] = None if self.cache is None else self.cache.as_json()
        return facts | {"hooks": self.hooks.as_json(), "hooked_steps": self.steps - WARM_CALLS}


FITS: list[Fit] = []
"""All calls of `fit`, by line and model, in order of their first call."""


def watched_fit(fit: Fit, model: Any) -> Callable[[Any], Any]:
    """Return the function that replaces a model's train function."""
    return fit.watch(model.train_function)
