"""Where the lock of an experiment is: in its folder, or above it in its repository."""

from __future__ import annotations

from pathlib import Path

from stoker.core.git_repository import up_to_repository

PROJECT_LOCK = "uv.lock"
LOCKS = ("requirements.lock", PROJECT_LOCK, "requirements.txt")
"""Names of locks; the first that exists in a folder counts."""


def find_lock(folder: Path) -> Path | None:
    """Return the lock of a folder, else that of the nearest one above it in its repository; None without one."""
    paths = (each / name for each in up_to_repository(folder) for name in LOCKS)
    return next((path for path in paths if path.is_file()), None)
