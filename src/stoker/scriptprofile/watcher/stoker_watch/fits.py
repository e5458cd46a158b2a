"""`keras.Model.fit`: every step of it, alternating with the same step on a resident batch."""

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
"""Calls of the train function that are excluded: the first ones trace, compile and fill buffers."""

LATEST = 2
"""Number of calls of which the shortest gives the duration of a step."""

FIRST_DRAINED = 3
"""Calls that are left out after reading the batch, which itself took time."""


class Fit:
    """One line that calls `fit` of one model."""

    def __init__(self, place: Place, model: Any) -> None:
        self.place = place
        self._model = weakref.ref(model)
        self.model: dict[str, Any] = {}
        self.stages: list[int] = []
        self.nodes: list[dict[str, Any]] = []
        self.hooks = BatchHooks()
        self.cache: pipeline.CacheFill | None = None
        """For a dataset with a cache: its first epoch makes what the later ones read."""
        self.passes = self.steps = self.measured_steps = 0
        self.first_s = self.period_s = self.call_s = 0.0
        self.starts: list[float] = []
        """From the start of each epoch except the very first to the end of its first step, seconds."""
        self.rows = 0
        self.timeline: list[list[float]] = []
        self.rounds: list[dict[str, float]] = []
        self.gaps: list[tuple[float, float]] = []
        """For some consecutive steps: time between two elements of the input, and the total time."""
        self.no_ceiling = ""
        """Why the step on a resident batch was not measured."""
        self.step: dict[str, Any] = {}
        """File of the step's graph."""
        self.trace: dict[str, Any] = {}
        """File of a trace of the device, or why there is none."""
        self.measuring_s = 0.0
        """Duration of the measurement itself, seconds."""
        self.iterator: Any = None
        self._begun_s = self._last_end_s = self._began_epoch_s = 0.0
        self._row = Window()
        self._window: Window | None = None
        self._moment: Moment | None = None
        """When it began."""
        self._drain = 0
        self._is_plain = False
        self._has_no_model = False
        self._look_at = 0
        """Up to this many steps, only time is measured."""
        self._latest_s: deque[float] = deque(maxlen=LATEST)
        """Duration of the latest calls, seconds."""
        self._original: Any = None
        self._ceiling: ceiling.Ceiling | None = None

    def is_of(self, model: Any) -> bool:
        """Whether it belongs to this model."""
        return self._model() is model

    def watch(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The replacement of the train function."""
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
                # Its time includes our preparations: it is counted, but not measured.
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
        """Whether it is training now, and U has been measured or cannot be."""
        done = len(self.rounds) >= ROUNDS or bool(self.no_ceiling)
        return self._original is not None and self.measured_steps > 0 and done

    def whole_passes(self) -> int:
        """Completed epochs: between two of them, nothing trains."""
        return self.passes

    def step_s(self) -> float:
        """Duration of a call of the train function, seconds."""
        return self.period_s / max(1, self.measured_steps)

    def begin_epoch(self) -> None:
        """The time since the last step does not belong to a step."""
        self._last_end_s = 0.0
        self._row = Window()
        self._began_epoch_s = clock()
        if self.cache is not None:
            self.cache.begin_pass()

    def end_epoch(self) -> None:
        """The epoch's last step is done; release the iterator."""
        self.passes += 1
        if self.cache is not None and self._last_end_s:
            self.cache.end_pass(self._last_end_s - self._began_epoch_s)
            if self.passes == 1:
                self._forget_filling()
        self.iterator = None
        if self._window is not None:
            self._window.pause()

    def _forget_filling(self) -> None:
        """From here on the input is another one: the old one's figures do not apply to it."""
        self.first_s += self.period_s
        self.measured_steps, self.period_s, self.call_s = 0, 0.0, 0.0
        self.nodes, self.gaps = [], []
        self._latest_s.clear()

    def end(self, model: Any) -> None:
        """Restore the replaced functions, even after an error."""
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
        """Take this step's batch, run the step with it, and keep it for the ceiling."""
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
            # The batch was read: training must use it, so nothing may be skipped from here on.
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
        """Elements per call of the train function."""
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
        """As `_did`, if nothing more is measured: each line here costs the script time."""
        self.steps += 1
        self.measured_steps += 1
        self.period_s += ended_s - self._last_end_s
        self.call_s += ended_s - begun_s
        self._last_end_s = ended_s
        FACTS.changes += 1
        self._is_plain = self.steps < self._look_at

    def _in_window(self, period_s: float) -> None:
        if self._ceiling is None or len(self.rounds) >= ROUNDS:
            # This many steps before the next check of the input, its series begins.
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
            # Settling took time that belongs to no step.
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
            return [], []  # TensorFlow writes a warning at each request
        nodes, gaps_us = pipeline.read_model(self.iterator)
        self._has_no_model = not nodes
        return nodes, gaps_us

    def _keep(self, nodes: list[dict[str, Any]]) -> None:
        # Near the end of a pass, the inner stages are already gone.
        if len(nodes) >= len(self.nodes):
            self.nodes = nodes

    def as_json(self) -> dict[str, Any]:
        """The line as facts."""
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
"""Every line that called `fit`, in order."""


def watched_fit(fit: Fit, model: Any) -> Callable[[Any], Any]:
    """The replacement of a model's train function."""
    return fit.watch(model.train_function)
