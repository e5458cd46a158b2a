"""Allocates the number of a job's next start. Imports no large library, because a scheduler waits for it."""

from __future__ import annotations

from pathlib import Path

from stoker.core.errors import ConfigError, Plain
from stoker.core.files import writable
from stoker.core.incarnation import take_next

DESCRIPTION = "job.json"
"""File that marks a folder as a job's."""


def start_job(place: Path) -> int:
    """Allocate the number of the next start of a job.

    Args:
        place: The job's folder.

    Raises:
        ConfigError: the folder is not a job's.
        UserError: the folder cannot be written.
    """
    require_job(place)
    with writable(
        place, what="the folder of the job", fix="Check the file system and its permissions."
    ):
        return take_next(place)


def require_job(place: Path) -> None:
    """Check that a folder is the folder of a job.

    Raises:
        ConfigError: the folder is missing, or is not a job's.
    """
    if not (place / DESCRIPTION).is_file():
        raise ConfigError(
            f"{place} must be the folder of a job",
            got=Plain(f"no {place / DESCRIPTION}"),
            fix="Check that this machine sees the file system. If the folder was deleted, submit the experiment again.",
        )
