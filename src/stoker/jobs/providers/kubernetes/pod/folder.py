"""Prepares the job's folder in a pod: description and code are copied if the volume does not have them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from stoker.core.errors import ConfigError, Plain
from stoker.core.files import writable, write_atomic
from stoker.jobs.archive import CODE, HASHES
from stoker.jobs.code_store import BUCKETS, fetch_code
from stoker.jobs.job import Job, read_job
from stoker.jobs.providers.kubernetes.pod.git import code_of_commit

DESCRIPTION = "job.json"


def prepare_folder(place: Path, *, mounted: Path, code_from: str = "") -> Job:
    """Complete the job's folder, and return the job that it describes.

    The submitting machine has written the folder if that machine has the volume of the runs. Otherwise the first pods
    write it.

    Args:
        place: The job's folder.
        mounted: Path of the mounted ConfigMap, if the job has one.
        code_from: A git commit or a bucket's folder; empty: the code is on the volume or in the ConfigMap.

    Raises:
        ConfigError: neither the volume nor the ConfigMap has the job's description or its code.
        UserError: the folder cannot be written.
    """
    with writable(place.parent, what="the folder of runs", fix=_FIX):
        place.mkdir(parents=True, exist_ok=True)
        _complete(place / DESCRIPTION, mounted / DESCRIPTION)
        job = read_job(place)
        if _digest(place / CODE) != job.code:
            if code_from.startswith(BUCKETS):
                write_atomic(place / CODE, fetch_code(code_from, job.code))
            elif code_from:
                hashes = json.loads((mounted / HASHES).read_bytes())
                write_atomic(place / CODE, code_of_commit(code_from, hashes))
            else:
                _complete(place / CODE, mounted / CODE, replaces=True)
    return job


_FIX = "Pods must be able to write to the volume of the runs: see run_as_user and fs_group of the target."


def _complete(path: Path, source: Path, *, replaces: bool = False) -> None:
    if path.is_file() and not replaces:
        return
    if not source.is_file():
        raise ConfigError(
            f"the pods must find {path}",
            got=Plain("neither the volume of the runs nor a ConfigMap has it"),
            fix="Submit from a machine that sees the volume at the same path, or make the code smaller "
            "than 900 KiB, so that it fits into a ConfigMap.",
        )
    write_atomic(path, source.read_bytes())


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
