"""Starts the trials of one experiment, in a folder that only one tuning or profile may use at a time."""

from __future__ import annotations

import fcntl
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from stoker.app.experiment import Experiment
from stoker.app.tuned_settings import with_settings
from stoker.core.errors import BusyError, ConfigError, Plain, UserError
from stoker.core.files import full_disk_is_named, remove, writable
from stoker.tune.client import SCRATCH, TrialClient, TrialLimits, TrialSpec
from stoker.tune.process import TrialFailed, TrialProcess

TRIALS = "trials"
"""Folder of the trials, in the folder of their tuning."""

PREPARE = (sys.executable, "-m", "stoker.app.tuning.child", "prepare")
"""Name of the process that runs the stages before `train`."""


class Trials:
    """Starts trials of one experiment. The stages before `train` run once per distinct section `data`."""

    def __init__(
        self, experiment: Experiment, folder: Path, *, progress: Callable[[str], None]
    ) -> None:
        """Create the object; no process starts yet.

        Args:
            experiment: The experiment that settings are added to.
            folder: Receives the inputs and logs of all processes.
            progress: Receives the progress of the stages.
        """
        self._experiment, self._folder, self._progress = experiment, folder, progress
        self._inputs: dict[str, dict[str, Any]] = {}

    def open(self, settings: Mapping[str, Any], *, name: str, limits: TrialLimits) -> TrialClient:
        """Start a trial, and wait until it can measure.

        Args:
            settings: Values by dotted name of `stoker.yaml`, in addition to the experiment's own.
            name: Name of its files.
            limits: Time limits of the trial; the stages before `train` may take all the time that is left.

        Raises:
            TrialFailed: the setting cannot be measured.
        """
        try:
            candidate = with_settings(self._experiment, settings).in_one_process()
        except UserError as error:
            raise TrialFailed("refused", error.line()) from None
        inputs = self._prepared(candidate, name, limits)
        spec = TrialSpec(
            inputs=inputs | {"experiment": yaml.safe_dump(candidate.to_json())},
            train=candidate.train,
            data=candidate.files if candidate.own_dataset is None else candidate.own_dataset,
        )
        return TrialClient(spec, folder=self._folder, name=name, limits=limits)

    def alone(self, *, name: str, within_s: float) -> closing[TrialClient]:
        """Start a trial of the unchanged experiment; it ends with the `with` block.

        Args:
            name: Name of its files.
            within_s: Maximum time of the whole trial, seconds.
        """
        return closing(self.open({}, name=name, limits=TrialLimits.within(within_s)))

    def _prepared(self, candidate: Experiment, name: str, limits: TrialLimits) -> dict[str, Any]:
        experiment = replace(self._experiment, data=candidate.data)
        settings = experiment.to_json()
        key = json.dumps(settings["data"], sort_keys=True)
        if key not in self._inputs:
            timeout_s = limits.timeout_s(float("inf"))
            spec = {"experiment": yaml.safe_dump(settings)}
            name = f"{name}-prepare"
            process = TrialProcess(spec, folder=self._folder, name=name, command=PREPARE)
            with closing(process):
                try:
                    found = process.ask("prepare", timeout_s=timeout_s, progress=self._progress)
                except TrialFailed as failed:
                    raise limits.failure(failed, "prepare") from None
            self._inputs[key] = found
        return self._inputs[key]


def cannot_measure(failed: TrialFailed) -> UserError:
    """Return the error for an experiment that cannot be measured with its own settings."""
    if failed.kind == "budget":
        return ConfigError(
            "--budget must be long enough to measure the unchanged experiment",
            got=Plain(failed.text),
            fix="Give it more, e.g. --budget 10m.",
        )
    return UserError(
        "the unchanged experiment must train to be measured",
        got=Plain(f"{failed.kind}: {failed.text}"),
        fix="Run `stoker train` to see the whole error.",
    )


@contextmanager
def locked_folder(experiment: Experiment) -> Iterator[Path]:
    """Create a folder for one tuning, and hold its lock, because two tunings at a time would disturb each other.

    Raises:
        BusyError: another process measures the experiment.
    """
    root = experiment.folder / experiment.runs / ".tune" / experiment.name
    with writable(root, what="the folder", fix="Write elsewhere with --set runs=DIR."):
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{experiment.name} can be measured by only one process at a time",
                got=Plain(f"another process holds {root / 'lock'}"),
                fix="Wait until that process has ended.",
            ) from None
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
        folder = root / name
        with full_disk_is_named(folder):
            folder.mkdir()
        for scratch in root.glob(f"*/{TRIALS}/*{SCRATCH}"):
            remove(scratch)  # left by a killed tuning
        yield folder
