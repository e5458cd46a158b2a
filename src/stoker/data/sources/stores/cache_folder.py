"""The folder for a store's files on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.core.incarnation import VARIABLE
from stoker.data.sources.config import IngestConfig

NODE_LOCAL = ("SLURM_TMPDIR", "TMPDIR")
"""Environment variables that name a folder on a job machine's local disk; the first one that is set counts."""


def cache_folder(config: IngestConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """Return `data.cache_dir`; else in a job a folder on the machine's local disk; else the user's cache folder.

    In a job the user's home is often a file system that all machines share.

    Args:
        config: May name the folder.
        environ: Environment of this process.

    Raises:
        UserError: in a job: the folder belongs to another user.
    """
    if config.cache_dir is not None:
        return config.cache_dir.expanduser().absolute()
    local = [environ[name] for name in NODE_LOCAL if environ.get(name)]
    if environ.get(VARIABLE) and local:
        return _own(Path(local[0]).absolute() / f"stoker-cache-{os.geteuid()}")
    home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).expanduser().absolute() / "stoker"


def _own(folder: Path) -> Path:
    if folder.exists() and folder.stat().st_uid != os.geteuid():
        raise UserError(
            f"{folder} must belong to the user whose job it is",
            got=Plain(f"it belongs to user {folder.stat().st_uid}"),
            fix="Name another folder with --set data.cache_dir=DIR.",
        )
    return folder
