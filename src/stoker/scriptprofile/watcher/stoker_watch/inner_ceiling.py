"""A loop inside of a tf.function: the function again, on one batch as often as its dataset has batches.

Nobody sees the steps of such a loop. But a dataset that it is given can be another one of the same
shapes, with nothing traced anew: one call is given the user's own with a stage more, which counts
the batches and keeps the first; later ones are as they are, and in turn with them the function is
called on that batch. Nothing is lost or changed: the stage gives every batch on, and every variable
that the function captures is put back.
"""

from __future__ import annotations

import re
import sys
import weakref
from typing import Any

from . import pipeline, stages, step_graph
from .ceiling import does_more, plain, resident
from .facts import FACTS
from .loop_ceiling import LONGEST_STEP_S, MOST_CEILING_S, captured_variables, settle
from .loops import Loop, clock
from .transfer import transfer_s

ROUNDS = 3
"""Pairs of a real call and one on the batch that is there."""

LEAST_BATCHES = 5
"""Of a call: the start of fewer would be most of what is measured."""

_CONSUMES = (
    "ReduceDataset", "ScanDataset", "TakeWhileDataset", "TakeDataset", "SkipDataset", "ZipDataset",
    "RangeDataset", "MapDataset", "ParallelMapDatasetV2", "PrefetchDataset", "OptionsDataset",
    "ModelDataset", "FiniteTakeDataset", "FiniteSkipDataset",
)  # fmt: skip
"""What a loop does with the dataset that it is given, and can do again; a range counts its batches."""

_READS = re.compile(r"^(.*Dataset.*|.*Iterator.*|Optional.*|ReadFile)$")
"""Operations that read: others than those above read something else."""


class Sample:
    """The number of batches of a dataset, and its first one."""

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
        """Whether it was kept of this dataset."""
        return self._of() is dataset

    @property
    def count(self) -> int:
        """Batches that one pass has read."""
        return int(self._count.numpy())

    def batch(self) -> Any:
        """The first one."""
        tf: Any = sys.modules["tensorflow"]
        return tf.nest.pack_sequence_as(self._spec, [tf.identity(part) for part in self._parts])

    def watched(self, tf: Any, dataset: Any) -> Any:
        """The dataset, with the stage that counts and keeps."""

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


def before_call(loop: Loop, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function that holds a loop is called with: in one of its calls its dataset is watched.

    Args:
        loop: The loop, which has been traced.
        args: What the function is given.
        kwargs: By name.
    """
    if loop.sample is not None or loop.no_ceiling or loop.steps == 0:
        return args, kwargs
    tf: Any = sys.modules["tensorflow"]
    begun_s = clock()
    FACTS.ours = True
    try:
        loop.no_ceiling = "the watcher failed"
        dataset, loop.no_ceiling = dataset_of(tf, (args, kwargs))
        if dataset is None:
            return args, kwargs
        loop.stages = [stage.id for stage in stages.chain(stages.of(dataset))] or loop.stages
        if loop.no_ceiling:
            return args, kwargs
        loop.no_ceiling = "the watcher failed"
        sample = Sample(tf, dataset)
        given = _instead(tf, (args, kwargs), dataset, sample.watched(tf, dataset))
        loop.sample, loop.no_ceiling = sample, ""
        return given
    finally:
        FACTS.ours = False
        loop.ours_s += clock() - begun_s


def dataset_of(tf: Any, given: Any) -> tuple[Any, str]:
    """The dataset that a function is given, None where there is none; why U cannot be measured."""
    values = tf.nest.flatten(given)
    found = [value for value in values if isinstance(value, tf.data.Dataset)]
    if not found:
        return None, _why_none(tf, values)
    dataset = found[0]
    if len(found) > 1:
        return dataset, "the tf.function is given several datasets"
    if any(type(spec) is not tf.TensorSpec for spec in tf.nest.flatten(dataset.element_spec)):
        return dataset, "the batches hold ragged or sparse tensors"
    kinds = {stage.kind for stage in stages.chain(stages.of(dataset))}
    if "apply" in kinds and tf.config.list_logical_devices("GPU"):
        return dataset, "its dataset may lie on a GPU, where none of ours could read it"
    return dataset, ""


def _why_none(tf: Any, values: list[Any]) -> str:
    if any(isinstance(value, tf.data.Iterator) for value in values):
        return (
            "the loop lies inside of a tf.function that is given an iterator: a batch that is taken "
            "from it is gone (give it the dataset)"
        )
    if any(hasattr(value, "element_spec") for value in values):
        return "the batches are spread over a strategy's replicas"
    return (
        "the loop lies inside of a tf.function, and its dataset is no argument of it: it can be given "
        "no other (write `def train(dataset): ...`)"
    )


def _instead(tf: Any, given: Any, dataset: Any, other: Any) -> Any:
    return tf.nest.map_structure(lambda value: other if value is dataset else value, given)


def after_call(
    loop: Loop, function: Any, given: tuple[tuple[Any, ...], dict[str, Any]], real_s: float
) -> None:
    """Measure the function on the batch that is there, after a call that was measured.

    Args:
        loop: The loop.
        function: The `tf.function`, just called.
        given: What with: by position, and by name.
        real_s: How long the call took, seconds.
    """
    sample = loop.sample
    if sample is None or loop.no_ceiling or len(loop.rounds) >= ROUNDS or not loop.measured_steps:
        return
    begun_s = clock()
    FACTS.ours = True
    try:
        loop.no_ceiling = "the watcher failed"
        loop.no_ceiling = _measure(loop, sample, function, given, real_s)
    finally:
        FACTS.ours = False
        loop.ours_s += clock() - begun_s


def _measure(
    loop: Loop,
    sample: Sample,
    function: Any,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    real_s: float,
) -> str:
    """Book a round; why there is none."""
    tf: Any = sys.modules["tensorflow"]
    dataset, why = dataset_of(tf, given)
    count = loop.batches = sample.count
    if why or not sample.is_of(dataset):
        return why or "each call is given another dataset"
    batch = sample.batch()
    loop.rows, loop.element_bytes = pipeline.size_of(batch)
    if count < LEAST_BATCHES:
        return f"a call has {count} batches only, and its start would be most of what is measured"
    if real_s / count > LONGEST_STEP_S:
        return "to run so long a step again would hold the training up"
    steps = max(LEAST_BATCHES, min(count, int(MOST_CEILING_S * count / real_s)))
    again = plain(resident(batch, dataset.element_spec).repeat(steps))
    args, kwargs = _instead(tf, given, dataset, again)
    traced = function.experimental_get_tracing_count()
    concrete = function.get_concrete_function(*args, **kwargs)
    if function.experimental_get_tracing_count() != traced:
        return "the tf.function is traced anew for each dataset"
    if found := does_more(concrete) | _reads_more(tf, concrete):
        return f"the loop does what cannot be undone ({', '.join(sorted(found)[:3])})"
    variables, why = captured_variables(concrete)
    if why:
        return why
    settled_s = settle(variables)
    ceiling_s = _timed(function, (args, kwargs), variables) * count / steps
    told = {"calls": count, "real_s": real_s + settled_s, "ceiling_s": ceiling_s}
    loop.rounds.append(told | {"transfer_s": transfer_s(batch) * count})
    if not loop.step:
        with FACTS.guarded():
            loop.step = step_graph.written(concrete, batch=batch)
    return ""


def _timed(
    function: Any, given: tuple[tuple[Any, ...], dict[str, Any]], variables: list[Any]
) -> float:
    args, kwargs = given
    kept = [variable.numpy() for variable in variables]
    try:
        begun_s = clock()
        function(*args, **kwargs)
        # Until the device has done all it was given.
        settle(variables)
        return clock() - begun_s
    finally:
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)


def _reads_more(tf: Any, concrete: Any) -> set[str]:
    graph = concrete.graph.as_graph_def()
    kinds = {node.op for node in graph.node}
    for inner in graph.library.function:
        kinds |= {node.op for node in inner.node_def}
    found = {kind for kind in kinds if _READS.match(kind) and kind not in _CONSUMES}
    beside = any(each.dtype == tf.variant for each, _ in concrete.graph.captures)
    return found | ({"a dataset that it is not given"} if beside else set())
