"""Loops in the user's own code: their lines, and how long each step waits for input, calls, and synchronizes."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from . import pipeline, stages
from .places import NOWHERE, Place, user_caller, user_calls, who_called
from .wall import LOAD, Moment, now
from .watch import FACTS, wrap

KEY = "stoker_loop"
"""Attribute of an iterator that holds its loop."""

REPLICAS = "stoker_replicas"
"""Attribute of a distributed dataset: the number of replicas that share each of its batches."""

WARM_STEPS = 2
"""Number of first steps of a loop that are not measured, even if they did not trace."""

MAX_SHOWN = 240
"""Maximum number of steps whose individual times are kept for the timeline."""

LOOK_AT_STEPS = (4, 12, 30, 100, 300, 1_000, 3_000, 10_000)
"""Numbers of steps after which tf.data's figures about the input are read. They are read several times, because the
figures of its inner stages are lost when a pass ends."""

clock = time.perf_counter

MIN_MEASURED = 5
"""Minimum number of measured steps before the device is traced."""

MAX_ROUNDS = 3
"""Number of measurements of U for a loop inside a tf.function."""


@dataclass(slots=True, eq=False)
class Loop:
    """The steps that begin in one line of the user's code.

    The work for every step is in few functions and uses slots, because it costs the script time.
    """

    place: Place
    kind: str
    passes: int = 0
    steps: int = 0
    measured_steps: int = 0
    first_s: float = 0.0
    wait_s: float = 0.0
    call_s: float = 0.0
    sync_s: float = 0.0
    period_s: float = 0.0
    rows: int = 0
    replicas: int = 1
    """Number of replicas that share a batch."""
    distributed: bool = False
    """Whether a strategy distributes the batches."""
    batches: int = 0
    """Number of batches per call if the loop is inside a tf.function; 0 if unknown."""
    stages: list[int] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    step_calls: list[tuple[str, int, int]] = field(default_factory=list)
    """Where the first gradients were computed: the result of `user_calls`."""
    timeline: list[list[float]] = field(default_factory=list)
    rounds: list[dict[str, float]] = field(default_factory=list)
    """Measurements of U: each compares a window of real steps with calls on data in memory."""
    no_ceiling: str = ""
    """Why U cannot be measured; "" if it can."""
    step: dict[str, Any] = field(default_factory=dict)
    """File with the graph of a step."""
    trace: dict[str, Any] = field(default_factory=dict)
    """Folder with a trace of the device, or why it is missing."""
    load: dict[str, float] = field(default_factory=dict)
    """Sums over some consecutive steps, in seconds. `wall_s`: wall time; `away_s`: its part that other programs took;
    `wait_s`: wait for a core; `python_s`, `python_run_s`: wall and CPU time outside the calls. Empty if unknown."""
    measuring_s: float = 0.0
    """Time that the measurement itself took, seconds."""

    syncs: dict[Place, int] = field(default_factory=dict)
    eager_gradients: dict[Place, int] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    cache: pipeline.CacheFill | None = None
    """The first passes over a dataset with a cache; None without a cache."""
    sample: Any = None
    """The recorded batch of a dataset, for a loop inside a tf.function."""
    mark: tuple[int, float] = (0, 0.0)
    """Number of measured steps, and their time, when the latest window began."""
    moment: Moment | None = None
    """The moment when the latest window began."""
    load_at: int = LOOK_AT_STEPS[0]
    """Number of steps after which the load is checked next."""
    left_out: int = 0
    """Number of next steps that are not measured: their input was prepared during a measurement."""
    begun_s: float = 0.0
    thread: int = 0
    """ID of the thread that runs the loop."""
    look_at: int = 0
    """Number of steps after which the input is checked next."""
    pass_wait_s: float = 0.0
    """Time that the current pass has waited for its input, seconds."""
    measures_again: bool = field(init=False)
    """Whether the step will still be repeated with the same arguments to measure U."""
    _call_run_s: float = 0.0
    """CPU time of the loop's thread inside all calls, seconds."""
    _marked: tuple[Moment | None, tuple[int, ...], float, float] = (None, (), 0.0, 0.0)
    _start_s: float = 0.0
    _wait_s: float = 0.0
    _call_s: float = 0.0
    _sync_s: float = 0.0
    _trains: bool = False
    _traced: bool = False
    _open: bool = False

    def __post_init__(self) -> None:
        self.measures_again = self.kind == "dataset"
        if self.kind == "inside":
            self.load_at = sys.maxsize

    def is_measured(self) -> bool:
        """Whether the loop is training now, and U has been measured or cannot be measured."""
        if self.kind == "inside":
            return self.steps > 0 and (len(self.rounds) >= MAX_ROUNDS or bool(self.no_ceiling))
        is_current = STATE.current is self and self.measured_steps >= MIN_MEASURED
        return is_current and (not self.measures_again or bool(self.no_ceiling))

    def whole_passes(self) -> int:
        """Number of completed passes over the data; a trace ends with the pass, since no step runs between passes."""
        return self.passes

    def step_s(self) -> float:
        """Duration of a step, seconds; for a loop inside a tf.function, of a call."""
        return self.period_s / max(1, self.measured_steps)

    def begin_pass(self, begun_s: float) -> None:
        """Begin a pass over the data.

        Args:
            begun_s: When the script requested the iterator of the pass.
        """
        self.pass_wait_s = clock() - begun_s
        if self.cache is not None:
            if self.passes == 1:
                self._forget_filling()
            self.cache.begin_pass()

    def end_pass(self) -> None:
        """End a pass: the data has ended."""
        self.drop_step()
        self.passes += 1
        if self.cache is not None and self.steps:
            self.cache.end_pass(self.pass_wait_s)

    def _forget_filling(self) -> None:
        """Start the figures again: from here on, the input is read from a cache, and the old figures do not apply."""
        self.first_s += self.period_s
        self.measured_steps = 0
        self.period_s = self.wait_s = self.call_s = self.sync_s = 0.0
        self.nodes, self.load, self.look_at = [], {}, self.steps + LOOK_AT_STEPS[0]
        self.load_at = self.look_at
        if self.rounds:
            self.rounds, self.measures_again = [], True
        self.mark, self.moment = (0, 0.0), None

    def next_look(self) -> int:
        """Number of steps after which the input is checked next; checks are more frequent while it fills a cache."""
        if self.cache is not None and self.cache.is_filling():
            return max(1, 2 * self.steps)
        return next((steps for steps in LOOK_AT_STEPS if steps > self.steps), sys.maxsize)

    def begin_step(self, now_s: float) -> None:
        """Begin a step; this ends the previous step, if any."""
        if self._open:
            self.end_step(now_s)
        else:
            self.begun_s = self.begun_s or now_s
            self.thread = get_ident()
        self._open, self._start_s = True, now_s

    def waited(self, seconds: float) -> bool:
        """Record that the step waited for its input; return whether the input must be checked."""
        self._wait_s += seconds
        self.pass_wait_s += seconds
        return self.steps >= self.look_at

    def called(
        self, seconds: float, function: str, *, trains: bool, traced: bool, run_s: float = 0.0
    ) -> None:
        """Record a call of a `tf.function`; `run_s` is the CPU time of this thread during the call, seconds."""
        self._call_s += seconds
        self._call_run_s += run_s
        self._trains |= trains
        self._traced |= traced
        if trains:
            self.functions[function] = self.functions.get(function, 0) + 1
        if self.steps >= self.load_at:
            self._look_at_load()

    def _look_at_load(self) -> None:
        begun_s = clock()
        self.load_at = next((steps for steps in LOOK_AT_STEPS if steps > self.steps), sys.maxsize)
        outside_s = self.wait_s + self._wait_s + self.call_s + self._call_s
        outside_s += self.sync_s + self._sync_s
        # If this is the same in two checks, all steps between them were measured and belong to the same pass.
        row = (self.steps - self.measured_steps, self.passes)
        was, was_row, was_outside_s, was_run_s = self._marked
        self._marked = now(), row, outside_s, self._call_run_s
        span = LOAD.between(was, self._marked[0])
        if span.wall_s and row == was_row:
            spent = {
                "wall_s": span.wall_s,
                "away_s": span.away_s,
                "wait_s": span.wait_s,
                "python_s": span.wall_s - (outside_s - was_outside_s),
                "python_run_s": span.run_s - (self._call_run_s - was_run_s),
            }
            self.load = {name: self.load.get(name, 0.0) + value for name, value in spent.items()}
        self.not_its_own(clock() - begun_s)

    def synced(self, seconds: float, at: Place) -> None:
        """Record that a tensor's value was read."""
        self._sync_s += seconds
        if self._open:
            self.syncs[at] = self.syncs.get(at, 0) + 1

    def has_gradient(self, at: Place) -> None:
        """Record that gradients were computed eagerly."""
        self._trains = True
        self.step_calls = self.step_calls or user_calls()
        self.eager_gradients[at] = self.eager_gradients.get(at, 0) + 1

    def not_its_own(self, seconds: float) -> None:
        """Exclude from the open step the time that the measurement itself took."""
        self.measuring_s += seconds
        self._start_s += seconds

    def end_step(self, now_s: float) -> None:
        """Record the open step."""
        if not self._open:
            return
        period_s = now_s - self._start_s
        if self._trains:
            self._book(period_s)
        self.drop_step()

    def drop_step(self) -> None:
        """Drop the open step without recording it, or reset it after it was recorded."""
        self._open = self._trains = self._traced = False
        self._wait_s = self._call_s = self._sync_s = 0.0

    def _book(self, period_s: float) -> None:
        self.steps += 1
        FACTS.changes += 1
        if self.steps <= MAX_SHOWN:
            begun = self._start_s - self.begun_s
            self.timeline.append([begun, self._wait_s, self._call_s, self._sync_s, period_s])
        if self._traced or self.steps <= WARM_STEPS:
            self.first_s += period_s
            return
        if self.left_out > 0:
            self.left_out -= 1
            self.first_s += period_s
            return
        self.measured_steps += 1
        self.wait_s += self._wait_s
        self.call_s += self._call_s
        self.sync_s += self._sync_s
        self.period_s += period_s

    def as_json(self) -> dict[str, Any]:
        """Return the loop as facts."""
        plain = (
            "kind", "place", "passes", "steps", "measured_steps", "first_s", "wait_s", "call_s", "sync_s",
            "period_s", "rows", "batches", "stages", "nodes", "step_calls", "timeline", "rounds",
            "no_ceiling", "load", "step", "trace", "measuring_s",
        )  # fmt: skip
        return {name: getattr(self, name) for name in plain} | {
            "model": {"replicas": self.replicas, "distributed": self.distributed},
            "syncs": [[*at, count] for at, count in list(self.syncs.items())],
            "eager_gradients": [[*at, count] for at, count in list(self.eager_gradients.items())],
            "cache": None if self.cache is None else self.cache.as_json(),
        }


class State:
    """All loops of this process, and which one is running."""

    def __init__(self) -> None:
        self.loops: dict[tuple[Place, str], Loop] = {}
        self.current: Loop | None = None
        self.iterator: Callable[[], Any] = lambda: None
        """The iterator of the current loop, while it is in use."""
        self.inside: Loop | None = None
        """The loop whose `next` is running; needed because `__next__` of some iterators calls `get_next`."""
        self.fits = 0
        """Number of running calls of `fit`."""
        self.iterated_in_graph = False
        """Whether the tf.function that is being traced reads elements of an iterator itself."""

    def is_amid(self, loop: Loop | None) -> bool:
        """Whether this loop runs and its U will not be measured again; if `loop` is None, whether `fit` runs."""
        if loop is None:
            return self.fits > 0
        return loop is self.current and self.iterator() is not None and not loop.measures_again


STATE = State()


def as_json() -> list[dict[str, Any]]:
    """Return every loop as facts."""
    return [loop.as_json() for loop in list(STATE.loops.values())]


def forget() -> None:
    """Forget all loops."""
    STATE.__init__()  # type: ignore[misc]  # all its fields


def any_step() -> bool:
    """Whether any loop has trained a step."""
    return any(loop.steps for loop in list(STATE.loops.values()))


def loop_at(place: Place, kind: str) -> Loop:
    """The loop of this line and kind; created if new."""
    return STATE.loops.setdefault((place, kind), Loop(place, kind))


def current() -> Loop | None:
    """The loop that is running; None if none is, or if `fit` runs."""
    if STATE.fits:
        return None
    loop = STATE.current
    if loop is not None and loop.kind == "dataset" and STATE.iterator() is None:
        loop.end_step(clock())
        STATE.current = None
        return None
    return loop


def install(tf: Any) -> None:
    """Watch iteration over datasets, and values that are read from tensors."""
    wrap(tf.data.Dataset, "__iter__", lambda original: _iter(tf, original))
    for name in ("experimental_distribute_dataset", "distribute_datasets_from_function"):
        wrap(tf.distribute.Strategy, name, lambda original: _distribute(tf, original))


_patched: set[type] = set()


def _distribute(tf: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        with FACTS.guarded():
            kind = type(result)
            if not isinstance(result, tf.data.Dataset) and kind not in _patched:
                _patched.add(kind)
                wrap(kind, "__iter__", lambda inner: _iter(tf, inner))
            given = next(iter((*args, *kwargs.values())), None)
            # The default strategy returns its argument: nothing is distributed.
            if result is not given:
                setattr(result, REPLICAS, int(self.num_replicas_in_sync))
                if (stage := stages.of(given)) is not None:
                    setattr(result, stages.KEY, stage)
        return result

    return call


def _iter(tf: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any) -> Any:
        begun_s = clock()
        iterator = original(self)
        if not STATE.fits and tf.executing_eagerly():
            with FACTS.guarded():
                _follow(tf, iterator, self, begun_s)
        return iterator

    return call


def _follow(tf: Any, iterator: Any, dataset: Any, begun_s: float) -> None:
    place, maker = who_called()
    # Iteration by Keras itself (evaluate, predict, adapt) is not a loop in the user's code.
    if maker in ("keras", "tf_keras") or place == NOWHERE:
        return
    kind = type(iterator)
    if kind not in _patched:
        _patched.add(kind)
        wrap(kind, "__next__", _next)
        wrap(kind, "get_next", _next)
        _watch_tensors(tf)
    loop = loop_at(place, "dataset")
    loop.replicas = getattr(dataset, REPLICAS, 1)
    loop.distributed = hasattr(dataset, REPLICAS)
    chain = stages.chain(stages.of(dataset))
    loop.stages = [stage.id for stage in chain] or loop.stages
    if loop.cache is None and loop.passes == 0 and stages.has_cache(chain, of_passes=True):
        loop.cache = pipeline.CacheFill()
    loop.begin_pass(begun_s)
    setattr(iterator, KEY, loop)


def _next(original: Callable[..., Any]) -> Callable[..., Any]:
    is_eager = sys.modules["tensorflow"].executing_eagerly

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop = self.__dict__.get(KEY)
        if not is_eager():
            # The iterator that a tf.function gets while it is traced is another object, without a loop.
            STATE.iterated_in_graph = True
            return original(self, *args, **kwargs)
        if loop is None or STATE.fits or FACTS.measuring or loop is STATE.inside:
            return original(self, *args, **kwargs)
        begun_s = clock()
        if STATE.current is not loop or STATE.iterator() is not self:
            _turn_to(loop, self, begun_s)
        loop.begin_step(begun_s)
        STATE.inside = loop
        try:
            element = original(self, *args, **kwargs)
        except BaseException:
            with FACTS.guarded():
                _ended(loop)
            raise
        finally:
            STATE.inside = None
        if loop.waited(clock() - begun_s):
            with FACTS.guarded():
                _look(loop, self, element)
        return element

    return call


def _turn_to(loop: Loop, iterator: Any, now_s: float) -> None:
    """Make a loop the current one: another loop runs now, or another pass of the same loop begins."""
    if STATE.current is not None:
        STATE.current.end_step(now_s)
    loop.end_step(now_s)
    STATE.current, STATE.iterator = loop, weakref.ref(iterator)


def _ended(loop: Loop) -> None:
    loop.end_pass()
    STATE.current = None


def _look(loop: Loop, iterator: Any, element: Any) -> None:
    loop.look_at = loop.next_look()
    if loop.rows == 0:
        # `rows_of` sees the share of only one replica.
        loop.rows = pipeline.rows_of(element) * loop.replicas or -1
    if loop.steps == 0:
        return
    nodes, _ = pipeline.read_model(iterator)
    if loop.cache is not None:
        loop.cache.look(nodes)
    if len(nodes) >= len(loop.nodes):
        loop.nodes = nodes


def _watch_tensors(tf: Any) -> None:
    """Watch the methods of tensors that make Python wait for a value; called at the script's first iterator."""
    kind = type(tf.constant(0))
    for name in ("numpy", "__float__", "__int__", "__bool__", "__array__", "__format__", "__str__"):
        owner = next((each for each in kind.__mro__ if name in vars(each)), None)
        if owner is not None:
            wrap(owner, name, _synchronises)


def _synchronises(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop = STATE.current
        # A `tf.py_function` in a map also reads values, but in a thread of TensorFlow: they do not count.
        if loop is None or STATE.fits or FACTS.measuring or loop.thread != get_ident():
            return original(self, *args, **kwargs)
        begun_s = clock()
        result = original(self, *args, **kwargs)
        took_s = clock() - begun_s
        with FACTS.guarded():
            at = user_caller()
            if at is not None:
                loop.synced(took_s, at)
        return result

    return call
