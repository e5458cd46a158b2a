"""Stoker's loop as its users have it: `stoker.train.loop.loop.fit` on a dataset of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from stoker.data.user_dataset.description import Count
from stoker.data.user_dataset.features import OwnFeatures
from stoker.data.user_dataset.load_dataset import OwnDataset, describe_element
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.writers import Everywhere, MetricWriter
from stoker.telemetry.writers.append_only import JsonLines
from stoker.train.config import CheckpointConfig, ReductionDtype, ResolvedTraining, TrainConfig
from stoker.train.context.heartbeat import process_heartbeat
from stoker.train.context.preemption import Preemption
from stoker.train.context.run_context import Progress, RunContext
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import BuiltModel, build_model
from stoker.train.setup.strategy import Distribution, one_device

ENDLESS = 1_000_000
"""Steps of a run that is ended from outside."""

SELDOM = CheckpointConfig(every_s=86_400.0)
"""None but the first: peers that write none are compared with."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is set of a run."""

    steps_per_call: int = 1
    xla: bool = False
    batch_size: int
    accumulate: int = 1
    reduction_dtype: ReductionDtype = "float32"
    loss_scale: float | Literal["auto", "dynamic"] = "auto"
    steps: int = ENDLESS
    checkpoint: CheckpointConfig = SELDOM
    distribution: Distribution = field(default_factory=one_device)
    writers: tuple[MetricWriter, ...] = ()
    """They get the metrics too."""

    run_time: RunTime = field(default_factory=RunTime)


def build(make: Callable[..., Any], batches: tf.data.Dataset[Any], at: Settings) -> BuiltModel:
    """The model, in the strategy's scope."""
    features = OwnFeatures(describe_element(batches.element_spec, what="benchmark"))
    with at.distribution.strategy.scope():
        return build_model(make, features, what="benchmark")


def train(
    built: BuiltModel,
    batches: tf.data.Dataset[Any],
    at: Settings,
    *,
    folder: Path,
    on_progress: Callable[[Progress], None],
    preemption: Preemption | None = None,
) -> None:
    """Train over the batches, again and again: one epoch of so many steps.

    Args:
        built: What `build` made.
        batches: Each is the global batch of a step.
        at: The settings.
        folder: Takes metrics and checkpoints; a run goes on from what lies there.
        on_progress: Called after every call; an error of it ends the run.
        preemption: Who may ask for the end.
    """
    count = int(batches.cardinality())
    rows = at.batch_size * at.accumulate * at.distribution.replicas
    trained = batches.repeat(-(-at.steps // count)).take(at.steps).prefetch(tf.data.AUTOTUNE)
    dataset = OwnDataset(
        what="benchmark",
        description=describe_element(batches.element_spec, what="benchmark"),
        datasets={"train": trained, "eval": batches.take(1)},
        counts={
            "train": Count(batches=at.steps, rows=at.steps * rows, batch_size=rows),
            "eval": Count(batches=1, rows=rows, batch_size=rows),
        },
    )
    distribution = at.distribution
    resolved = ResolvedTraining(
        batch_size=at.batch_size,
        accumulate=at.accumulate,
        replicas=distribution.replicas,
        workers=distribution.workers,
        steps_per_call=at.steps_per_call,
        precision="float32",
        xla=at.xla,
        strategy=distribution.name,
        lr_factor=1.0,
        why={},
    )
    folder.mkdir(parents=True, exist_ok=True)
    lines = JsonLines(folder / f"metrics-{distribution.worker}.jsonl")
    writer = Everywhere([lines, *at.writers])
    try:
        fit(
            built,
            (dataset, OwnFeatures(dataset.description)),
            config=TrainConfig(
                epochs=1,
                reduction_dtype=at.reduction_dtype,
                loss_scale=at.loss_scale,
                checkpoint=at.checkpoint,
            ),
            resolved=resolved,
            distribution=distribution,
            context=RunContext(
                memory_bytes=1 << 33,
                checkpoints=folder / "checkpoints",
                writer=writer,
                on_progress=on_progress,
                preemption=preemption or Preemption(),
                heartbeat=process_heartbeat(),
                run_time=at.run_time,
            ),
        )
    finally:
        writer.close()
