"""The progress of the run that a job works on."""

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
"""How much of the end of `metrics.jsonl` is read: a line has some 200 bytes, and about every tenth one has U."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """A run in progress or finished; None for values that training has not written yet."""

    folder: Path

    step: int | None = None
    epoch: float | None = None
    busy_fraction: float | None = None
    """U, from the newest measurement."""

    input_wait: float | None = None
    """W, from the newest report."""

    mfu: float | None = None
    goodput: float | None = None
    """Share of the run's wall time, over all its processes, in training steps."""

    @property
    def tensorboard(self) -> Path:
        """Folder of its TensorBoard files."""
        return self.folder / STAGE / "tensorboard"


def run_of_job(place: Path) -> JobRun | None:
    """Return the run of a job's newest start; None if it has none yet, or the run is gone.

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
    """Return the run of a job, if it has logs for TensorBoard.

    Raises:
        ConfigError: the job has no such run.
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
    """Return the port of the metrics of a job's run, on worker 0's machine.

    Raises:
        ConfigError: this machine sees no announced port.
    """
    run = run_of_job(place)
    port = None if run is None else published_port(place.parent.parent, run.folder.name)
    if port is None:
        raise ConfigError(
            f"job {place.name} must serve its metrics if no REMOTE is given",
            got=Plain("no port of its run" if run else "no run yet"),
            fix="Name a port of the worker, e.g. 9100; train.metrics_port offers the metrics.",
        )
    return port


def _newest_first(path: Path) -> Iterator[dict[str, float]]:
    """Yield the scalars of the last lines of a growing file; incomplete lines are left out."""
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
            # Values that JSON cannot represent, such as NaN, are strings.
            yield {name: v for name, v in scalars.items() if isinstance(v, int | float)}


def _goodput(run: Path) -> float | None:
    try:
        return goodput_of(run).goodput
    except UserError:
        return None
