"""A job's code on this machine: unpacked once, verified, and shared by all tasks of the machine."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import DataError, Plain
from stoker.core.files import alone, publish_folder, scratch_folder, sha256_file, writable

ARCHIVE = "code.tar.gz"
"""File with the code, in the job's folder: folders `experiment` and `packages`."""

LOCAL = ("SLURM_TMPDIR", "TMPDIR")
"""Environment variables that name a folder on the machine's own disk; the first that is set counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCode:
    """The unpacked code of a job."""

    experiment: Path
    """The experiment's folder."""

    packages: Path
    """For `PYTHONPATH`; it may not exist."""


def local_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of unpacked code on this machine's own disk; each user has one."""
    names = (environ[name] for name in LOCAL if environ.get(name))
    return Path(next(names, "/tmp")) / f"stoker-code-{os.getuid()}"  # noqa: S108 - its owner is checked


def unpack_code(place: Path, digest: str, environ: Mapping[str, str]) -> JobCode:
    """Unpack a job's code once per machine.

    Args:
        place: The job's folder.
        digest: SHA-256 of the archive, hexadecimal.
        environ: Names the folder on the machine's own disk.

    Raises:
        DataError: the archive is gone or damaged.
        UserError: the local disk is full, or the folder on it belongs to another user.
    """
    into = local_folder(environ)
    final = into / digest
    fix = "Free some space there, or name another folder of the machine's own disk: TMPDIR."
    with writable(into, what="the folder of unpacked code", fix=fix):
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        if into.stat().st_uid != os.getuid():
            raise PermissionError(1, "it belongs to another user")
        with alone(into / f".{digest}.lock"):
            if not final.is_dir():
                _require_whole(place / ARCHIVE, digest)
                with scratch_folder(final) as made:
                    _extract(place / ARCHIVE, made)
                    publish_folder(made, final)
    return JobCode(experiment=final / "experiment", packages=final / "packages")


def _require_whole(archive: Path, digest: str) -> None:
    try:
        found = sha256_file(archive)
    except FileNotFoundError:
        raise _damaged(archive, "no such file") from None
    if found != digest:
        raise _damaged(archive, f"its SHA-256 is {found[:12]}..., not {digest[:12]}...")


def _extract(archive: Path, into: Path) -> None:
    try:
        with tarfile.open(archive, "r:gz") as packed:
            # The filter refuses links and names that lead out of the folder.
            packed.extractall(into, filter="data")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise _damaged(archive, str(error)) from None


def _damaged(archive: Path, why: str) -> DataError:
    return DataError(
        f"{archive} must be the code that was submitted",
        got=Plain(why),
        fix="Submit the experiment again.",
    )
