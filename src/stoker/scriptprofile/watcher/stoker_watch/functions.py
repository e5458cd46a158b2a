"""Every called `tf.function`: how often it was traced, why, and whether it trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from time import thread_time
from typing import Any

from .loop_ceiling import Given, after_pass, after_step, before_pass
from .loops import KEY as ITERATED
from .loops import STATE, Loop, clock, current, loop_at
from .places import NOWHERE, Place, of_code, place
from .watch import FACTS, wrap

KEY = "stoker_function"
"""The attribute of a `tf.function` that holds its record."""

MAX_RECORDS = 1_000
"""Most watched functions: a script may make functions without end."""

MAX_CAUSES = 12
"""Number of traces whose arguments are recorded."""


TAKES = (
    "the tf.function takes its batches from an iterator by itself, and one that was read is gone (give "
    "it the batch)"
)
"""Why a step is not run on one batch."""

QUICKEST_TRACE_S = 5e-4
"""A call that took hardly longer than the quickest one did not trace: no trace is quicker."""

SHORT_CALL_S = 2e-3
"""A longer call is always checked: the check is negligible then."""


class Record:
    """One function of the user's (by its code), for all `tf.function`s made of it."""

    def __init__(self, name: str, at: Place) -> None:
        self.name, self.place = name, at
        self.calls = self.traces = self.made = 0
        self.causes: list[dict[str, str]] = []
        self.trains = self.iterates = self.takes = False
        self.trace_s = 0.0
        self.optimizer: Any = None

    def as_json(self) -> dict[str, Any]:
        """The function as facts."""
        names = ("name", "place", "calls", "traces", "made", "causes", "trace_s")
        return {name: getattr(self, name) for name in names}


class _Instance:
    """One `tf.function`: its record, and how often it has been traced."""

    __slots__ = ("least_s", "longest_s", "loop", "record", "traces")

    def __init__(self, record: Record) -> None:
        self.record, self.traces = record, 0
        self.least_s = 0.0
        """Its quickest call without a trace; 0: none yet."""
        self.longest_s = 0.0
        """A call that took no longer did not trace."""
        self.loop: Loop | None = None
        """The loop whose step it is, if nothing more is measured about it."""


_records: dict[tuple[str, Place, int], Record] = {}
_running: list[Record] = []
"""The outermost function that is running; functions that it calls are not watched."""


def as_json() -> list[dict[str, Any]]:
    """Every function that was called from Python, as facts."""
    return [record.as_json() for record in list(_records.values())]


def forget() -> None:
    """Start without calls."""
    _records.clear()
    _running.clear()


def install(tf: Any) -> None:
    """Watch calls of `tf.function`, and gradients."""
    kind = type(tf.function(lambda: None))
    wrap(kind, "__call__", lambda original: _call(tf, original))
    wrap(tf.GradientTape, "gradient", lambda original: _gradient(tf, original))
    wrap(tf.data.Dataset, "reduce", lambda original: _iterates(tf, original))
    wrap(tf.data.Iterator, "get_next_as_optional", lambda original: _iterates(tf, original))


def _iterates(tf: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _running and not tf.executing_eagerly():
            _running[0].iterates = True
        return original(self, *args, **kwargs)

    return call


def _gradient(tf: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not STATE.fits:
            with FACTS.guarded():
                _trains(eager=tf.executing_eagerly())
        return original(self, *args, **kwargs)

    return call


def _trains(*, eager: bool) -> None:
    if not eager:
        if _running:
            _running[0].trains = True
        return
    at = place()
    loop = current()
    if loop is None or loop.kind != "dataset":
        # A loop over arrays has no iterator: a step begins where its gradients are computed.
        loop = loop_at(at, "calls")
        STATE.current = loop
        loop.begin_step(clock())
    loop.has_gradient(at)


def applied() -> None:
    """An optimizer was applied: the function that is being traced trains."""
    if _running:
        _running[0].trains = True


def _call(tf: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    is_eager = tf.executing_eagerly

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _running or FACTS.measuring or not is_eager():
            return original(self, *args, **kwargs)
        one = self.__dict__.get(KEY) or _instance(self)
        record, mine, named = one.record, args, kwargs
        if record.iterates and record.trains and not STATE.fits:
            with FACTS.guarded():
                mine, named = before_pass(loop_at(record.place, "inside"), (args, kwargs))
        _running.append(record)
        STATE.iterated_in_graph = False
        begun_s, begun_run_s = clock(), thread_time()
        try:
            return original(self, *mine, **named)
        finally:
            took_s, run_s = clock() - begun_s, thread_time() - begun_run_s
            _running.clear()
            if took_s <= one.longest_s and STATE.is_amid(one.loop):
                record.calls += 1
                if one.loop is not None:
                    one.loop.called(took_s, record.name, trains=True, traced=False, run_s=run_s)
            else:
                try:
                    _called(self, one, begun_s, (args, kwargs), run_s)
                except Exception as error:  # noqa: BLE001 - the script continues
                    FACTS.failed(error)

    return call


_NOBODY = Record("", NOWHERE)


def _instance(function: Any) -> _Instance:
    one = _Instance(_NOBODY)
    with FACTS.guarded():
        name, at = _name(function)
        # Functions of Keras that are called in one line are different ones.
        which = 0 if of_code(_code(function)) != NOWHERE else len(_records)
        if len(_records) >= MAX_RECORDS:
            return _Instance(Record(name, at))
        record = _records.setdefault((name, at, which), Record(name, at))
        record.made += 1
        one = _Instance(record)
        setattr(function, KEY, one)
    return one


def _name(function: Any) -> tuple[str, Place]:
    code = _code(function)
    at = of_code(code)
    name = getattr(code, "co_name", type(function.python_function).__name__)
    return str(name), at if at != NOWHERE else place()


def _code(function: Any) -> Any:
    """The code of the decorated function, below TensorFlow's layers around a method."""
    python = function.python_function
    for _ in range(8):
        inner = getattr(python, "__wrapped__", None) or getattr(python, "func", None)
        inner = inner or getattr(python, "__func__", None)
        if inner is None:
            break
        python = inner
    return getattr(python, "__code__", None)


def _called(
    function: Any,
    one: _Instance,
    begun_s: float,
    given: Given,
    run_s: float,
) -> None:
    """Record a finished call: its times, whether it traced, and its step of the loop.

    Args:
        function: The user's `tf.function`.
        one: Its record.
        begun_s: When the call began.
        given: Its arguments.
        run_s: CPU time of this thread during the call.
    """
    now_s = clock()
    record, took_s = one.record, now_s - begun_s
    record.calls += 1
    # TensorFlow's count of traces takes 2 us to read, so it is not read for a quick call.
    traced = took_s > one.longest_s and _has_traced(function, one, took_s, given)
    if not traced and (took_s < one.least_s or not one.least_s):
        one.least_s = min(took_s, SHORT_CALL_S)
        one.longest_s = one.least_s + QUICKEST_TRACE_S
    if STATE.fits:
        return
    loop = current()
    if record.trains and record.iterates:
        loop = _inner_loop(record, begun_s, now_s, traced=traced)
        if not traced:
            after_pass(loop, function, given, took_s)
        return
    if loop is None or loop.kind == "calls" or (record.trains and record.takes):
        if not record.trains:
            return
        is_new = loop is None or loop.kind != "calls" or traced
        loop = loop_at(place(), "calls") if is_new or loop is None else loop
        loop.no_ceiling = TAKES if record.takes else ""
        if record.takes:
            _take_stages(loop, given)
        STATE.current = loop
        loop.begin_step(begun_s)
    loop.called(took_s, record.name, trains=record.trains, traced=traced, run_s=run_s)
    if record.trains and loop.kind == "dataset" and not traced:
        if loop.measures_again:
            after_step(loop, function, given)
        else:
            one.loop = loop


def _take_stages(loop: Loop, given: Given) -> None:
    """The dataset of an iterator that the step got is known."""
    args, kwargs = given
    for each in (*args, *kwargs.values()):
        read = getattr(each, ITERATED, None)
        if isinstance(read, Loop):
            loop.stages = loop.stages or read.stages


def _has_traced(function: Any, one: _Instance, took_s: float, given: Given) -> bool:
    """Whether the call traced; the record gets the reason for the trace."""
    record, traces = one.record, int(function.experimental_get_tracing_count())
    if traces <= one.traces:
        return False
    record.takes |= STATE.iterated_in_graph
    record.traces += traces - one.traces
    one.traces = traces
    record.trace_s += took_s
    if len(record.causes) < MAX_CAUSES:
        record.causes.append(_describe(function, *given))
    return True


def _inner_loop(record: Record, begun_s: float, now_s: float, *, traced: bool) -> Loop:
    """The function contains the loop: a call is a whole pass, whose steps are invisible."""
    loop = loop_at(record.place, "inside")
    loop.begin_step(begun_s)
    loop.called(now_s - begun_s, record.name, trains=True, traced=traced)
    loop.end_step(now_s)
    loop.passes += 1
    return loop


def _describe(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Argument -> the part of it that decides about a trace: a Python value, or dtype and shape."""
    try:
        names = list(inspect.signature(function.python_function).parameters)
    except (TypeError, ValueError):
        names = []
    if names[:1] == ["self"] and len(names) > len(args):
        names = names[1:]
    named = {
        (names[number] if number < len(names) else f"argument {number + 1}"): value
        for number, value in enumerate(args)
    }
    return {name: _shown(value) for name, value in (named | kwargs).items()}


def _shown(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)):
        return f"python {value!r}"[:80]
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{getattr(dtype, 'name', dtype)}{tuple(shape)}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_shown(each) for each in value[:8]) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in value.items()) + "}"
    return type(value).__name__
