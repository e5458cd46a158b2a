"""The files of a submission on their way to a login node."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stoker.jobs.job import Job

SEND = """place=$1; shift
umask 022
new=$place/.new.$$
trap 'rm -rf "$new"' EXIT
mkdir -p "$place/logs" "$new" && tar -x -f - -C "$new" && cd "$place" && rm -f "$@" && mv -f "$new"/* .; exit
"""
"""Script on the login node: folder of the job, files to remove; a tar follows, so the last line is
what reads it. A file there is the old or the new one."""

DESCRIPTION = "job.json"
RUNS = "runs"


def twin(job: Job, folder: Path) -> Job:
    """Return a job as it is on a cluster that does not share this machine's file system.

    Paths of data in stoker.yaml are relative to its folder there, `FOLDER/NAME`.

    Args:
        job: The job of this machine.
        folder: Folder of all experiments on the cluster.
    """
    own = folder / job.name
    return replace(job, folder=own, runs=own / RUNS)


def described(job: Job) -> bytes:
    """Return the description of a job, as its folder has it."""
    return f"{json.dumps(job.to_json(), indent=1)}\n".encode()


def packed(files: Mapping[str, bytes]) -> bytes:
    """Return a tar of files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
