"""The stage `train`: the parts that the loop is given, on this process's place in the cluster."""

from __future__ import annotations

import functools
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from stoker.app.context import Context
from stoker.app.identity import training_identity
from stoker.app.resolution import resolve_here, resolve_once
from stoker.app.train_folder import CHECKPOINTS, METRICS, TENSORBOARD
from stoker.cluster.devices import find_devices
from stoker.cluster.resolver import read_tf_config
from stoker.core.errors import ConfigError, Plain
from stoker.core.user_code import first_line, load_function
from stoker.data.ingest import IngestConfig, ServiceConfig
from stoker.telemetry.writers import Everywhere
from stoker.telemetry.writers.jsonl import JsonLines
from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.callbacks import load_callbacks
from stoker.train.checkpoints.store import STATE, best
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.ending import listening
from stoker.train.handshake import handshake
from stoker.train.health.precision import apply_tf32
from stoker.train.heartbeat import process_heartbeat
from stoker.train.loop import fit
from stoker.train.memory import apply_memory
from stoker.train.model import BuiltModel, build_model, prepare_process
from stoker.train.own_code import as_own_code_needs, require_one_output
from stoker.train.remat import rematerialise
from stoker.train.strategy import Distribution, make_distribution
from stoker.train.surroundings import Progress, Surroundings
from stoker.train.watch.labels import vocabulary_terms
from stoker.train.watch.progress_line import ProgressLine
from stoker.train.watch.watch import Unwatched, Watched

if TYPE_CHECKING:
    from stoker.app.experiment import Experiment
    from stoker.data.own.features import AnyTransform
    from stoker.data.own.opening import AnyDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the stage reports."""

    facts: dict[str, Any]
    """For later stages and the summary."""

    content: str
    """Fingerprint of the trained weights."""


def train(context: Context, folder: Path) -> Trained:
    """Train the experiment's model.

    Args:
        context: The experiment, and the stages before.
        folder: Takes checkpoints, metrics and TensorBoard's events.

    Raises:
        UserError: the settings, the user's code or the data; or numbers that are not finite.
    """
    experiment, transform = context.experiment, context.transform()
    cluster = read_tf_config(os.environ)
    devices = find_devices()
    resolved = resolve_once(
        folder, experiment.train, resolve_here(context, transform, devices, cluster)
    )
    identity = training_identity(context, resolved)
    distribution = begin_process(experiment.train, resolved)
    handshake(distribution, identity)
    dataset, built = open_and_build(context, transform, distribution)
    callbacks = experiment.train.callbacks
    listed = load_callbacks(experiment.folder, callbacks)() if callbacks else []
    resolved = as_own_code_needs(resolved, experiment.train, model=built.model, callbacks=listed)

    @functools.cache
    def line(steps: int) -> ProgressLine:
        settings = experiment.train
        return ProgressLine(steps=steps, epochs=settings.epochs, monitor=settings.monitor)

    def tell(progress: Progress) -> None:
        text = line(progress.steps)(
            step=progress.step, epoch=progress.epoch, scalars=progress.scalars
        )
        context.progress(text, progress.step / progress.steps)

    board = TensorBoard(folder / TENSORBOARD) if distribution.is_chief else None
    writer = Everywhere([] if board is None else [JsonLines(folder / METRICS), board])
    try:
        with listening() as ending:
            result = fit(
                built,
                dataset,
                transform,
                config=experiment.train,
                resolved=resolved,
                distribution=distribution,
                around=Surroundings(
                    memory_bytes=devices.memory_bytes,
                    checkpoints=folder / CHECKPOINTS,
                    writer=writer,
                    watch=Unwatched()
                    if board is None
                    else _watched(board, context, folder, distribution=distribution),
                    on_progress=tell,
                    ending=ending,
                    heartbeat=process_heartbeat(),
                    identity=identity,
                    accept_change=context.accept_change,
                    callbacks=listed,
                    service=_service(experiment),
                    work_dir=folder.parent / "cache",
                ),
            )
        if board is not None:
            board.results(result.steps, result.metrics, succeeded=True)
    except tf.errors.OpError as error:
        raise ConfigError(
            "a training step must not fail",
            got=Plain(first_line(error)),
            fix="An id may lie outside its Embedding, or a label outside the classes. Run it again "
            "with --debug for the whole traceback.",
        ) from error
    finally:
        writer.close()
    return Trained(
        facts={
            "steps": result.steps,
            "epochs": result.epochs,
            "best_epoch": result.best_epoch,
            "metrics": result.metrics,
            "busy_fraction": result.busy.busy_fraction,
            "input_wait": result.busy.input_wait,
            "step_time_s": result.busy.real_step_s,
            "ceiling_step_time_s": result.busy.ceiling_step_s,
            "samples_per_s": result.samples_per_s,
            "parameters": built.model.count_params(),
            "resolved": asdict(resolved),
            "health": result.health,
            "agreement": result.agreement,
        },
        content=best(folder / CHECKPOINTS).manifest.hashes[STATE],
    )


def begin_process(settings: TrainConfig, resolved: ResolvedTraining) -> Distribution:
    """What holds for the whole process, in the order that TensorFlow demands.

    Args:
        settings: The section `train`.
        resolved: What its `auto`s became.

    Returns:
        Over which devices and workers a step is spread.
    """
    apply_memory(settings.memory)
    apply_tf32(on=settings.tf32)
    distribution = make_distribution(
        resolved.strategy,
        replicas=resolved.replicas // resolved.workers,
        reduction_bytes_per_pack=settings.reduction_bytes_per_pack,
    )
    prepare_process(
        precision=resolved.precision, seed=settings.seed, deterministic=settings.deterministic
    )
    return distribution


def open_and_build(
    context: Context, transform: AnyTransform, distribution: Distribution
) -> tuple[AnyDataset, BuiltModel]:
    """The data and the model, in a process that has begun.

    Raises:
        UserError: the user's code fails, or makes what cannot be trained.
    """
    experiment = context.experiment
    # After the seeds are set, which a user's own dataset may draw from.
    dataset = context.dataset()
    build = load_function(experiment.folder, experiment.model, where="model")
    with distribution.strategy.scope():
        built = build_model(build, transform, what=experiment.model)
        require_one_output(built.model, what=experiment.model)
        rematerialise(built.model, experiment.train.remat)
    return dataset, built


def _watched(
    board: TensorBoard, context: Context, folder: Path, *, distribution: Distribution
) -> Watched:
    """TensorBoard with the run's settings in it."""
    experiment, transform = context.experiment, context.transform()
    board.settings(experiment.to_json(), run=context.run_id)
    config = experiment.train.tensorboard
    terms = {
        layer: vocabulary_terms(transform, vocabulary) if vocabulary is not None else None
        for layer, vocabulary in config.embeddings.items()
    }
    return Watched(
        board, config=config, terms=terms, folder=folder, alone=distribution.workers == 1
    )


def _service(experiment: Experiment) -> ServiceConfig | None:
    """Who makes the training batches, None where this process does."""
    if not isinstance(experiment.data, IngestConfig) or experiment.data.service is None:
        return None
    if experiment.train.deterministic:
        raise ConfigError(
            "train.deterministic needs the local feed: a tf.data service promises no order",
            got=Plain("both train.deterministic and data.service"),
            fix="Leave one of them out.",
        )
    return experiment.data.service
