"""Collects and publishes the metrics of a running training."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stoker.app.context import CHECKPOINTS, Context
from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import visible_uuids
from stoker.telemetry.gpu.sampler import GpuSampler
from stoker.telemetry.publish import Destinations, offered
from stoker.telemetry.run_info import run_info
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.writers.live import LiveMetrics, Sources
from stoker.train.checkpoints.store import places
from stoker.train.context.local_step import LocalStepTime
from stoker.train.parameter_server.cluster import ClusterConnection
from stoker.train.setup.strategy import Distribution
from stoker.train.step.multi_step import clock_function
from stoker.train.watch.stragglers import Stragglers

LOCAL_STEPS = ".local-steps"
"""Folder of the run in which workers exchange their local step times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedWorker:
    """Step timer and straggler detector of a worker that other workers wait for in every step."""

    local_step: LocalStepTime
    stragglers: Stragglers


def time_worker(
    folder: Path, place: Distribution | ClusterConnection, held: ExitStack
) -> TimedWorker | None:
    """Start to time this worker and to detect stragglers; None if no other worker waits for this one.

    Args:
        folder: Folder of the stage.
        place: The workers that share a step.
        held: Stops the detection of stragglers when it is closed.
    """
    if not isinstance(place, Distribution) or place.workers < 2:
        return None
    local_step = LocalStepTime(clock_function())
    stragglers = Stragglers(
        folder.parent / LOCAL_STEPS,
        rank=place.worker,
        median_s=local_step.median_s,
        reads=place.is_chief,
    )
    return TimedWorker(local_step=local_step, stragglers=held.enter_context(stragglers))


def offer_metrics(
    context: Context,
    folder: Path,
    run_time: RunTime,
    timed: TimedWorker | None,
    held: ExitStack,
) -> LiveMetrics:
    """Publish the metrics of this process according to settings and environment.

    Args:
        context: The experiment.
        folder: Folder of the stage.
        run_time: The record of wall time.
        timed: This worker's timing, if it is one of several workers.
        held: Stops the publication and the sampling of GPUs when it is closed.

    Returns:
        The writer to which training passes its metrics.
    """
    experiment, settings = context.experiment, context.experiment.train
    offers = settings.metrics_port is not None or settings.metrics_textfile is not None
    gpus = _sampled_gpus(held) if offers else None
    live = LiveMetrics(
        run_info(context.run_id, experiment.name, folder=experiment.folder, environ=os.environ),
        Sources(
            run_time=run_time,
            checkpoint_age_s=lambda: checkpoint_age_s(folder / CHECKPOINTS),
            local_steps=lambda: {} if timed is None else timed.stragglers.medians_s,
            stragglers=lambda: {} if timed is None else timed.stragglers.ratios,
            gpus=tuple if gpus is None else gpus.families,
        ),
    )
    textfile = settings.metrics_textfile
    where = Destinations(
        runs=experiment.folder / experiment.runs,
        port=settings.metrics_port,
        host=settings.metrics_host,
        textfile=None if textfile is None else experiment.folder / textfile,
    )
    held.enter_context(offered(live, where, environ=os.environ))
    return live


def _sampled_gpus(held: ExitStack) -> GpuSampler | None:
    """Start to sample the GPUs that this process may use; None if it has no GPU."""
    uuids = visible_uuids(read_gpus().states, os.environ)
    return held.enter_context(GpuSampler(uuids=uuids)) if uuids else None


def checkpoint_age_s(checkpoints: Path) -> float | None:
    """Return the seconds since the newest checkpoint was published; None before the first checkpoint."""
    found = places(checkpoints)
    try:
        return max(0.0, time.time() - found[-1].stat().st_mtime) if found else None
    except OSError:  # just deleted: the next call finds a newer checkpoint
        return None
