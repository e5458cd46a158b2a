"""Transfers the files of a submission to a login node."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stoker.jobs.archive import CODE
from stoker.jobs.job import Job
from stoker.jobs.provider import Array

SEND = """{
	jobs=$1; shift
	umask 022
	new=$jobs/.new.$$
	trap 'rm -rf "$new"' EXIT
	mkdir -p "$new" && tar -x -f - -C "$new" || exit
	for place in "$new"/*; do
		name=${place##*/}
		mkdir -p "$jobs/$name/logs" && cd "$jobs/$name" && rm -f "$@" && mv -f "$place"/* . || exit
	done
	exit
}
"""
"""Script that runs on the login node. Its arguments are the folder of all jobs, and the files to remove from the
folders of the sent jobs. A tar archive with a folder for each job follows the script on the same input, so the braces
make bash read the whole script before it runs. Readers see either the old file or the new file."""

DESCRIPTION = "job.json"
RUNS = "runs"


def twin(job: Job, folder: Path) -> Job:
    """Return a job with its paths on a cluster that does not share this machine's file system.

    On the cluster, paths of data in stoker.yaml are relative to the folder `FOLDER/NAME`.

    Args:
        job: The job with its paths on this machine.
        folder: Folder of all experiments on the cluster.
    """
    own = folder / job.name
    return replace(job, folder=own, runs=own / RUNS)


def described(job: Job) -> bytes:
    """Return the description of a job, as bytes of the file `job.json`."""
    return f"{json.dumps(job.to_json(), indent=1)}\n".encode()


def files_of_job(job: Job, there: Job, names: Sequence[str]) -> dict[str, bytes | Path]:
    """Return the files of a job, including its description, in the form for `packed`.

    Args:
        job: The job with its paths on this machine.
        there: The job with its paths on the cluster.
        names: Names of files in the job's folder.
    """
    place = there.place.name
    contents = {f"{place}/{name}": (job.place / name).read_bytes() for name in names}
    return {**contents, f"{place}/{DESCRIPTION}": described(there)}


def files_of_array(
    array: Array, there: Array, names: Sequence[str], *, of_all: Sequence[str]
) -> dict[str, bytes | Path]:
    """Return the files of an array and its jobs for `packed`, with a single copy of the code and links to it.

    Args:
        array: The array with its paths on this machine.
        there: The array with its paths on the cluster.
        names: Names of files in the folder of each job.
        of_all: Names of files in the folder of the array.
    """
    files: dict[str, bytes | Path] = {
        f"{array.id}/{name}": (array.place / name).read_bytes() for name in (*of_all, CODE)
    }
    for number, job in array.jobs.items():
        place = there.jobs[number].place.name
        files |= files_of_job(job, there.jobs[number], names)
        files[f"{place}/{CODE}"] = Path("..") / array.id / CODE
        files[f"{array.id}/{number}"] = Path("..") / place
    return files


def packed(files: Mapping[str, bytes | Path]) -> bytes:
    """Return a tar archive; bytes become a file, and a path becomes a symbolic link to it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, Path):
                info.type, info.linkname = tarfile.SYMTYPE, str(content)
                tar.addfile(info)
                continue
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
