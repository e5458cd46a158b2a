"""The git repository of a folder, read without git."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = ".git"
"""Name of git's data in the root of a repository: a folder; in an additional work tree, a file."""

_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def up_to_repository(folder: Path) -> list[Path]:
    """Return a folder and its parents up to the root of its repository; without a repository, the folder alone."""
    found = [folder.resolve(), *folder.resolve().parents]
    root = next((each for each in found if (each / REPOSITORY).exists()), found[0])
    return found[: found.index(root) + 1]


def git_commit(folder: Path) -> str:
    """Return the checked-out commit of a folder's repository; "" if there is no repository or no commit."""
    *_, root = up_to_repository(folder)
    try:
        return _head(root / REPOSITORY)
    except (OSError, ValueError):
        return ""


def _head(git: Path) -> str:
    if git.is_file():
        # In an additional work tree or a submodule, `.git` is a file with the line `gitdir: PATH`.
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
