"""Sets up a training in this process: resolved settings, devices, data and model, before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from stoker.app.context import CHECKPOINTS, RESOLVED, Context
from stoker.app.stage_outputs import own_counts
from stoker.cluster.devices import Devices
from stoker.cluster.resolver import ClusterSpec
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.files import read_json, write_json
from stoker.core.user_code import load_function
from stoker.data.ingest import IngestConfig, ServiceConfig
from stoker.train.callbacks.callbacks import load_callbacks
from stoker.train.callbacks.hooks import require_label_of_each_output
from stoker.train.checkpoints.store import places
from stoker.train.config import TEST_SWITCH, AutoInputs, ResolvedTraining, TrainConfig, resolve
from stoker.train.elastic import require_size
from stoker.train.health.precision import apply_tf32
from stoker.train.model.remat import rematerialize
from stoker.train.parameter_server.cluster import ClusterConnection, connect
from stoker.train.setup.build_model import BuiltModel, build_model, prepare_process
from stoker.train.setup.device_settings import apply_memory, apply_threads
from stoker.train.setup.strategy import Distribution, make_distribution
from stoker.tune.lock import FILE as LOCK

if TYPE_CHECKING:
    from stoker.app.experiment import Experiment
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.data.user_dataset.load_dataset import AnyDataset


AUTOS = ("batch_size", "steps_per_call", "precision", "xla", "strategy")
"""If one of these settings is `auto`, a continued run keeps the value that was resolved at its start: another value
would change the training."""


def resolve_once(folder: Path, config: TrainConfig, now: ResolvedTraining) -> ResolvedTraining:
    """Return and record the resolved settings; a continued run keeps the values that it started with.

    Args:
        folder: The folder of the stage.
        config: The section `train`.
        now: The resolution of every `auto` on this machine.

    Raises:
        UserError: the number of devices here is not the number that the run started with, or `train.elastic` does
            not allow it.
    """
    if config.elastic is not None:
        require_size(config.elastic, now.replicas, what=_counted(now))
    resolved = now
    if places(folder / CHECKPOINTS) and (folder / RESOLVED).is_file():
        before = ResolvedTraining(**read_json(folder / RESOLVED))
        _require_same_loop(before, now)
        fixed = config.elastic is None
        if fixed and before.replicas != now.replicas and config.replicas == "auto":
            raise UserError(
                "a run must continue with the number of replicas that it started with",
                got=Plain(
                    f"{now.replicas} here ({now.why['strategy']}); it started with {before.replicas} "
                    f"({before.why['strategy']})"
                ),
                fix="Continue on a machine with as many devices, or train in a new run.",
            )
        kept = {name: getattr(before, name) for name in AUTOS if getattr(config, name) == "auto"}
        if not fixed:
            kept.pop("strategy", None)
        if "xla" in kept:
            kept["xla_trial"] = before.xla_trial
        resolved = replace(now, **kept, why=before.why)
    write_json(folder / RESOLVED, asdict(resolved))
    return resolved


def _counted(resolved: ResolvedTraining) -> str:
    """Return the number that limits an elastic training: of workers, or of their replicas."""
    return "workers" if resolved.replicas == resolved.workers else "replicas over all workers"


def _require_same_loop(before: ResolvedTraining, now: ResolvedTraining) -> None:
    """Reject a change to or from parameter servers.

    Their checkpoints differ from those of other strategies, because their workers do steps in no fixed order.
    """
    served = "parameter_server"
    if (before.strategy == served) != (now.strategy == served):
        raise UserError(
            "a run must continue with parameter servers if and only if it started with them",
            got=Plain(f"{now.strategy} here; it started with {before.strategy}"),
            fix="Continue with `--workers` and `--parameter-servers` as before, or train in a new run.",
        )


def resolve_here(
    context: Context, transform: AnyTransform, devices: Devices, cluster: ClusterSpec | None
) -> ResolvedTraining:
    """Resolve every `auto` for this machine.

    Args:
        context: The experiment, and the earlier stages.
        transform: Describes the features.
        devices: The devices of this machine.
        cluster: The content of TF_CONFIG, or None.

    Raises:
        ConfigError: the settings do not fit the data or the cluster.
    """
    settings, data = context.experiment.train, context.experiment.data
    config = context.experiment.own_dataset
    own = config is not None
    if config is not None:
        # One step processes one batch of the user's dataset; the batch may have any size.
        count = own_counts(config, analysis=context.results["analyze"])["train"]
        settings = replace(settings, batch_size=count.batch_size)
        rows = count.batches * count.batch_size
    else:
        rows = context.shards().rows("train")
    resolved = resolve(
        settings,
        AutoInputs(
            devices=devices,
            rows=rows,
            string_features=any(feature.dtype == "string" for feature in transform.features),
            workers=1 if cluster is None else max(1, cluster.trainers),
            parameter_servers=0 if cluster is None else len(cluster.servers),
            batches_from_elsewhere=own
            or (isinstance(data, IngestConfig) and data.service is not None),
            data_service=isinstance(data, IngestConfig) and data.service is not None,
            tuned=(context.experiment.folder / LOCK).is_file(),
            tries_xla_on_cpu=TEST_SWITCH in os.environ,
        ),
    )
    if not own:
        return resolved
    parts = (resolved.virtual_workers or resolved.replicas) * resolved.accumulate
    return replace(resolved, batch_size=-(-resolved.batch_size // parts))


def begin_process(settings: TrainConfig, resolved: ResolvedTraining) -> Distribution:
    """Apply the settings of the whole process, in the order that TensorFlow requires.

    Args:
        settings: The section `train`.
        resolved: The resolved settings.

    Returns:
        The devices and workers over which a step is distributed.
    """
    _configure_devices(settings)
    distribution = make_distribution(
        resolved.strategy,
        replicas=resolved.replicas // resolved.workers,
        reduction_bytes_per_pack=settings.reduction_bytes_per_pack,
    )
    seed_process(settings, resolved)
    return distribution


def begin_with_servers(
    settings: TrainConfig, resolved: ResolvedTraining, cluster: ClusterSpec
) -> ClusterConnection:
    """Apply the settings of the whole process that connects to parameter servers and workers.

    Args:
        settings: The section `train`.
        resolved: The resolved settings.
        cluster: The content of TF_CONFIG.
    """
    _configure_devices(settings)
    connection = connect(cluster)
    seed_process(settings, resolved)
    return connection


def _configure_devices(settings: TrainConfig) -> None:
    apply_memory(settings.memory)
    apply_threads(settings)
    apply_tf32(on=settings.tf32)


def seed_process(settings: TrainConfig, resolved: ResolvedTraining) -> None:
    """Set the precision and the seeds for models that are built from now on."""
    prepare_process(
        precision=resolved.precision, seed=settings.seed, deterministic=settings.deterministic
    )


def open_and_build(
    context: Context, transform: AnyTransform, place: Distribution | ClusterConnection
) -> tuple[AnyDataset, BuiltModel]:
    """Open the data and build the model; the process must be configured.

    Raises:
        UserError: the user's code fails, or returns something that cannot be trained.
    """
    dataset = open_dataset_of(context)
    return dataset, build_on(place, load_build(context.experiment), context.experiment, transform)


def open_dataset_of(context: Context) -> AnyDataset:
    """Open the data. Call it after the seeds are set, because a user-defined dataset may draw random numbers."""
    with context.wall.within("data"):
        return context.dataset()


def load_build(experiment: Experiment) -> Callable[..., Any]:
    """Import the user's function that builds the model."""
    return load_function(experiment.folder, experiment.model, where="model")


def build_on(
    place: Distribution | ClusterConnection,
    build: Callable[..., Any],
    experiment: Experiment,
    transform: AnyTransform,
) -> BuiltModel:
    """Build the model. Call it after the data was opened, because a user-defined dataset draws random numbers first."""
    with place.strategy.scope():
        built = build_model(build, transform, what=experiment.model)
        require_label_of_each_output(built.model, transform.labels)
        rematerialize(built.model, experiment.train.remat)
    return built


def callbacks_of(experiment: Experiment) -> list[keras.callbacks.Callback]:
    """Return the user's callbacks.

    Raises:
        ConfigError: the function that returns them is invalid.
    """
    reference = experiment.train.callbacks
    return load_callbacks(experiment.folder, reference)() if reference else []


def service_of(experiment: Experiment, resolved: ResolvedTraining) -> ServiceConfig | None:
    """Return the data service that prepares the training batches; None: this process prepares them.

    Raises:
        ConfigError: the settings exclude a data service.
    """
    if not isinstance(experiment.data, IngestConfig) or experiment.data.service is None:
        return None
    if experiment.train.deterministic:
        raise ConfigError(
            "train.deterministic needs the local feed: a tf.data service does not keep the order of records",
            got=Plain("both train.deterministic and data.service"),
            fix="Remove one of them.",
        )
    if resolved.strategy == "multi_worker":
        raise ConfigError(
            "train.strategy: multi_worker needs the local feed: a tf.data service does not give each "
            "worker its own share of a step's records",
            got=Plain("both multi_worker and data.service"),
            fix="Remove data.service: each worker then reads its own share.",
        )
    return experiment.data.service
