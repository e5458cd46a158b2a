"""Opens the data of a run and finds the position at which it starts or resumes."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.core.errors import Plain, UserError
from stoker.data.feed.service.reading import ServiceFeed
from stoker.data.user_dataset.features import AnyTransform
from stoker.data.user_dataset.feed import AnyFeed
from stoker.data.user_dataset.load_dataset import AnyDataset
from stoker.train.checkpoints.identity import require_same
from stoker.train.checkpoints.store import VerifiedCheckpoint, newest_good
from stoker.train.checkpoints.writer import CheckpointWriter
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context.monitor import better_mode
from stoker.train.context.position import Position
from stoker.train.context.run_context import RunContext
from stoker.train.setup.feeds import open_feeds
from stoker.train.setup.whole_batches import WholeFeed, whole_steps

TrainFeed = AnyFeed | ServiceFeed | WholeFeed
"""Types of feeds from which training can read."""


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The data of a run, and the position at which it starts or resumes."""

    feed: TrainFeed
    """The training split."""

    held_out: AnyFeed
    """The eval split."""

    found: VerifiedCheckpoint | None
    """The newest good checkpoint; None for a new run."""

    position: Position
    """The position at which the run starts or resumes."""


def open_run(
    dataset: AnyDataset,
    transform: AnyTransform,
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
    context: RunContext,
) -> RunStart:
    """Open the data and find the position at which the run starts or resumes.

    Raises:
        UserError: The data cannot be read, all checkpoints are damaged, or they belong to another
            run.
    """
    if context.feeds is not None:
        local, held_out = context.feeds.result()
    else:
        local, held_out = open_feeds(
            dataset,
            transform,
            config=config,
            memory_bytes=context.memory_bytes,
            service=context.service,
            work_dir=context.work_dir,
        )
    feed = whole_steps(local, resolved) if resolved.strategy == "tpu" else local
    found = newest_good(context.checkpoints)
    position = _start_position(found, feed, config=config, resolved=resolved, context=context)
    return RunStart(feed=feed, held_out=held_out, found=found, position=position)


def checkpoint_writer(
    found: VerifiedCheckpoint | None, *, config: TrainConfig, context: RunContext
) -> CheckpointWriter:
    """Return the writer of the run's checkpoints; only one process of a run may have a writer."""
    return CheckpointWriter(
        context.checkpoints,
        config=config.checkpoint,
        identity=context.identity,
        better=better_mode(config.monitor, config.monitor_mode),
        after=found,
    )


def _start_position(
    found: VerifiedCheckpoint | None,
    feed: TrainFeed,
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
    context: RunContext,
) -> Position:
    per_epoch = feed.steps(resolved.global_batch)
    if found is None:
        return Position(
            per_epoch=per_epoch,
            steps=per_epoch * config.epochs,
            batch_size=resolved.batch_size,
            accumulate=resolved.accumulate,
        )
    require_same(found.identity, context.identity, accept_change=context.accept_change)
    position = Position.from_json(found.facts["position"])
    if position.per_epoch != per_epoch:
        raise UserError(
            "a resumed run must have as many steps per epoch as before",
            got=Plain(f"{per_epoch} steps per epoch; the checkpoint has {position.per_epoch}"),
            fix="Restore the data and the batch size, or train in a new run.",
        )
    if position.steps != per_epoch * config.epochs:
        # If the number of epochs has changed, a run that a callback has stopped continues.
        position.steps = per_epoch * config.epochs
        position.over = position.step >= position.steps
    return position
