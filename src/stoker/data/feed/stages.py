"""Measure the CPU time per sample of each input stage, and find the stage that is the bottleneck.

Each stage of a feed is run alone on real records. The stages of a user's `tf.data` pipeline are measured by
TensorFlow itself; see `dataset_stages`.
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
"""Minimum CPU time of a measurement, seconds: several time slices of the scheduler."""

MIN_RUNS = 3
"""Minimum number of runs of a stage, so that a short disturbance affects only one of them."""

MAX_RUNS = 50
"""Maximum number of runs of a stage; a stage that takes almost no time reaches it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """The cost of one stage."""

    name: str
    """Name of the stage; in a `tf.data` pipeline, TensorFlow's name for the operation."""

    cpu_s_per_sample: float
    """CPU time per sample over all threads, seconds."""

    parallelism: float
    """Maximum number of samples or batches that the stage processes at the same time."""

    share: float
    """The stage's share of the CPU time of all stages, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """A stage of a feed that can run alone, repeatedly, on the result of the previous stage."""

    name: str
    """Name of the stage."""

    samples: int
    """Number of samples that one run processes."""

    parallelism: int
    """Number of the stage's threads."""

    run: Callable[[], object]
    """Function that runs the stage once."""


def measure_stages(stages: Iterable[StageWork]) -> tuple[StageCost, ...]:
    """Run each stage of a feed alone and measure the CPU time of this process.

    The time of all threads counts, including TensorFlow's and the decoder's. So nothing else in the process may
    use much CPU time meanwhile.

    Args:
        stages: The stages of a `stoker.data.feed.pipeline.Feed`.

    Returns:
        The costs of the stages, in the order in which samples pass them.

    Raises:
        DataError: a shard is missing, truncated or damaged.
    """
    found = []
    for stage in stages:
        # The first run traces functions and fills caches.
        stage.run()
        found.append((stage.name, _cpu_s(stage.run) / stage.samples, float(stage.parallelism)))
    return with_shares(found)


def bottleneck(stages: Sequence[StageCost]) -> StageCost:
    """Return the stage with the lowest throughput, if each stage uses all of its threads.

    Raises:
        ValueError: `stages` is empty.
    """
    return max(stages, key=lambda stage: stage.cpu_s_per_sample / stage.parallelism)


def _cpu_s(run: Callable[[], object]) -> float:
    """Return the CPU time of a run, seconds: the median of several runs."""
    cpu_times_s: list[float] = []
    while len(cpu_times_s) < MIN_RUNS or (
        sum(cpu_times_s) < MEASURED_S and len(cpu_times_s) < MAX_RUNS
    ):
        begun_s = time.process_time()
        run()
        cpu_times_s.append(time.process_time() - begun_s)
    return statistics.median(cpu_times_s)


def with_shares(found: Sequence[tuple[str, float, float]]) -> tuple[StageCost, ...]:
    """Make stages from (name, CPU seconds per sample, parallelism), and compute the share of each."""
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
    """Read some elements of a dataset, and return the costs of its stages that TensorFlow measured.

    TensorFlow times the threads that work on a stage, without their waits for the previous stage. If more
    threads are ready to run than there are cores, their wait for a core counts, too. Each stage's time is
    divided by the elements that this stage made, so elements that are still buffered between stages do not
    distort it.

    Args:
        dataset: A dataset of batches whose autotuner is on. If it ends, it is read again.
        elements: Number of elements to read, at least 1.

    Returns:
        The costs per row of the batches, beginning at the source. Stages with the same name are numbered.

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
            "the stages of a dataset can be measured only if TensorFlow's autotuner is on",
            fix="Do not turn off `autotune.enabled` in the dataset's options.",
        ) from error
    return model_stages(model, samples_per_element=rows / elements)


def model_stages(model: Any, *, samples_per_element: float) -> tuple[StageCost, ...]:
    """Return the costs in a `ModelProto`, per sample; an element has `samples_per_element` on average."""
    found = _Costs(model).in_order()
    return with_shares(
        [(name, cost / samples_per_element, at_once) for name, cost, at_once in found]
    )


class _Costs:
    """The costs of a model's nodes, per element that the whole pipeline returns."""

    def __init__(self, model: Any) -> None:
        self._nodes = model.nodes
        self._found: dict[tuple[str, ...], tuple[str, float, float]] = {}
        self._add(model.output, 1.0, ())

    def in_order(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, CPU seconds per output and parallelism of each stage, beginning at the source.

        Stages with the same name are numbered.
        """
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
            number: Key of the node.
            per_output: Number of the node's elements per element that the pipeline returns.
            path: Position of the node; the inner pipelines of an interleave have the same position.
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
        # The root is not a stage; it only counts the elements that the pipeline returns.
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
"""`NodeClass` of stages that run an inner pipeline for each element: interleave, flat_map."""

_KNOWN_RATIOS = (3, 4)
"""`NodeClass` of stages with a fixed number of inputs per output."""
