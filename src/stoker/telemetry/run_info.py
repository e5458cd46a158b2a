"""Facts about a run that do not change during the run: the labels of `stoker_run_info`."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.core.git_repository import git_commit

MAX_CHARS = 128
"""Maximum length of a label's value, characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """A run and its owner."""

    run: str
    """ID of the run."""

    experiment: str
    """Name of the experiment in stoker.yaml."""

    user: str = ""
    """Value of the environment variable `STOKER_USER`; by default the user of the process."""

    team: str = ""
    """Value of the environment variable `STOKER_TEAM`."""

    cluster: str = ""
    """Value of the environment variable `STOKER_CLUSTER`."""

    git_commit: str = ""
    """Commit of the experiment's folder; empty outside a repository."""

    def labels(self) -> tuple[str, ...]:
        """Return the values of the labels of `stoker_run_info`, in the catalogue's order, as valid Unicode."""
        values = (self.run, self.experiment, self.user, self.team, self.cluster, self.git_commit)
        return tuple(value[:MAX_CHARS].encode(errors="replace").decode() for value in values)


def run_info(run: str, experiment: str, *, folder: Path, environ: Mapping[str, str]) -> RunInfo:
    """Return the facts about a run that this process trains.

    Args:
        run: ID of the run.
        experiment: Name of the experiment.
        folder: Folder of the experiment.
        environ: Environment of this process.
    """
    return RunInfo(
        run=run,
        experiment=experiment,
        user=environ.get("STOKER_USER", "") or _user(),
        team=environ.get("STOKER_TEAM", ""),
        cluster=environ.get("STOKER_CLUSTER", ""),
        git_commit=git_commit(folder),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # In a container, the user may have no name.
        return str(os.getuid())
