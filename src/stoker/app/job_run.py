"""Reads the progress of a job's run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.app.context import METRICS
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.incarnation import RUN_OF_JOB
from stoker.monitor.goodput import STAGE, goodput_of
from stoker.telemetry.catalogue import training as catalogue
from stoker.telemetry.targets import published_port

READ_BYTES = 1 << 18
"""Number of bytes read at the end of `metrics.jsonl`: a line has about 200 bytes, and about every tenth line has U (the
busy fraction)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """State of a run; a value is None if training has not written it yet."""

    folder: Path

    step: int | None = None
    epoch: float | None = None
    busy_fraction: float | None = None
    """Newest U: share of time in which the device is busy."""

    input_wait: float | None = None
    """Newest W: share of time in which training waits for input."""

    mfu: float | None = None
    goodput: float | None = None
    """Share of the run's wall time, over all its processes, in training steps."""

    @property
    def tensorboard(self) -> Path:
        """Folder of the run's TensorBoard files."""
        return self.folder / STAGE / "tensorboard"


def run_of_job(place: Path) -> JobRun | None:
    """Return the run of a job's newest start; None if there is no run yet, or it was deleted.

    Args:
        place: The job's folder.
    """
    try:
        folder = Path((place / RUN_OF_JOB).read_text())
    except OSError:
        return None
    if not folder.is_dir():
        return None
    newest: dict[str, float] = {}
    for scalars in _newest_first(folder / STAGE / METRICS):
        newest = scalars | newest
    names = (catalogue.EPOCH, catalogue.BUSY_FRACTION, catalogue.INPUT_WAIT, catalogue.MFU)
    epoch, busy, wait, mfu = (newest.get(metric.tensorboard) for metric in names)
    return JobRun(
        folder=folder,
        step=int(newest["step"]) if "step" in newest else None,
        epoch=epoch,
        busy_fraction=busy,
        input_wait=wait,
        mfu=mfu,
        goodput=_goodput(folder),
    )


def tensorboard_folder(place: Path) -> Path:
    """Return the folder of TensorBoard files of a job's run.

    Raises:
        ConfigError: the job has no run with such files.
    """
    run = run_of_job(place)
    if run is None or not run.tensorboard.is_dir():
        raise ConfigError(
            f"job {place.name} must have begun to train",
            got=Plain(f"no {run.tensorboard}" if run else "no run yet"),
            fix=f"See what it does: stoker logs {place.name}.",
        )
    return run.folder


def metrics_port(place: Path) -> int:
    """Return the port on worker 0's machine where the job's run serves its metrics.

    Raises:
        ConfigError: the run has not announced a port, or this machine does not see it.
    """
    run = run_of_job(place)
    port = None if run is None else published_port(place.parent.parent, run.folder.name)
    if port is None:
        raise ConfigError(
            f"job {place.name} must serve its metrics if no REMOTE is given",
            got=Plain("its run announced no port" if run else "no run yet"),
            fix="Give the port of the worker, e.g. 9100; to serve metrics, set train.metrics_port.",
        )
    return port


def _newest_first(path: Path) -> Iterator[dict[str, float]]:
    """Yield the values of the last lines of `metrics.jsonl`, the newest line first; incomplete lines are left out."""
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, 2)
            stream.seek(max(0, end - READ_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            scalars = json.loads(line)
        except ValueError:
            continue
        if isinstance(scalars, dict):
            # The file has strings for values that JSON cannot represent, such as NaN.
            yield {name: v for name, v in scalars.items() if isinstance(v, int | float)}


def _goodput(run: Path) -> float | None:
    try:
        return goodput_of(run).goodput
    except UserError:
        return None
