"""Runs a training with parameter servers from start to end, on the chief."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from stoker.data.feed.calls import Calls
from stoker.data.feed.pipeline import as_it_is
from stoker.data.user_dataset.features import AnyTransform
from stoker.data.user_dataset.feed import OwnFeed
from stoker.data.user_dataset.load_dataset import AnyDataset
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context.monitor import resolve_monitor_mode
from stoker.train.context.position import Position
from stoker.train.context.run_context import RunContext
from stoker.train.context.start_position import RunStart, TrainFeed, checkpoint_writer, open_run
from stoker.train.loop.run import EVAL_BATCHES
from stoker.train.model.keras_model import adapt_load, overrides
from stoker.train.parameter_server.cluster import ClusterConnection, server_loss_as_error
from stoker.train.parameter_server.run import (
    ParameterServerResult,
    ParameterServerRun,
    ParameterServerSetup,
    WorkerFeed,
    unsupported_error,
)
from stoker.train.setup.build_model import BuiltModel


def fit_parameter_server(
    built: BuiltModel,
    data: tuple[AnyDataset, AnyTransform],
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
    connection: ClusterConnection,
    context: RunContext,
) -> ParameterServerResult:
    """Train from the start or a checkpoint, validate after each epoch, and keep the best and the last state.

    Free workers compute steps from weights that may be some updates old, and the server applies the updates
    one by one as they arrive. So a resumed run is as good as an uninterrupted one, but not bit-identical.

    Args:
        built: The user's compiled model, built in the strategy's scope.
        data: Dataset with the splits `train` and `eval`, and the transform that turns its raw
            columns into features and label.
        config: The user's `train` section.
        resolved: The values that replaced each `auto`.
        connection: The workers and the servers.
        context: All other inputs.

    Raises:
        ConfigError: A setting, a callback or a method of the model requires consecutive steps.
        UserError: A loss or a gradient is not finite (the error names the step), or a server is
            lost.
        Preempted: The process got a signal to stop; everything is saved.
    """
    refuse_ordered_settings(built, config, resolved)
    config = resolve_monitor_mode(config, data[1].labels)
    # 1. Open the data, which the chief reads and sends. The number of a step determines its batch, so the
    #    batch stays the same if a worker dies and the step is repeated.
    wall = context.run_time.wall
    with wall.within("data"):
        opened = open_run(*data, config=config, resolved=resolved, context=context)
    setup = ParameterServerSetup(
        built=built, config=config, resolved=resolved, connection=connection, context=context
    )
    with server_loss_as_error(), _opened_run(setup, opened) as run:
        run.begin(opened.found)
        # 3. Train epochs in legs. At the end of a leg all its steps are applied, so the state can be saved.
        while not run.position.over:
            run.begin_epoch()
            if run.position.validated:
                with wall.within("steps"):
                    run.train_until_save()
            if not run.position.validated:
                with wall.within("validation"):
                    run.end_epoch()
        return run.end()


@contextmanager
def _opened_run(setup: ParameterServerSetup, opened: RunStart) -> Iterator[ParameterServerRun]:
    config, resolved = setup.config, setup.resolved
    feed, held_out, position = opened.feed, opened.held_out, opened.position
    eval_rows = EVAL_BATCHES * resolved.batch_size
    with (
        feed.shuffled(_calls(feed, position, config=config, resolved=resolved)) as batches,
        held_out.in_order(batch_size=eval_rows) as eval_batches,
        checkpoint_writer(opened.found, config=config, context=setup.context) as writer,
    ):
        training = _worker_feed(setup, feed, batches, steps=position.per_epoch)
        evaluation = _worker_feed(setup, held_out, eval_batches, steps=held_out.steps(eval_rows))
        # 2. Create everything that a step changes, on the servers.
        yield ParameterServerRun(setup, training, evaluation, position, writer)


def refuse_ordered_settings(
    built: BuiltModel, config: TrainConfig, resolved: ResolvedTraining
) -> None:
    """Reject settings that require consecutive steps.

    Raises:
        ConfigError: One of them is set.
    """
    own = overrides(built.model) & {"train_step", "test_step"}
    settings = {
        "train.deterministic": config.deterministic,
        "train.xla: true": config.xla is True,
        "train.on_nan: rollback": config.on_nan == "rollback",
        f"train.reduction_dtype: {config.reduction_dtype}": config.reduction_dtype != "float32",
        f"train.reduction_bytes_per_pack: {config.reduction_bytes_per_pack}": (
            config.reduction_bytes_per_pack > 0
        ),
        f"train.accumulate: {resolved.accumulate}": resolved.accumulate > 1,
        f"train.replicas: {resolved.replicas}": resolved.replicas > 1,
        "train.tensorboard.profile": config.tensorboard.profile is not None,
        "train.tensorboard.histograms_every_steps": bool(config.tensorboard.histograms_every_steps),
        "train.tensorboard.embeddings": bool(config.tensorboard.embeddings),
        f"a model with a {', '.join(sorted(own))} of its own": bool(own),
    }
    for what, is_set in settings.items():
        if is_set:
            raise unsupported_error(what)


def _calls(
    feed: TrainFeed,
    position: Position,
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
) -> Calls:
    size = resolved.global_batch
    return Calls(
        # A step of a user-defined dataset is one batch of the dataset, of any size.
        rows=position.per_epoch * size if isinstance(feed, OwnFeed) else feed.rows,
        batch_size=size,
        steps_per_call=1,
        seed=config.seed,
        # A run that has done its last step still reads an element, for its shapes.
        first=min(position.step, position.steps - 1),
        last=position.steps,
    )


def _worker_feed(
    setup: ParameterServerSetup, feed: TrainFeed, elements: tf.data.Dataset[Any], *, steps: int
) -> WorkerFeed:
    load = feed.load
    if feed.keeps_features:
        # The rows are already gathered here, because the features are only in this machine's memory.
        elements, load = elements.map(feed.load).prefetch(tf.data.AUTOTUNE), as_it_is
    adapted = adapt_load(load, setup.built.model, class_weight=setup.config.class_weight)
    return WorkerFeed(elements=elements, load=adapted, steps=steps)
