"""The stage `train`: sets up the training, runs its loop, and records the result."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import keras

from stoker.app.context import (
    CHECKPOINTS,
    METRICS,
    TENSORBOARD,
    WALL_TIME,
    Context,
    Done,
    LoopFacts,
    TrainingResult,
)
from stoker.app.identity import training_identity
from stoker.app.training.metrics import TimedWorker, offer_metrics, time_worker
from stoker.app.training.setup import (
    begin_process,
    begin_with_servers,
    build_on,
    callbacks_of,
    load_build,
    open_dataset_of,
    resolve_here,
    resolve_once,
    service_of,
)
from stoker.app.training.step_errors import steps_are_the_users
from stoker.cluster.devices import find_devices
from stoker.cluster.resolver import read_tf_config
from stoker.core.errors import Finding, UserError
from stoker.data.dataset import Dataset
from stoker.data.features.analysis.input_checks import input_findings
from stoker.data.features.preprocessing.transform import Transform
from stoker.evaluate.config import outputs_and_labels, require_metrics_of
from stoker.measure.findings import StepFacts, nhwc_is_allowed
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.writers import Everywhere, MetricWriter
from stoker.telemetry.writers.append_only import JsonLines
from stoker.telemetry.writers.live import LiveMetrics
from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.callbacks.hooks import apply_user_hooks
from stoker.train.checkpoints.identity import Identity
from stoker.train.checkpoints.store import STATE, best
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context.heartbeat import process_heartbeat
from stoker.train.context.preemption import Preemption, listen_for_preemption
from stoker.train.context.run_context import BackgroundCall, Progress, RunContext, TrainResult
from stoker.train.loop.loop import fit
from stoker.train.parameter_server.cluster import ClusterConnection
from stoker.train.parameter_server.loop import fit_parameter_server
from stoker.train.parameter_server.run import ParameterServerResult
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.feeds import open_feeds
from stoker.train.setup.handshake import handshake
from stoker.train.setup.id_checks import require_embedded_vocabularies
from stoker.train.setup.label_checks import findings, require_labels_that_fit
from stoker.train.setup.strategy import Distribution
from stoker.train.watch.device_watch import DeviceWatch, forbids_trace
from stoker.train.watch.progress_line import ProgressLine
from stoker.train.watch.summaries import vocabulary_terms
from stoker.train.watch.watch import RunWatch, Watch

if TYPE_CHECKING:
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.data.user_dataset.load_dataset import AnyDataset

_LOG = logging.getLogger(__name__)

LOCAL_WORKERS = "STOKER_LOCAL_WORKERS"
"""Environment variable: number of processes that compute steps on this machine, and so share its memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """The opened data, the built model and the settings of a training."""

    dataset: AnyDataset
    transform: AnyTransform
    built: BuiltModel
    callbacks: list[keras.callbacks.Callback]
    findings: tuple[Finding, ...]
    """Warnings about the data."""

    resolved: ResolvedTraining
    identity: Identity
    is_chief: bool
    """Whether this process is the worker that writes files and logs."""

    inputs: dict[str, Any]
    """The feeds, and the settings that opened them: keyword arguments of `RunContext`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reports:
    """The writers and accounts to which a training reports while it runs."""

    run_time: RunTime
    writer: Everywhere
    board: TensorBoard | None
    device: DeviceWatch
    live: LiveMetrics | None
    timed: TimedWorker | None


def train(context: Context, folder: Path) -> Done:
    """Train the experiment's model.

    Args:
        context: The experiment, and the earlier stages.
        folder: Receives checkpoints, metrics and TensorBoard's events.

    Raises:
        UserError: the settings, the user's code or the data are invalid, or a loss or gradient is not finite.
        tf.errors.OpError: another worker is gone; the launcher should start the workers again.
    """
    settings, transform = context.experiment.train, context.transform()
    cluster, devices = read_tf_config(os.environ), find_devices()
    resolved = resolve_once(folder, settings, resolve_here(context, transform, devices, cluster))
    inputs: dict[str, Any] = {
        "memory_bytes": devices.memory_bytes // int(os.environ.get(LOCAL_WORKERS, "1")),
        "service": service_of(context.experiment, resolved),
        "work_dir": folder.parent / "cache",
    }
    identity = training_identity(context, resolved)
    context.wait_for_all()
    place: Distribution | ClusterConnection
    if resolved.strategy == "parameter_server" and cluster is not None:
        place = begin_with_servers(settings, resolved, cluster)
    else:
        place = begin_process(settings, resolved)
    # Replace TensorFlow's handler of SIGTERM, which it installs while workers connect and which ignores the signal.
    with listen_for_preemption() as preemption, ExitStack() as held:
        if isinstance(place, Distribution):
            handshake(place, {**identity, "settings": context.requested})
        job = _open_job(context, place, resolved, identity, inputs, held)
        timed = time_worker(folder, place, held)
        reports = _open_reports(context, folder, job, timed, held)
        run_context = _run_context(context, folder, job, reports, preemption)
        with steps_are_the_users(workers=resolved.workers):
            result = _fit(job, place, settings, run_context)
        context.wall.enter("ending")
        if reports.board is not None:
            reports.board.results(result.steps, result.metrics, succeeded=True)
    return Done(
        result=_result(result, job, reports),
        columns=context.hashed(transform.columns),
        content=best(folder / CHECKPOINTS).manifest.hashes[STATE],
    )


def _open_job(
    context: Context,
    place: Distribution | ClusterConnection,
    resolved: ResolvedTraining,
    identity: Identity,
    inputs: dict[str, Any],
    held: ExitStack,
) -> _Job:
    """Open the data, build the model, and check that they fit together."""
    experiment, transform = context.experiment, context.transform()
    settings = experiment.train
    dataset = open_dataset_of(context)
    # Import the user's code first: no other thread may import anything at the same time.
    context.wall.enter("build")
    build = load_build(experiment)
    feeds = None
    if isinstance(dataset, Dataset):
        # Open shards in a thread while the model is built. A user-defined dataset may draw random numbers, so it is not
        # opened in parallel.
        opening = functools.partial(open_feeds, dataset, transform, config=settings, **inputs)
        feeds = BackgroundCall(opening, name="open-data")
        held.callback(feeds.wait)
    built = build_on(place, build, experiment, transform)
    if feeds is not None:
        feeds.wait()
    is_chief = isinstance(place, ClusterConnection) or place.is_chief
    findings = _check_data(context, (dataset, transform), built, place)
    for finding in findings if is_chief else ():
        _LOG.warning("%s", finding.line())
    callbacks = callbacks_of(experiment)
    return _Job(
        dataset=dataset,
        transform=transform,
        built=built,
        callbacks=callbacks,
        findings=findings,
        resolved=apply_user_hooks(resolved, settings, model=built.model, callbacks=callbacks),
        identity=identity,
        is_chief=is_chief,
        inputs=inputs | {"feeds": feeds},
    )


def _open_reports(
    context: Context, folder: Path, job: _Job, timed: TimedWorker | None, held: ExitStack
) -> _Reports:
    """Open the metric writers, the record of wall time and the device watch.

    With several workers, only the chief writes metrics and the record.
    """
    wall_time = folder / WALL_TIME if job.is_chief else None
    run_time = held.enter_context(RunTime(context.wall, wall_time))
    board = live = None
    writers: list[MetricWriter] = []
    if job.is_chief:
        board = _open_board(folder / TENSORBOARD)
        live = offer_metrics(context, folder, run_time, timed, held)
        writers = [JsonLines(folder / METRICS), *([] if board is None else [board]), live]
    writer = Everywhere(writers)
    held.callback(writer.close)
    profile = context.experiment.train.tensorboard.profile
    device = DeviceWatch(
        folder,
        replicas=job.resolved.replicas,
        forbidden=forbids_trace(job.callbacks, profile=profile),
        wall=context.wall,
    )
    return _Reports(
        run_time=run_time, writer=writer, board=board, device=device, live=live, timed=timed
    )


def _open_board(folder: Path) -> TensorBoard | None:
    """Return the writer of TensorBoard's files; None, with a warning, if the files cannot be created."""
    try:
        return TensorBoard(folder)
    except UserError as error:
        _LOG.warning("training continues without files for TensorBoard: %s", error.line())
        return None


def _run_context(
    context: Context, folder: Path, job: _Job, reports: _Reports, preemption: Preemption
) -> RunContext:
    return RunContext(
        checkpoints=folder / CHECKPOINTS,
        writer=reports.writer,
        watch=_watch(context, folder, job, reports),
        on_progress=_progress_reporter(context, reports),
        on_wait=lambda line: context.progress(line, None),
        preemption=preemption,
        heartbeat=process_heartbeat(),
        run_time=reports.run_time,
        local_step=None if reports.timed is None else reports.timed.local_step,
        identity=job.identity,
        accept_change=context.accept_change,
        callbacks=job.callbacks,
        **job.inputs,
    )


def _watch(context: Context, folder: Path, job: _Job, reports: _Reports) -> Watch:
    """Return the writer for TensorBoard, after writing the run's settings to it; None if this process does not write."""
    if reports.board is None:
        return Watch()
    reports.board.settings(context.experiment.to_json(), run=context.run_id)
    config = context.experiment.train.tensorboard
    terms = {
        layer: vocabulary_terms(job.transform, vocabulary) if vocabulary is not None else None
        for layer, vocabulary in config.embeddings.items()
    }
    return RunWatch(
        reports.board,
        config=config,
        terms=terms,
        folder=folder,
        alone=job.resolved.workers == 1,
        device=reports.device,
    )


def _progress_reporter(context: Context, reports: _Reports) -> Callable[[Progress], None]:
    """Return a function that shows the step, the epoch and the metrics to the user."""
    settings = context.experiment.train

    @functools.cache
    def line(steps: int) -> ProgressLine:
        return ProgressLine(steps=steps, epochs=settings.epochs, monitor=settings.monitor)

    def report_progress(progress: Progress) -> None:
        text = line(progress.steps)(
            step=progress.step, epoch=progress.epoch, scalars=progress.scalars
        )
        if reports.live is not None:
            reports.live.progress(step=progress.step, steps=progress.steps, epoch=progress.epoch)
        if reports.timed is not None and (slow := reports.timed.stragglers.line()):
            text = f"{text}, {slow}"
        context.progress(text, progress.step / progress.steps)

    return report_progress


def _check_data(
    context: Context,
    data: tuple[AnyDataset, AnyTransform],
    built: BuiltModel,
    place: Distribution | ClusterConnection,
) -> tuple[Finding, ...]:
    """Check labels, columns and metrics against the model; return the warnings.

    Raises:
        ConfigError: the loss does not fit the labels, a metric names an unknown output or label, or an Embedding has no
            row for values out of vocabulary.
    """
    experiment, (dataset, transform) = context.experiment, data
    shapes = {output: spec.shape for output, spec in transform.labels.items()}
    require_metrics_of(experiment.evaluate, outputs_and_labels(shapes))
    if isinstance(dataset, Dataset) and isinstance(transform, Transform):
        losses = context.results["transform"].get("vocabulary_losses", ())
        with place.strategy.scope():
            require_embedded_vocabularies(built, dataset, transform, losses)
    labels = context.labels()
    return (
        *require_labels_that_fit(
            findings(
                built,
                labels,
                monitor=experiment.train.monitor,
                class_weight=experiment.train.class_weight,
                # The elements of a user's dataset may have weights too.
                has_sample_weight=not isinstance(transform, Transform)
                or transform.spec.weight is not None,
                texts=[output for output, spec in transform.labels.items() if spec.classes],
            )
        ),
        *_input_findings(context, transform),
    )


def _input_findings(context: Context, transform: AnyTransform) -> Iterator[Finding]:
    # Records of earlier versions do not have these keys.
    analyzed, transformed = context.results["analyze"], context.results["transform"]
    return input_findings(
        anomalies=[*analyzed.get("of_columns", ()), *transformed.get("of_columns", ())],
        losses=transformed.get("vocabulary_losses", ()),
        served={column.name: column.shape for column in transform.serving_columns},
        labels=transform.labels,
        label_columns=[column.name for column in transform.label_columns],
        own=context.experiment.own_dataset is not None,
    )


def _fit(
    job: _Job,
    place: Distribution | ClusterConnection,
    settings: TrainConfig,
    run_context: RunContext,
) -> TrainResult | ParameterServerResult:
    """Run the training loop: the loop for parameter servers, or the loop for one or several synchronous processes."""
    data = (job.dataset, job.transform)
    if isinstance(place, Distribution):
        return fit(
            job.built,
            data,
            config=settings,
            resolved=job.resolved,
            distribution=place,
            context=run_context,
        )
    return fit_parameter_server(
        job.built,
        data,
        config=settings,
        resolved=job.resolved,
        connection=place,
        context=run_context,
    )


def _result(
    result: TrainResult | ParameterServerResult, job: _Job, reports: _Reports
) -> TrainingResult:
    resolved = result.resolved if isinstance(result, TrainResult) else job.resolved
    step = _step_facts(result, resolved)
    facts = {
        "steps": result.steps,
        "epochs": result.epochs,
        "best_epoch": result.best_epoch,
        "metrics": result.metrics,
        "samples_per_s": result.samples_per_s,
        "parameters": job.built.model.count_params(),
        "resolved": asdict(resolved),
        "warnings": [finding.line() for finding in job.findings],
        **_loop_facts(result),
        "goodput": reports.run_time.goodput if isinstance(result, TrainResult) else None,
        "wall_time": reports.run_time.report(),
    }
    facts |= reports.device.facts(result.samples_per_s, step)
    if reports.timed is not None:
        facts["stragglers"] = reports.timed.stragglers.facts()
    return cast(TrainingResult, facts)


def _loop_facts(result: TrainResult | ParameterServerResult) -> LoopFacts:
    """Return the measurements of the training loop."""
    if isinstance(result, ParameterServerResult):
        return {
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


def _step_facts(
    result: TrainResult | ParameterServerResult, resolved: ResolvedTraining
) -> StepFacts:
    """Return facts about the steps that the trace of the devices does not contain."""
    wait = result.busy.input_wait if isinstance(result, TrainResult) else result.input_wait
    return StepFacts(
        of_script=False,
        precision=resolved.precision,
        xla=resolved.xla,
        steps_per_call=resolved.steps_per_call,
        input_wait=wait,
        nhwc_allowed=nhwc_is_allowed(),
    )
