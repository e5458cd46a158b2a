"""The compiled step of a user's own loop, again on what it was just given, in turn with its steps.

As with `fit` nothing is lost or changed: every variable that the step captures is put back, and a
step that does more than change variables, or reads more than what it is given, is not run.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from . import pipeline, step_graph
from .ceiling import MOST_STATE_BYTES, does_more
from .facts import FACTS
from .load import LOAD, now
from .loops import STATE, Loop, clock
from .transfer import transfer_s

WINDOW_S, LEAST_STEPS, MOST_STEPS = 0.3, 5, 90
"""A window of real steps: so long, or so many."""

LONGEST_STEP_S = 2.0
"""A longer step is not run again."""

MOST_CEILING_S = 1.0
"""Of one window on what is there: the training waits meanwhile."""

ROUNDS = 3
"""Pairs of windows."""

MOST_DRAINED = 100
"""Steps after a window that are left out: meanwhile the input has run ahead."""

_READS_MORE = re.compile(r"^(Iterator.*|MultiDeviceIterator.*|.*Dataset.*|Optional.*|ReadFile)$")
"""Operations that take what the step was not given: to run them again would take it from others."""


def after_call(loop: Loop, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Measure, where a window of real steps is full.

    Args:
        loop: A loop over a dataset, whose step is open.
        function: The `tf.function` that trains, just called.
        args: What it was given.
        kwargs: By name.
    """
    if loop.no_ceiling or len(loop.rounds) >= ROUNDS:
        loop.measures_again = False
        return
    loop.moment = loop.moment or now()
    steps, real_s = loop.measured_steps - loop.mark[0], loop.period_s - loop.mark[1]
    if steps < LEAST_STEPS or (real_s < WINDOW_S and steps < MOST_STEPS):
        return
    begun_s = clock()
    real_away = LOAD.between(loop.moment, now()).away()
    FACTS.ours = True
    try:
        loop.no_ceiling = "the watcher failed"
        given = (args, kwargs)
        ceiling_s, away, loop.no_ceiling = _measure(loop, function, given, real_s / steps)
        if not loop.no_ceiling:
            told = {"calls": steps, "real_s": real_s, "ceiling_s": ceiling_s * steps}
            told |= {"real_away": real_away, "ceiling_away": away}
            told["transfer_s"] = transfer_s((args, kwargs)) * steps
            loop.rounds.append(told)
            loop.left_out = _ahead()
    finally:
        FACTS.ours = False
        loop.not_its_own(clock() - begun_s)
        loop.mark, loop.moment = (loop.measured_steps, loop.period_s), now()


def _measure(
    loop: Loop, function: Any, given: tuple[tuple[Any, ...], dict[str, Any]], real_s: float
) -> tuple[float, float, str]:
    """Seconds of a call on what is there, the share that others took, and why they were not measured."""
    tf: Any = sys.modules["tensorflow"]
    if sum(loop.functions.values()) != loop.steps + 1:
        return 0.0, 0.0, "a step is not one call of one tf.function"
    if real_s > LONGEST_STEP_S:
        return 0.0, 0.0, "to run so long a step again would hold the training up"
    args, kwargs = given
    if not all(_is_there(tf, value) for value in tf.nest.flatten([args, kwargs])):
        return 0.0, 0.0, "an argument of the step is not a tensor, so the step cannot be repeated"
    traced = function.experimental_get_tracing_count()
    concrete = function.get_concrete_function(*args, **kwargs)
    if function.experimental_get_tracing_count() != traced:
        return 0.0, 0.0, "the step is traced again for each batch"
    if found := does_more(concrete) | _reads_more(concrete):
        return 0.0, 0.0, f"the step does what cannot be undone ({', '.join(sorted(found)[:3])})"
    variables, why = captured_variables(concrete)
    if why:
        return 0.0, 0.0, why
    if not loop.step:
        with FACTS.guarded():
            loop.step = step_graph.written(concrete, given=given)
    calls = max(LEAST_STEPS, min(MOST_STEPS, int(MOST_CEILING_S / real_s)))
    return *_timed(function, given, variables, calls), ""


def captured_variables(concrete: Any) -> tuple[list[Any], str]:
    """What a compiled step can change, and why that could not be put back."""
    tf: Any = sys.modules["tensorflow"]
    variables = list(concrete.graph.variables)
    known = {id(variable.handle) for variable in variables}
    captured = [each for each, _ in concrete.graph.captures if each.dtype == tf.resource]
    if any(id(each) not in known for each in captured):
        return [], "the step holds a resource that is no variable"
    size = sum((each.shape.num_elements() or 0) * each.dtype.size for each in variables)
    if size > MOST_STATE_BYTES:
        return [], f"the step's variables take {size / 2**30:.1f} GiB, which would be copied"
    return variables, ""


def settle(variables: list[Any]) -> float:
    """Wait until the device has done all it was given; the time that it took, seconds."""
    begun_s = clock()
    if variables:
        min(variables, key=lambda each: each.shape.num_elements() or 0).numpy()
    return clock() - begun_s


def _timed(
    function: Any,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    variables: list[Any],
    calls: int,
) -> tuple[float, float]:
    args, kwargs = given
    kept = [variable.numpy() for variable in variables]
    try:
        function(*args, **kwargs)
        settle(variables)
        moment, begun_s = now(), clock()
        for _ in range(calls):
            function(*args, **kwargs)
        # Until the device has done all it was given.
        settle(variables)
        took_s = clock() - begun_s
        return took_s / calls, LOAD.between(moment, now()).away()
    finally:
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)


def _is_there(tf: Any, value: Any) -> bool:
    """A tensor of one device, or a plain value."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return plain or isinstance(value, tf.Tensor) or type(value).__module__ == "numpy"


def _reads_more(concrete: Any) -> set[str]:
    graph = concrete.graph.as_graph_def()
    kinds = {node.op for node in graph.node}
    for inner in graph.library.function:
        kinds |= {node.op for node in inner.node_def}
    return {kind for kind in kinds if _READS_MORE.match(kind)}


def _ahead() -> int:
    """How many elements the input may have made meanwhile."""
    nodes, _ = pipeline.read_model(STATE.iterator())
    ready = sum(node["buffered"] for node in nodes if node["depth"] <= 3)
    return int(min(MOST_DRAINED, 2 + max(0, ready)))
