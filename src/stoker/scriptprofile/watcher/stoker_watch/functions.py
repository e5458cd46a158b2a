"""Watches every called `tf.function`: how often it was traced, why, and whether it trains."""

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
"""Attribute of a `tf.function` object that holds its `_Instance`."""

MAX_RECORDS = 1_000
"""Maximum number of watched functions: a script may create any number of them."""

MAX_CAUSES = 12
"""Maximum number of traces of a function whose arguments are recorded."""


TAKES = (
    "the tf.function reads its batches from an iterator itself, so a batch cannot be used twice (pass it "
    "the batch)"
)
"""Why a step is not run on a batch in memory."""

QUICKEST_TRACE_S = 5e-4
"""Minimum duration of a trace, seconds: a call that is longer than the quickest call by less than this did not
trace."""

SHORT_CALL_S = 2e-3
"""Calls longer than this, seconds, are always checked for a trace: the cost of the check is then negligible."""


class Record:
    """A function of the user, identified by its code; all `tf.function` objects created from it share this record."""

    def __init__(self, name: str, at: Place) -> None:
        self.name, self.place = name, at
        self.calls = self.traces = self.made = 0
        self.causes: list[dict[str, str]] = []
        self.trains = self.iterates = self.takes = False
        self.trace_s = 0.0
        self.optimizer: Any = None

    def as_json(self) -> dict[str, Any]:
        """Return the function as facts."""
        names = ("name", "place", "calls", "traces", "made", "causes", "trace_s")
        return {name: getattr(self, name) for name in names}


class _Instance:
    """One `tf.function` object: the record of its function, and how often the object was traced."""

    __slots__ = ("longest_s", "loop", "quickest_s", "record", "traces")

    def __init__(self, record: Record) -> None:
        self.record, self.traces = record, 0
        self.quickest_s = 0.0
        """Duration of its quickest call without a trace, seconds; 0 before the first one."""
        self.longest_s = 0.0
        """Maximum duration of a call that certainly did not trace, seconds."""
        self.loop: Loop | None = None
        """The loop whose step it is; set once only times are measured for this loop."""


_records: dict[tuple[str, Place, int], Record] = {}
_running: list[Record] = []
"""At most one entry: the outermost function that is running. Functions that it calls are not watched."""


def as_json() -> list[dict[str, Any]]:
    """Return every function that was called from Python, as facts."""
    return [record.as_json() for record in list(_records.values())]


def forget() -> None:
    """Forget all recorded calls."""
    _records.clear()
    _running.clear()


def install(tf: Any) -> None:
    """Watch calls of `tf.function`s, and computations of gradients."""
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
        # A loop over arrays has no iterator, so a step begins when its gradients are computed.
        loop = loop_at(at, "calls")
        STATE.current = loop
        loop.begin_step(clock())
    loop.has_gradient(at)


def applied() -> None:
    """Record that the current tf.function trains, because an optimizer was applied in it."""
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
        # Functions that are not in the user's code may differ even if the same line calls them: use a new number.
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
    """The code of the decorated function, without the wrappers that TensorFlow puts around a method."""
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
        one: What is known about this `tf.function` object.
        begun_s: When the call began.
        given: Arguments of the call.
        run_s: CPU time of this thread during the call, seconds.
    """
    now_s = clock()
    record, took_s = one.record, now_s - begun_s
    record.calls += 1
    # Reading TensorFlow's count of traces takes 2 us, so it is not read for a quick call.
    traced = took_s > one.longest_s and _has_traced(function, one, took_s, given)
    if not traced and (took_s < one.quickest_s or not one.quickest_s):
        one.quickest_s = min(took_s, SHORT_CALL_S)
        one.longest_s = one.quickest_s + QUICKEST_TRACE_S
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
    """Give the loop the stages of the dataset whose iterator the step received."""
    args, kwargs = given
    for each in (*args, *kwargs.values()):
        read = getattr(each, ITERATED, None)
        if isinstance(read, Loop):
            loop.stages = loop.stages or read.stages


def _has_traced(function: Any, one: _Instance, took_s: float, given: Given) -> bool:
    """Whether the call traced; if so, record the trace and its cause."""
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
    """Record a call of a function that contains the loop: it is a whole pass, whose single steps are invisible."""
    loop = loop_at(record.place, "inside")
    loop.begin_step(begun_s)
    loop.called(now_s - begun_s, record.name, trains=True, traced=traced)
    loop.end_step(now_s)
    loop.passes += 1
    return loop


def _describe(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Return argument -> the property that decides whether the call traces: a Python value, or dtype and shape."""
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
