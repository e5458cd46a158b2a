"""Where the lock of an experiment is: in its folder, or above it in its repository."""

from __future__ import annotations

from pathlib import Path

PROJECT_LOCK = "uv.lock"
LOCKS = ("requirements.lock", PROJECT_LOCK, "requirements.txt")
"""Names of locks; the first that exists in a folder counts."""

REPOSITORY = ".git"
"""In the root of a repository: a folder, or a file in further work trees."""


def find_lock(folder: Path) -> Path | None:
    """Return the lock of a folder, else that of the nearest one above it in its repository; None without one."""
    paths = (each / name for each in up_to_repository(folder) for name in LOCKS)
    return next((path for path in paths if path.is_file()), None)


def up_to_repository(folder: Path) -> list[Path]:
    """Return a folder and those above it up to its repository's root; alone where it is in no repository."""
    found = [folder.resolve(), *folder.resolve().parents]
    root = next((each for each in found if (each / REPOSITORY).exists()), found[0])
    return found[: found.index(root) + 1]
