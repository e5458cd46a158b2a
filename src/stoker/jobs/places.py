"""Finds jobs: in the folders RUNS/.jobs, and in the user's index, which has a link to the folder of each job."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.errors import ConfigError, DataError, Plain, UserError, nearest
from stoker.core.files import read_json, write_json
from stoker.jobs.job import JOBS, Job, read_job

SUBMITTED = "submitted.json"

_found: dict[str, Path] = {}
"""Folders of jobs that this process has found, by ID. Through it, a provider also finds a job that a command has found
with `--runs`."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """The record of a submission that a target has accepted."""

    target: str
    """The target's name, as in `targets.yaml`."""

    scheduler_id: str
    submitted_s: float
    """Time of the submission, seconds since the epoch."""


def index_folder() -> Path:
    """Return the folder of links to the jobs that this user has submitted from this machine."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "stoker" / "jobs"


def add_to_index(place: Path) -> None:
    """Add a job to the user's index. Without a writable home folder, the job is found only in RUNS/.jobs."""
    _found[place.name] = place.resolve()
    with contextlib.suppress(OSError):
        index_folder().mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (index_folder() / place.name).symlink_to(place.resolve())


def places(runs: Iterable[Path] = ()) -> dict[str, Path]:
    """Return a job's ID -> its folder, for all jobs in the index and in all known folders of runs."""
    for folder in (index_folder(), *(each / JOBS for each in runs)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for place in _entries(folder):
                if _is_job(place):
                    _found[place.name] = place.resolve()
    return dict(_found)


def folders_with(file: str, runs: Iterable[Path] = ()) -> list[Path]:
    """Return the folders of jobs, in the index and in folders of runs, that contain a file of this name."""
    found = set()
    for folder in (index_folder(), *(each / JOBS for each in runs)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found |= {each.resolve() for each in _entries(folder) if (each / file).is_file()}
    return sorted(found)


def find_place(named: str, runs: Iterable[Path] = ()) -> Path:
    """Return the folder of the job with this ID, or of the only job whose ID begins with this text.

    Args:
        named: The ID, or its first characters.
        runs: Folders of runs in addition to the index.

    Raises:
        ConfigError: no job matches (the message names the most similar ID), or several do.
    """
    if not _ID.fullmatch(named):
        raise ConfigError("a job is named by its ID or the beginning of it", got=named, fix=_LIST)
    if named in _found and _is_job(_found[named]):
        return _found[named]
    known = places(runs)
    if named in known:
        return known[named]
    matches = sorted(job for job in known if job.startswith(named))
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        more = f" and {len(matches) - _LISTED} more" if len(matches) > _LISTED else ""
        raise ConfigError(
            "the beginning of a job's ID must fit one job",
            got=Plain(f"{named!r}, which fits {', '.join(matches[:_LISTED])}{more}"),
            fix="Give more characters of the ID; for a sweep, at least `NAME-sweep`.",
        )
    fix = nearest(named, known) if len(known) <= _LISTED or _is_close(named, known) else _LIST
    raise ConfigError("no job has this ID", got=named, fix=fix)


_LIST = "List the jobs: stoker jobs."
_LISTED = 5
"""Maximum number of IDs that an error lists."""


def _is_close(named: str, known: Iterable[str]) -> bool:
    return nearest(named, known).startswith("Did")


def open_job(place: Path) -> Job:
    """Read the job of a folder.

    Raises:
        UserError: the description is damaged, or belongs to another user.
    """
    try:
        return read_job(place)
    except OSError as error:
        raise UserError(
            f"{place / 'job.json'} must be a file that can be read",
            got=Plain(error.strerror or str(error)),
            fix="It may be another user's job: ask its owner.",
        ) from None
    except DataError as error:
        raise DataError(
            error.rule, got=error.got, fix="Submit the experiment again, which writes it again."
        ) from None


def read_submitted(place: Path) -> Submitted | None:
    """Return the submission of a job; None if no target has accepted it."""
    path = place / SUBMITTED
    try:
        raw: dict[str, Any] = read_json(path) if path.is_file() else {}
    except OSError:
        return None
    if not {"target", "scheduler_id", "submitted_s"} <= raw.keys():
        return None
    return Submitted(
        target=str(raw["target"]),
        scheduler_id=str(raw["scheduler_id"]),
        submitted_s=float(raw["submitted_s"]),
    )


def note_submission(place: Path, *, target: str, scheduler_id: str) -> None:
    """Record that a target has accepted a job just now."""
    noted = Submitted(target=target, scheduler_id=scheduler_id, submitted_s=time.time())
    write_submitted(place, noted)


def write_submitted(place: Path, submitted: Submitted) -> None:
    """Record that a target has accepted a job; fields that the provider has added to the record remain."""
    path = place / SUBMITTED
    before: dict[str, Any] = read_json(path) if path.is_file() else {}
    values = {
        "target": submitted.target,
        "scheduler_id": submitted.scheduler_id,
        "submitted_s": submitted.submitted_s,
    }
    write_json(path, before | values)


def _is_job(place: Path) -> bool:
    try:
        return (place / "job.json").exists()
    except PermissionError:
        return True  # the job belongs to another user: `open_job` reports that


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except PermissionError:
        return []
