"""Facts of a run that are the same in all of its series: the labels of `stoker_run_info`."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MOST_CHARS = 128
"""Longest value of a label."""

_COMMIT = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """A run and its owner."""

    run: str
    """ID of the run."""

    experiment: str
    """Name in stoker.yaml."""

    user: str = ""
    """`STOKER_USER`, else the user of the process."""

    team: str = ""
    """`STOKER_TEAM`."""

    cluster: str = ""
    """`STOKER_CLUSTER`."""

    git_commit: str = ""
    """Commit of the experiment's folder; empty outside a repository."""

    def labels(self) -> tuple[str, ...]:
        """Return the values of `stoker_run_info`, in the catalogue's order, as valid Unicode."""
        values = (self.run, self.experiment, self.user, self.team, self.cluster, self.git_commit)
        return tuple(value[:MOST_CHARS].encode(errors="replace").decode() for value in values)


def run_info(run: str, experiment: str, *, folder: Path, environ: Mapping[str, str]) -> RunInfo:
    """Return the facts of a run of this process.

    Args:
        run: ID of the run.
        experiment: Its name.
        folder: The experiment's folder.
        environ: Environment of the process.
    """
    return RunInfo(
        run=run,
        experiment=experiment,
        user=environ.get("STOKER_USER", "") or _user(),
        team=environ.get("STOKER_TEAM", ""),
        cluster=environ.get("STOKER_CLUSTER", ""),
        git_commit=git_commit(folder),
    )


def git_commit(folder: Path) -> str:
    """Return the checked-out commit of a folder's repository, read without git; "" without one."""
    for place in (folder.resolve(), *folder.resolve().parents):
        if (place / ".git").exists():
            try:
                return _head(place / ".git")
            except (OSError, ValueError):
                return ""
    return ""


def _head(git: Path) -> str:
    if git.is_file():
        # In a worktree or submodule: `gitdir: PATH`.
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    shared = git / "commondir"
    roots = [git] + ([git / shared.read_text().strip()] if shared.is_file() else [])
    for root in roots:
        if (root / name).is_file():
            found = (root / name).read_text().strip()
            return found if _COMMIT.fullmatch(found) else ""
    for root in roots:
        if (root / "packed-refs").is_file():
            for line in (root / "packed-refs").read_text().splitlines():
                if line.endswith(f" {name}"):
                    return line.split()[0]
    return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # A container's user without a name.
        return str(os.getuid())
