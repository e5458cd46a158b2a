"""Finds the lock file of an experiment: in its folder, or in a folder above it in the same git repository."""

from __future__ import annotations

from pathlib import Path

from stoker.core.git_repository import up_to_repository

PROJECT_LOCK = "uv.lock"
LOCKS = ("requirements.lock", PROJECT_LOCK, "requirements.txt")
"""Names of lock files; if a folder has several, the first name in this list is used."""


def find_lock(folder: Path) -> Path | None:
    """Return the lock file of a folder, or of the nearest folder above it in its repository; None if none has one."""
    paths = (each / name for each in up_to_repository(folder) for name in LOCKS)
    return next((path for path in paths if path.is_file()), None)
