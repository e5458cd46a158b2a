"""The stage `train`: the parts that the loop is given, on this process's place in the cluster."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import keras

from stoker.app.context import Context
from stoker.app.identity import training_identity
from stoker.app.training.folder import CHECKPOINTS
from stoker.app.training.reports import progress_reporter, run_time, watched, writing
from stoker.app.training.resolution import resolve_here, resolve_once
from stoker.app.training.step_errors import steps_are_the_users
from stoker.cluster.devices import find_devices
from stoker.cluster.resolver import read_tf_config
from stoker.core.errors import ConfigError, Plain
from stoker.core.finding import Finding
from stoker.core.user_code import load_function
from stoker.data.dataset import Dataset
from stoker.data.features.analysis.input_checks import input_findings
from stoker.data.ingest import IngestConfig, ServiceConfig
from stoker.evaluate.config import outputs_and_labels, require_metrics_of
from stoker.measure.findings import StepFacts, nhwc_is_allowed
from stoker.train.callbacks.callbacks import load_callbacks
from stoker.train.checkpoints.store import STATE, best
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context.background import BackgroundCall
from stoker.train.context.heartbeat import process_heartbeat
from stoker.train.context.preemption import listen_for_preemption
from stoker.train.context.run_context import RunContext, TrainResult
from stoker.train.context.start_position import open_data
from stoker.train.health.precision import apply_tf32
from stoker.train.loop.loop import fit
from stoker.train.model.remat import rematerialize
from stoker.train.parameter_server.cluster import ClusterConnection, connect
from stoker.train.parameter_server.loop import fit_parameter_server
from stoker.train.parameter_server.run import ParameterServerResult
from stoker.train.setup.build_model import BuiltModel, build_model, prepare_process
from stoker.train.setup.feeds import Feeds
from stoker.train.setup.handshake import handshake
from stoker.train.setup.label_checks import require_labels_that_fit
from stoker.train.setup.memory import apply_memory
from stoker.train.setup.strategy import Distribution, make_distribution
from stoker.train.setup.threads import apply_threads
from stoker.train.step.user_hooks import apply_user_hooks, require_label_of_each_output
from stoker.train.watch.device_watch import DeviceWatch, forbids_trace

if TYPE_CHECKING:
    from stoker.app.experiment import Experiment
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.data.user_dataset.load_dataset import AnyDataset

_LOG = logging.getLogger(__name__)

LOCAL_WORKERS = "STOKER_LOCAL_WORKERS"
"""Environment variable: how many processes compute steps on this machine, and share its memory."""

Place = TypeVar("Place", Distribution, ClusterConnection)
"""A process's place among those that train together."""


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
        tf.errors.OpError: another of several workers is gone; worth another attempt.
    """
    experiment, transform = context.experiment, context.transform()
    settings = experiment.train
    cluster = read_tf_config(os.environ)
    devices = find_devices()
    resolved = resolve_once(folder, settings, resolve_here(context, transform, devices, cluster))
    service = service_of(experiment, resolved)
    identity = training_identity(context, resolved)
    context.wait_for_all()
    place: Distribution | ClusterConnection
    if resolved.strategy == "parameter_server" and cluster is not None:
        place = _begin(settings, resolved, functools.partial(connect, cluster))
    else:
        place = begin_process(settings, resolved)
    is_chief = isinstance(place, ClusterConnection) or place.is_chief
    given: dict[str, Any] = {
        "memory_bytes": devices.memory_bytes // int(os.environ.get(LOCAL_WORKERS, "1")),
        "service": service,
        "work_dir": folder.parent / "cache",
    }
    # Workers that find each other swallow SIGTERM in TensorFlow, until it is taken from it again.
    with listen_for_preemption() as preemption, ExitStack() as held:
        if isinstance(place, Distribution):
            handshake(place, {**identity, "settings": context.asked})
        dataset = open_dataset_of(context)
        # No other thread may import anything while the user's code is imported.
        context.wall.enter("build")
        build = _model_code(experiment)
        given["feeds"] = feeds = _open_ahead(dataset, transform, settings, given, held)
        built = _build(build, experiment, transform, place)
        if feeds is not None:
            feeds.wait()
        checked = _check_data(context, transform, built)
        # Each of several workers finds the same.
        for finding in checked if is_chief else ():
            _LOG.warning("%s", finding.line())
        listed = callbacks_of(experiment)
        resolved = apply_user_hooks(resolved, settings, model=built.model, callbacks=listed)
        timed = held.enter_context(run_time(context, folder, is_chief=is_chief))
        writer, board = held.enter_context(writing(folder, is_chief=is_chief))
        forbidden = forbids_trace(listed, profile=settings.tensorboard.profile)
        device = DeviceWatch(
            folder, replicas=resolved.replicas, forbidden=forbidden, wall=context.wall
        )
        run_context = RunContext(
            checkpoints=folder / CHECKPOINTS,
            writer=writer,
            watch=watched(board, context, folder, alone=resolved.workers == 1, device=device),
            on_progress=progress_reporter(context),
            on_wait=lambda line: context.progress(line, None),
            preemption=preemption,
            heartbeat=process_heartbeat(),
            run_time=timed,
            identity=identity,
            accept_change=context.accept_change,
            callbacks=listed,
            **given,
        )
        with steps_are_the_users(workers=resolved.workers):
            result = _fit(built, (dataset, transform), place, settings, resolved, run_context)
        if isinstance(result, TrainResult):
            resolved = result.resolved
        context.wall.enter("ending")
        if board is not None:
            board.results(result.steps, result.metrics, succeeded=True)
    return Trained(
        facts={
            "steps": result.steps,
            "epochs": result.epochs,
            "best_epoch": result.best_epoch,
            "metrics": result.metrics,
            "samples_per_s": result.samples_per_s,
            "parameters": built.model.count_params(),
            "resolved": asdict(resolved),
            "warnings": [finding.line() for finding in checked],
            **_own_facts(result),
            "goodput": timed.goodput if isinstance(result, TrainResult) else None,
            "wall_time": timed.report(),
            **device.facts(result.samples_per_s, _step_facts(result, resolved)),
        },
        content=best(folder / CHECKPOINTS).manifest.hashes[STATE],
    )


def _open_ahead(
    dataset: AnyDataset,
    transform: AnyTransform,
    settings: TrainConfig,
    given: Mapping[str, Any],
    held: ExitStack,
) -> BackgroundCall[Feeds] | None:
    """Open the data in a thread while the model is built: shards draw no random numbers.

    Args:
        dataset: A user-defined one is opened later, when training needs it: it may draw some.
        transform: What turns raw columns into features and label.
        settings: The section `train`.
        given: As in `RunContext`.
        held: Waits for the thread, even if building the model fails.
    """
    if not isinstance(dataset, Dataset):
        return None
    opening = functools.partial(open_data, dataset, transform, config=settings, **given)
    ahead = BackgroundCall(opening, name="open-data")
    held.callback(ahead.wait)
    return ahead


def _check_data(
    context: Context, transform: AnyTransform, built: BuiltModel
) -> tuple[Finding, ...]:
    """Check labels, columns and metrics against the model; return the warnings.

    Raises:
        ConfigError: the loss cannot learn these labels, or a metric is of no output or label.
    """
    experiment = context.experiment
    shapes = {output: spec.shape for output, spec in transform.labels.items()}
    require_metrics_of(experiment.evaluate, outputs_and_labels(shapes))
    labels = context.labels()
    return (
        *require_labels_that_fit(
            built,
            labels,
            monitor=experiment.train.monitor,
            class_weight=experiment.train.class_weight,
            texts=[output for output, spec in transform.labels.items() if spec.classes],
        ),
        *_input_findings(context, transform),
    )


def _input_findings(context: Context, transform: AnyTransform) -> Iterator[Finding]:
    # Records of an earlier version have none of these.
    analyzed, transformed = context.results["analyze"], context.results["transform"]
    return input_findings(
        anomalies=[*analyzed.get("of_columns", ()), *transformed.get("of_columns", ())],
        losses=transformed.get("vocabulary_losses", ()),
        served={column.name: column.shape for column in transform.serving_columns},
        labels=transform.labels,
        label_columns=[column.name for column in transform.label_columns],
        own=context.experiment.own_dataset is not None,
    )


def begin_process(settings: TrainConfig, resolved: ResolvedTraining) -> Distribution:
    """What holds for the whole process, in the order that TensorFlow demands.

    Args:
        settings: The section `train`.
        resolved: What its `auto`s became.

    Returns:
        Over which devices and workers a step is spread.
    """

    def spread() -> Distribution:
        return make_distribution(
            resolved.strategy,
            replicas=resolved.replicas // resolved.workers,
            reduction_bytes_per_pack=settings.reduction_bytes_per_pack,
        )

    return _begin(settings, resolved, spread)


def _begin(settings: TrainConfig, resolved: ResolvedTraining, reach: Callable[[], Place]) -> Place:
    apply_memory(settings.memory)
    apply_threads(settings)
    apply_tf32(on=settings.tf32)
    place = reach()
    prepare_process(
        precision=resolved.precision, seed=settings.seed, deterministic=settings.deterministic
    )
    return place


def open_and_build(
    context: Context, transform: AnyTransform, place: Distribution | ClusterConnection
) -> tuple[AnyDataset, BuiltModel]:
    """The data and the model, in a process that has begun.

    Raises:
        UserError: the user's code fails, or makes what cannot be trained.
    """
    dataset = open_dataset_of(context)
    experiment = context.experiment
    return dataset, _build(_model_code(experiment), experiment, transform, place)


def open_dataset_of(context: Context) -> AnyDataset:
    """The data, after the seeds are set: a user-defined dataset may draw from them."""
    with context.wall.within("data"):
        return context.dataset()


def _model_code(experiment: Experiment) -> Callable[..., Any]:
    return load_function(experiment.folder, experiment.model, where="model")


def _build(
    build: Callable[..., Any],
    experiment: Experiment,
    transform: AnyTransform,
    place: Distribution | ClusterConnection,
) -> BuiltModel:
    """The model, after a user-defined dataset has drawn its random numbers."""
    with place.strategy.scope():
        built = build_model(build, transform, what=experiment.model)
        require_label_of_each_output(built.model, transform.labels)
        rematerialize(built.model, experiment.train.remat)
    return built


def _fit(
    built: BuiltModel,
    data: tuple[AnyDataset, AnyTransform],
    place: Distribution | ClusterConnection,
    settings: TrainConfig,
    resolved: ResolvedTraining,
    run_context: RunContext,
) -> TrainResult | ParameterServerResult:
    """The loop that the place has."""
    if isinstance(place, Distribution):
        return fit(
            built,
            data,
            config=settings,
            resolved=resolved,
            distribution=place,
            context=run_context,
        )
    return fit_parameter_server(
        built, data, config=settings, resolved=resolved, connection=place, context=run_context
    )


def _own_facts(result: TrainResult | ParameterServerResult) -> dict[str, Any]:
    """What only one of the loops knows; None where the other has measured nothing."""
    if isinstance(result, ParameterServerResult):
        return {
            # Workers wait for the server too, so a step on resident data is no ceiling here.
            "busy_fraction": None,
            "input_wait": result.input_wait,
            "step_time_s": result.step_time_s,
            "ceiling_step_time_s": None,
            "repeated_steps": result.repeated,
            "health": {},
            "xla": None,
            "agreement": None,
        }
    return {
        "busy_fraction": result.busy.busy_fraction,
        "input_wait": result.busy.input_wait,
        "step_time_s": result.busy.real_step_s,
        "ceiling_step_time_s": result.busy.ceiling_step_s,
        "health": result.health,
        "xla": result.xla,
        "agreement": result.agreement,
    }


def callbacks_of(experiment: Experiment) -> list[keras.callbacks.Callback]:
    """The user's callbacks.

    Raises:
        ConfigError: what is wrong with the function that gives them.
    """
    named = experiment.train.callbacks
    return load_callbacks(experiment.folder, named)() if named else []


def _step_facts(
    result: TrainResult | ParameterServerResult, resolved: ResolvedTraining
) -> StepFacts:
    """What is known about the steps of a run, in addition to the trace of its devices."""
    wait = result.busy.input_wait if isinstance(result, TrainResult) else result.input_wait
    return StepFacts(
        of_script=False,
        precision=resolved.precision,
        xla=resolved.xla,
        steps_per_call=resolved.steps_per_call,
        input_wait=wait,
        nhwc_allowed=nhwc_is_allowed(),
    )


def service_of(experiment: Experiment, resolved: ResolvedTraining) -> ServiceConfig | None:
    """Who makes the training batches, None where this process does.

    Raises:
        ConfigError: a data service cannot do what is asked.
    """
    if not isinstance(experiment.data, IngestConfig) or experiment.data.service is None:
        return None
    if experiment.train.deterministic:
        raise ConfigError(
            "train.deterministic needs the local feed: a tf.data service promises no order",
            got=Plain("both train.deterministic and data.service"),
            fix="Leave one of them out.",
        )
    if resolved.strategy == "multi_worker":
        raise ConfigError(
            "train.strategy: multi_worker needs the local feed: a tf.data service would give each "
            "worker other records of a step",
            got=Plain("both multi_worker and data.service"),
            fix="Leave data.service out: with several workers each reads its own share.",
        )
    return experiment.data.service
