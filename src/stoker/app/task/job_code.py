"""Unpacks a job's code, once per machine; all tasks on the machine share the folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stoker.jobs.archive import CODE, Code, unpack

LOCAL = ("SLURM_TMPDIR", "TMPDIR")
"""Environment variables that can name a folder on the machine's local disk; the first one that is set is used."""


def local_folder(environ: Mapping[str, str]) -> Path:
    """Return the current user's folder for unpacked code on this machine's local disk."""
    names = (environ[name] for name in LOCAL if environ.get(name))
    return Path(next(names, "/tmp")) / f"stoker-code-{os.getuid()}"  # noqa: S108 - its owner is checked


def unpack_code(place: Path, digest: str, environ: Mapping[str, str]) -> Code:
    """Unpack a job's code once per machine.

    Args:
        place: The job's folder.
        digest: SHA-256 of the archive, hexadecimal.
        environ: Environment variables; see `LOCAL`.

    Raises:
        DataError: the archive is gone or damaged.
        UserError: the local disk is full, or the folder on it belongs to another user.
    """
    return unpack(place / CODE, digest, into=local_folder(environ))
