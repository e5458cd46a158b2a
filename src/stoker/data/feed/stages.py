"""The CPU time per sample of each input stage, and which stage is the bottleneck.

Each stage of a feed runs alone on real records. For a `tf.data` pipeline of the user, TensorFlow measures
the stages itself: see `dataset_stages`.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.core.errors import UserError

MEASURED_S = 0.05
"""Least CPU time of a measurement: some of the scheduler's time slices."""

MIN_RUNS = 3
"""Least number of runs of a stage, so that a short disturbance affects only one of them."""

MAX_RUNS = 50
"""Most runs of a stage that takes almost no time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """The cost of one stage."""

    name: str
    """Name of the stage; in a `tf.data` pipeline TensorFlow's name of the operation."""

    cpu_s_per_sample: float
    """CPU time per sample over all threads, seconds."""

    parallelism: float
    """Most samples or batches that it processes at once."""

    share: float
    """Its share of the CPU time of all stages, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """A stage of a feed that can run alone, repeatedly, on the result of the previous stage."""

    name: str
    """Name of the stage."""

    samples: int
    """Number of samples of a run."""

    parallelism: int
    """Number of its threads."""

    run: Callable[[], object]
    """One run."""


def measure_stages(stages: Iterable[StageWork]) -> tuple[StageCost, ...]:
    """Run each stage of a feed alone and measure the CPU time of this process.

    TensorFlow's and the decoder's threads are counted too, so nothing else in the process may work for
    long.

    Args:
        stages: Those of a `stoker.data.feed.pipeline.Feed`.

    Returns:
        The stages in the samples' order.

    Raises:
        DataError: a shard is missing, cut or damaged.
    """
    found = []
    for stage in stages:
        # The first run traces functions and fills caches.
        stage.run()
        found.append((stage.name, _cpu_s(stage.run) / stage.samples, float(stage.parallelism)))
    return with_shares(found)


def bottleneck(stages: Sequence[StageCost]) -> StageCost:
    """Return the stage with the lowest throughput, given its threads.

    Raises:
        ValueError: `stages` is empty.
    """
    return max(stages, key=lambda stage: stage.cpu_s_per_sample / stage.parallelism)


def _cpu_s(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a run, the median of several."""
    cpu_times_s: list[float] = []
    while len(cpu_times_s) < MIN_RUNS or (
        sum(cpu_times_s) < MEASURED_S and len(cpu_times_s) < MAX_RUNS
    ):
        begun_s = time.process_time()
        run()
        cpu_times_s.append(time.process_time() - begun_s)
    return statistics.median(cpu_times_s)


def with_shares(found: Sequence[tuple[str, float, float]]) -> tuple[StageCost, ...]:
    """Return stages from (name, CPU seconds per sample, parallelism), each with its share."""
    total = sum(cost for _, cost, _ in found)
    return tuple(
        StageCost(
            name=name,
            cpu_s_per_sample=cost,
            parallelism=parallelism,
            share=cost / total if total else 0.0,
        )
        for name, cost, parallelism in found
    )


def dataset_stages(dataset: tf.data.Dataset[Any], *, elements: int) -> tuple[StageCost, ...]:
    """Read the beginning of a dataset, and return what TensorFlow's model of it says of its stages.

    TensorFlow times the threads that work on a stage, without their waits for the stage before. If more
    threads want to run than there are cores, the time in the queue counts too. Costs are per element
    of the stage, so elements in between do not distort them.

    Args:
        dataset: Its elements are batches, its autotuner is on. After its end it is read again.
        elements: How many elements are read, at least 1.

    Returns:
        From the source on, per row of the batches; stages of one name are numbered.

    Raises:
        UserError: the dataset is empty, or its autotuner is off.
        tf.errors.OpError: the dataset failed.

    Source: tf.data.experimental.get_model_proto; tensorflow/core/framework/model.proto.
    """
    iterator = iter(dataset.repeat())
    rows = 0
    for _ in range(elements):
        element = next(iterator, None)
        if element is None:
            raise UserError("a dataset must hold at least one element to be measured", got=0)
        shape = tf.nest.flatten(element)[0].shape
        rows += shape[0] if shape.rank else 1
    try:
        model = tf.data.experimental.get_model_proto(iterator)
    except tf.errors.NotFoundError as error:
        raise UserError(
            "the stages of a dataset are known only while TensorFlow's autotuner is on",
            fix="Leave `autotune.enabled` of its options alone.",
        ) from error
    return model_stages(model, samples_per_element=rows / elements)


def model_stages(model: Any, *, samples_per_element: float) -> tuple[StageCost, ...]:
    """Return the costs that a `ModelProto` holds, with a mean number of rows per element."""
    found = _Costs(model).in_order()
    return with_shares(
        [(name, cost / samples_per_element, at_once) for name, cost, at_once in found]
    )


class _Costs:
    """The costs of a model's nodes per element of the whole pipeline."""

    def __init__(self, model: Any) -> None:
        self._nodes = model.nodes
        self._found: dict[tuple[str, ...], tuple[str, float, float]] = {}
        self._add(model.output, 1.0, ())

    def in_order(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, CPU seconds per output and parallelism from the source on; equal names numbered."""
        count_by_name: Counter[str] = Counter()
        for name, cost, at_once in self._found.values():
            count_by_name[name] += 1
            yield (
                name if count_by_name[name] == 1 else f"{name} {count_by_name[name]}",
                cost,
                at_once,
            )

    def _add(self, number: int, per_output: float, path: tuple[str, ...]) -> None:
        """Add the inputs of a node, then the node.

        Args:
            number: Its key.
            per_output: Number of its elements per output of the pipeline.
            path: Its position; the pipelines of an interleave share one.
        """
        node = self._nodes[number]
        inputs = [key for key in node.inputs if key in self._nodes]
        inner: Sequence[int] = ()
        if node.node_class in _INTERLEAVES:
            inputs, inner = inputs[:1], inputs[1:]
        for place, key in enumerate(inputs):
            ratio_so_far = self._elements(key) / max(1, node.num_elements)
            ratio = node.ratio if node.node_class in _KNOWN_RATIOS and node.ratio else ratio_so_far
            self._add(key, per_output * ratio, (*path, f"{place}"))
        total = sum(map(self._elements, inner))
        for key in inner:
            if self._elements(key):
                share = self._elements(key) / total
                self._add(key, per_output * share, (*path, "in turn"))
        # The root only counts outputs.
        if path:
            cost = per_output * node.processing_time * 1e-9 / max(1, node.num_elements)
            _, before, at_once = self._found.get(path, (node.name, 0.0, 1.0))
            self._found[path] = node.name, before + cost, max(at_once, _parallelism(node))

    def _elements(self, key: int) -> int:
        return int(self._nodes[key].num_elements)


def _parallelism(node: Any) -> float:
    of = {parameter.name: parameter.state_value for parameter in node.parameters}
    return max(1.0, of.get("parallelism", 1.0))


_INTERLEAVES = (1, 2)
"""`NodeClass` of stages with a pipeline for each element: interleave, flat_map."""

_KNOWN_RATIOS = (3, 4)
"""`NodeClass` of stages with a fixed number of inputs per output."""
