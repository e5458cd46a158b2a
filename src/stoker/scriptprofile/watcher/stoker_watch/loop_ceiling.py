"""Measures U of loops in the user's own code: real steps alternate with the same compiled step on data in memory.

If Python calls the step, the step is run again with the same arguments. If the loop is inside a tf.function, its single
steps are invisible. But its dataset can be replaced by another dataset with the same shapes, without a new trace. One
call gets the user's dataset plus a stage that counts the batches and keeps the first batch. Later calls get the user's
dataset unchanged, and alternate with calls on the kept batch.

As with `fit`, nothing is lost or changed: the additional stage passes every batch on, and every variable that the step
captures is restored. A step is not run again if it does more than change variables, or reads more than its arguments.
"""

from __future__ import annotations

import re
import sys
import weakref
from typing import Any

from . import pipeline, stages
from .ceiling import (
    LONGEST_STEP_S,
    MAX_CEILING_S,
    MAX_DRAINED,
    MAX_STATE_BYTES,
    ROUNDS,
    does_more,
    operations,
    plain,
    resident,
    settle,
    timed,
    transfer_s,
)
from .loops import STATE, Loop, clock
from .model_facts import write_graph
from .wall import LOAD, now
from .watch import FACTS

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a function: the positional ones, and the ones by name."""

WINDOW_S, MIN_STEPS, MAX_STEPS = 0.3, 5, 90
"""A window of real steps takes at least WINDOW_S seconds and MIN_STEPS steps, but at most MAX_STEPS steps."""

MIN_BATCHES = 5
"""Minimum number of batches per call: with fewer, the measurement would consist mainly of the start of the call."""

_CONSUMES = (
    "ReduceDataset", "ScanDataset", "TakeWhileDataset", "TakeDataset", "SkipDataset", "ZipDataset",
    "RangeDataset", "MapDataset", "ParallelMapDatasetV2", "PrefetchDataset", "OptionsDataset",
    "ModelDataset", "FiniteTakeDataset", "FiniteSkipDataset",
)  # fmt: skip
"""Operations on its dataset that a loop can repeat; a range numbers the batches."""

_READS = re.compile(r"^(.*Dataset.*|.*Iterator.*|Optional.*|ReadFile)$")
"""Operations that read data. If the data is not an argument of the step, repeating the step would consume data that the
script needs."""


def after_step(loop: Loop, function: Any, given: Given) -> None:
    """Measure the step on data in memory, once a window of real steps is complete.

    Args:
        loop: A loop over a dataset, in the middle of a step.
        function: The `tf.function` that trains; it was just called.
        given: Arguments of that call.
    """
    if loop.no_ceiling or len(loop.rounds) >= ROUNDS:
        loop.measures_again = False
        return
    loop.moment = loop.moment or now()
    steps, real_s = loop.measured_steps - loop.mark[0], loop.period_s - loop.mark[1]
    if steps < MIN_STEPS or (real_s < WINDOW_S and steps < MAX_STEPS):
        return
    begun_s = clock()
    real_away = LOAD.between(loop.moment, now()).away()
    FACTS.measuring = True
    try:
        loop.no_ceiling = "the watcher failed"
        ceiling_s, away, loop.no_ceiling = _measure_step(loop, function, given, real_s / steps)
        if not loop.no_ceiling:
            measured = {"calls": steps, "real_s": real_s, "ceiling_s": ceiling_s * steps}
            measured |= {"real_away": real_away, "ceiling_away": away}
            loop.rounds.append(measured | {"transfer_s": transfer_s(given) * steps})
            loop.left_out = _ahead()
    finally:
        FACTS.measuring = False
        loop.not_its_own(clock() - begun_s)
        loop.mark, loop.moment = (loop.measured_steps, loop.period_s), now()


def _measure_step(
    loop: Loop, function: Any, given: Given, real_s: float
) -> tuple[float, float, str]:
    """Measure a call on data in memory.

    Returns:
        Its time, seconds; the share of this time that other programs took; and why the measurement failed, or "".
    """
    tf: Any = sys.modules["tensorflow"]
    args, kwargs = given
    why = ""
    if sum(loop.functions.values()) != loop.steps + 1:
        why = "a step does not consist of a single call of a tf.function"
    elif real_s > LONGEST_STEP_S:
        why = "running such a long step again would delay the training"
    elif not all(_is_there(tf, value) for value in tf.nest.flatten([args, kwargs])):
        why = "an argument of the step is not a tensor, so the step cannot be repeated"
    if why:
        return 0.0, 0.0, why
    concrete = _as_traced(function, given)
    if concrete is None:
        return 0.0, 0.0, "the step is traced again for each batch"
    if found := does_more(concrete) | {each for each in operations(concrete) if _READS.match(each)}:
        return (
            0.0,
            0.0,
            f"the step has operations that cannot be undone ({', '.join(sorted(found)[:3])})",
        )
    variables, why = _captured_variables(concrete)
    if why:
        return 0.0, 0.0, why
    if not loop.step:
        with FACTS.guarded():
            loop.step = write_graph(concrete, given=given)
    calls = max(MIN_STEPS, min(MAX_STEPS, int(MAX_CEILING_S / real_s)))
    took_s, away = timed(lambda: function(*args, **kwargs), variables, calls=calls)
    return took_s / calls, away, ""


def _as_traced(function: Any, given: Given) -> Any:
    """The concrete function for these arguments; None if they need a new trace."""
    traced = function.experimental_get_tracing_count()
    concrete = function.get_concrete_function(*given[0], **given[1])
    return concrete if function.experimental_get_tracing_count() == traced else None


def _captured_variables(concrete: Any) -> tuple[list[Any], str]:
    """The variables that a compiled step can change, and why they cannot be restored; "" if they can."""
    tf: Any = sys.modules["tensorflow"]
    variables = list(concrete.graph.variables)
    known = {id(variable.handle) for variable in variables}
    captured = [each for each, _ in concrete.graph.captures if each.dtype == tf.resource]
    if any(id(each) not in known for each in captured):
        return [], "the step uses a resource that is not a variable"
    size = sum((each.shape.num_elements() or 0) * each.dtype.size for each in variables)
    if size > MAX_STATE_BYTES:
        return [], f"the step's variables take {size / 2**30:.1f} GiB, too much to copy"
    return variables, ""


def _is_there(tf: Any, value: Any) -> bool:
    """Whether a value is a tensor on a single device, a NumPy array, or a plain Python value."""
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return is_plain or isinstance(value, tf.Tensor) or type(value).__module__ == "numpy"


def _ahead() -> int:
    """Number of next steps to leave out: the input may have prepared that many elements during the measurement."""
    nodes, _ = pipeline.read_model(STATE.iterator())
    ready = sum(node["buffered"] for node in nodes if node["depth"] <= 3)
    return int(min(MAX_DRAINED, 2 + max(0, ready)))


class Sample:
    """Records the number of batches of a dataset, and its first batch."""

    def __init__(self, tf: Any, dataset: Any) -> None:
        self._spec = dataset.element_spec
        self._of = weakref.ref(dataset)
        with tf.device("CPU:0"):
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._parts = [
                tf.Variable(
                    tf.zeros([0] * (spec.shape.rank or 0), spec.dtype),
                    shape=tf.TensorShape(None),
                    trainable=False,
                )
                for spec in tf.nest.flatten(self._spec)
            ]

    def is_of(self, dataset: Any) -> bool:
        """Whether the sample was recorded for this dataset."""
        return self._of() is dataset

    @property
    def count(self) -> int:
        """Number of batches that one pass has read."""
        return int(self._count.numpy())

    def batch(self) -> Any:
        """The first batch."""
        tf: Any = sys.modules["tensorflow"]
        return tf.nest.pack_sequence_as(self._spec, [tf.identity(part) for part in self._parts])

    def watched(self, tf: Any, dataset: Any) -> Any:
        """Return the dataset with an additional stage that records."""

        @tf.autograph.experimental.do_not_convert
        def keep(*element: Any) -> Any:
            given = element[0] if len(element) == 1 else element
            parts = tf.nest.flatten(given)

            def first() -> Any:
                pairs = zip(self._parts, parts, strict=True)
                return tf.group(*(kept.assign(part) for kept, part in pairs))

            kept = tf.cond(tf.equal(self._count, 0), first, tf.no_op)
            with tf.control_dependencies([kept]):
                counted = self._count.assign_add(1, read_value=False)
            with tf.control_dependencies([counted]):
                return tf.nest.map_structure(tf.identity, given)

        return dataset.map(keep)


def before_pass(loop: Loop, given: Given) -> Given:
    """Return the arguments for a call of a function that contains a loop.

    In one of the calls, the dataset is wrapped to record its first batch and its number of batches.

    Args:
        loop: The loop; the function has already been traced.
        given: The function's arguments.
    """
    if loop.sample is not None or loop.no_ceiling or loop.steps == 0:
        return given
    tf: Any = sys.modules["tensorflow"]
    begun_s = clock()
    FACTS.measuring = True
    try:
        loop.no_ceiling = "the watcher failed"
        dataset, loop.no_ceiling = dataset_of(tf, given)
        if dataset is None:
            return given
        loop.stages = [stage.id for stage in stages.chain(stages.of(dataset))] or loop.stages
        if loop.no_ceiling:
            return given
        loop.no_ceiling = "the watcher failed"
        sample = Sample(tf, dataset)
        watched = _instead(tf, given, dataset, sample.watched(tf, dataset))
        loop.sample, loop.no_ceiling = sample, ""
        return watched
    finally:
        FACTS.measuring = False
        loop.measuring_s += clock() - begun_s


def dataset_of(tf: Any, given: Any) -> tuple[Any, str]:
    """Return the dataset among a function's arguments (None if none is), and why U cannot be measured, or ""."""
    values = tf.nest.flatten(given)
    found = [value for value in values if isinstance(value, tf.data.Dataset)]
    if not found:
        return None, _why_none(tf, values)
    dataset = found[0]
    if len(found) > 1:
        return dataset, "the tf.function gets several datasets"
    if any(type(spec) is not tf.TensorSpec for spec in tf.nest.flatten(dataset.element_spec)):
        return dataset, "the batches contain ragged or sparse tensors"
    kinds = {stage.kind for stage in stages.chain(stages.of(dataset))}
    if "apply" in kinds and tf.config.list_logical_devices("GPU"):
        return dataset, "its dataset may be on a GPU, where Stoker cannot record it"
    return dataset, ""


def _why_none(tf: Any, values: list[Any]) -> str:
    if any(isinstance(value, tf.data.Iterator) for value in values):
        return (
            "the loop is inside a tf.function that gets an iterator, from which a batch cannot be read "
            "twice (pass it the dataset)"
        )
    if any(hasattr(value, "element_spec") for value in values):
        return "the batches are spread over a strategy's replicas"
    return (
        "the loop is inside a tf.function whose dataset is not an argument, so the dataset cannot be "
        "replaced (write `def train(dataset): ...`)"
    )


def _instead(tf: Any, given: Given, dataset: Any, other: Any) -> Given:
    """Return the arguments of a function with its dataset replaced by another."""
    result: Given = tf.nest.map_structure(lambda value: other if value is dataset else value, given)
    return result


def after_pass(loop: Loop, function: Any, given: Given, real_s: float) -> None:
    """Measure a function that contains a loop on the batch in memory, after a measured real call.

    Args:
        loop: The loop.
        function: The `tf.function`; it was just called.
        given: Arguments of that call.
        real_s: Duration of that call, seconds.
    """
    sample = loop.sample
    if sample is None or loop.no_ceiling or len(loop.rounds) >= ROUNDS or not loop.measured_steps:
        return
    begun_s = clock()
    FACTS.measuring = True
    try:
        loop.no_ceiling = "the watcher failed"
        loop.no_ceiling = _measure_pass(loop, function, given, real_s)
    finally:
        FACTS.measuring = False
        loop.measuring_s += clock() - begun_s


def _measure_pass(loop: Loop, function: Any, given: Given, real_s: float) -> str:
    """Record a round; return why it could not be measured, or ""."""
    tf: Any = sys.modules["tensorflow"]
    sample = loop.sample
    dataset, why = dataset_of(tf, given)
    count = loop.batches = sample.count
    if why or not sample.is_of(dataset):
        return why or "each call gets another dataset"
    batch = sample.batch()
    loop.rows = pipeline.rows_of(batch)
    if count < MIN_BATCHES:
        return f"a call has only {count} batches, so its start would be most of the measurement"
    if real_s / count > LONGEST_STEP_S:
        return "running such a long step again would delay the training"
    steps = max(MIN_BATCHES, min(count, int(MAX_CEILING_S * count / real_s)))
    again = plain(resident(batch, dataset.element_spec).repeat(steps))
    args, kwargs = _instead(tf, given, dataset, again)
    concrete = _as_traced(function, (args, kwargs))
    if concrete is None:
        return "the tf.function is traced again for each dataset"
    if found := does_more(concrete) | _reads_more(tf, concrete):
        return f"the loop has operations that cannot be undone ({', '.join(sorted(found)[:3])})"
    variables, why = _captured_variables(concrete)
    if why:
        return why
    settled_s = settle(variables)
    took_s, _ = timed(lambda: function(*args, **kwargs), variables, calls=1, warm=False)
    measured = {"calls": count, "real_s": real_s + settled_s, "ceiling_s": took_s * count / steps}
    loop.rounds.append(measured | {"transfer_s": transfer_s(batch) * count})
    if not loop.step:
        with FACTS.guarded():
            loop.step = write_graph(concrete, batch=batch)
    return ""


def _reads_more(tf: Any, concrete: Any) -> set[str]:
    """Types of the operations by which a loop reads more than its arguments, and a clause if it captures a dataset."""
    found = {kind for kind in operations(concrete) if _READS.match(kind) and kind not in _CONSUMES}
    captures = any(each.dtype == tf.variant for each, _ in concrete.graph.captures)
    return found | ({"reading a dataset that is not an argument"} if captures else set())
