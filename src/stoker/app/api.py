"""The Python API: `run`, and the dataclasses for the sections of stoker.yaml."""

from __future__ import annotations

import logging

from stoker.app.chain import ChainResult, StageOutcome, run_chain
from stoker.app.experiment import Experiment
from stoker.app.release import start_rollout
from stoker.app.run_folder import NEWEST, Resume
from stoker.app.tuned_settings import load
from stoker.data.ingest import IngestConfig as Data
from stoker.data.user_dataset.config import OwnDatasetConfig as OwnDataset
from stoker.evaluate.config import EvaluateConfig as Evaluate
from stoker.train.config import TrainConfig as Train

__all__ = ["Data", "Evaluate", "Experiment", "OwnDataset", "Resume", "Train", "load", "run"]


class _Logged:
    """A listener that writes to Python's logging."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("stoker")

    def log(self, line: str) -> None:
        self._logger.info(line)

    def stage_began(self, stage: str) -> None:
        self._logger.info("%s ...", stage)

    def progress(self, line: str, share: float | None) -> None:
        percent = "" if share is None else f"{share:.0%} "
        self._logger.debug("%s%s", percent, line)

    def stage_ended(self, outcome: StageOutcome) -> None:
        how = "skipped" if outcome.skipped else "done"
        self._logger.info("%s %s, %.1f s %s", outcome.stage, how, outcome.took_s, outcome.why)


def run(experiment: Experiment, *, until: str = "push", resume: Resume = NEWEST) -> ChainResult:
    """Run an experiment's chain; stages with unchanged inputs are skipped.

    Args:
        experiment: What to run; `load(folder)` reads one from `stoker.yaml`.
        until: The last stage, `push` by default.
        resume: The run to continue, and whether changed inputs are accepted.

    Returns:
        The run folder, and the output and result of each stage. Progress goes to the logger `stoker`.

    Raises:
        UserError: an error in the data, the settings or the user's code.
        CheckFailed: a gate failed; nothing was pushed.
    """
    listener = _Logged()
    result = run_chain(experiment, listener, until=until, resume=resume)
    if until == "push" and (line := start_rollout(experiment, result.results["push"]["version"])):
        listener.log(line)
    return result
