"""Find the folder on this machine in which files of a store are cached."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.core.incarnation import VARIABLE
from stoker.data.sources.config import IngestConfig

NODE_LOCAL = ("SLURM_TMPDIR", "TMPDIR")
"""Environment variables that name a folder on the local disk of a job's machine; the first that is set is used."""


def cache_folder(config: IngestConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """Return `data.cache_dir`; without it, in a job a folder on the local disk, else the user's cache folder.

    In a job, the user's home is often on a file system that all machines share.

    Args:
        config: Has the setting `cache_dir`.
        environ: Environment of this process.

    Raises:
        UserError: the folder on a job's local disk belongs to a different user.
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
            f"{folder} must belong to the user who runs the job",
            got=Plain(f"a folder of user {folder.stat().st_uid}"),
            fix="Set a different folder with --set data.cache_dir=DIR.",
        )
    return folder
