"""A job's folder as a submission leaves it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from stoker.jobs.job import Job, Resources, write_job


def submitted(
    experiment: Path,
    runs: Path,
    *command: str,
    workers: int = 1,
    gpus: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
    secrets: tuple[str, ...] = (),
) -> Path:
    """Write the job's folder of one command of an experiment, with its code, and return the folder."""
    code = {
        f"experiment/{path.name}": path.read_bytes()
        for path in sorted(experiment.iterdir())
        if path.suffix in (".py", ".yaml")
    }
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in code.items()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in ({"files.json": json.dumps(hashes).encode()} | code).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    job = Job(
        name=experiment.name,
        command=command,
        folder=experiment.resolve(),
        runs=runs.resolve(),
        code=hashlib.sha256(packed.getvalue()).hexdigest(),
        resources=Resources(workers=workers, gpus=gpus),
        environment=dict(environment),
        secrets=secrets,
    )
    place = write_job(job)
    (place / "code.tar.gz").write_bytes(packed.getvalue())
    return place
