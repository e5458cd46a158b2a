"""What a sample costs in each stage of its way to the step, and which stage is the bottleneck.

Each stage of a feed is run alone, on real records, and its CPU time is taken. Of a `tf.data` pipeline
that others wrote TensorFlow keeps the books itself: see `dataset_stages`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

MEASURED_S = 0.05
"""CPU time that a stage is run for, at least: some of the scheduler's slices."""

LEAST_RUNS = 3
"""How often a stage is run at least: what else the process does for a moment falls into one of them."""

MOST_RUNS = 50
"""How often a stage is run at most, where it takes next to nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """One stage of the way."""

    name: str
    """What it does; of a `tf.data` pipeline TensorFlow's name of the operation."""

    cpu_s_per_sample: float
    """CPU time that a sample takes in it, seconds, over all its threads."""

    parallelism: float
    """How many samples or batches it works on at once, at most."""

    share: float
    """Its part of the CPU time of all stages, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """A stage of a feed that can be run alone, again and again, on what the one before has made."""

    name: str
    """What it does."""

    samples: int
    """How many samples a run of it is for."""

    parallelism: int
    """Threads that the feed gives it."""

    run: Callable[[], object]
    """One run."""


class Staged(Protocol):
    """A feed whose stages can be run alone."""

    def stages(self, *, batch_size: int, samples: int, seed: int) -> Iterator[StageWork]:
        """Its stages in their order; each may be run until the next one is asked for."""
        ...


def measure_stages(
    feed: Staged, *, batch_size: int, samples: int = 1024, seed: int = 0
) -> tuple[StageCost, ...]:
    """Run each stage of a feed alone, and take the CPU time of this process.

    Nothing else may be at work in the process for long: TensorFlow's and the decoder's threads are
    counted by what the whole process takes.

    Args:
        feed: A `stoker.data.feed.pipeline.Feed`; what it keeps in memory is made all the same.
        batch_size: Rows of a batch.
        samples: How many images are taken of the split; of a table it is a window, however many
            rows that is.
        seed: Seed of the order, and of what is done to images.

    Returns:
        The stages in the samples' order.

    Raises:
        DataError: a shard is missing, cut or damaged.
    """
    found = []
    for stage in feed.stages(batch_size=batch_size, samples=samples, seed=seed):
        # The first run traces, and fills what is filled once.
        stage.run()
        found.append((stage.name, _cpu_s(stage.run) / stage.samples, float(stage.parallelism)))
    return with_shares(found)


def bottleneck(stages: Sequence[StageCost]) -> StageCost:
    """The stage that lets the fewest samples through, each with the threads that it has.

    Raises:
        ValueError: there is none.
    """
    return max(stages, key=lambda stage: stage.cpu_s_per_sample / stage.parallelism)


def _cpu_s(run: Callable[[], object]) -> float:
    """CPU seconds of a run, the median of several."""
    taken_s: list[float] = []
    while len(taken_s) < LEAST_RUNS or (sum(taken_s) < MEASURED_S and len(taken_s) < MOST_RUNS):
        begun_s = time.process_time()
        run()
        taken_s.append(time.process_time() - begun_s)
    return statistics.median(taken_s)


def with_shares(found: Sequence[tuple[str, float, float]]) -> tuple[StageCost, ...]:
    """Stages of (name, CPU seconds a sample, parallelism), each with its share."""
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
