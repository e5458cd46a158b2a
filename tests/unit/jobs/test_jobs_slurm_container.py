"""Containers in the script of a job on Slurm, as text."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from stoker.core.config import build
from stoker.core.errors import ConfigError
from stoker.jobs.job import Job, Resources
from stoker.jobs.providers.slurm.container import Container
from stoker.jobs.providers.slurm.script import render
from stoker.jobs.providers.slurm.settings import SlurmTarget


def job(runs: Path, *, gpus: int = 0) -> Job:
    return Job(
        name="trip",
        command=("train",),
        folder=Path("/home/me/trip"),
        runs=runs,
        code="0" * 64,
        resources=Resources(gpus=gpus),
    )


@pytest.mark.parametrize(
    ("runtime", "gpus", "starter", "launcher", "step"),
    [
        ("apptainer", 0, "apptainer exec --bind {}", "apptainer exec --bind {}", ""),
        ("apptainer", 2, "apptainer exec --nv --bind {}", "apptainer exec --nv --bind {}", ""),
        ("pyxis", 2, "srun --ntasks=1 --nodes=1 --input=none --mpi=none {}", "", " {}"),
    ],
)
def test_the_script_starts_workers_in_the_container(
    runtime: str, gpus: int, starter: str, launcher: str, step: str
) -> None:
    container = Container(image="img $x", runtime=runtime, mounts=("/data",))  # type: ignore[arg-type]  # a string of a Literal
    wanted = job(Path("/home/me/trip/runs"), gpus=gpus)
    script = render(wanted, SlurmTarget(container=container))

    mounts = "/home/me/trip:/home/me/trip,/data:/data"
    words = {
        "apptainer": f"{mounts} 'img $x'",
        "pyxis": f"'--container-image=img $x' --container-mounts={mounts}",
    }[runtime]
    assert f"\nstarter=({starter.format(words)})\n" in script
    assert f"\nlauncher=({launcher.format(words)})\n" in script
    assert f'\nstep=("--ntasks=$workers" {step.format(words).strip()})\n' in script
    assert "\npython=python\n" in script
    assert render(wanted, SlurmTarget()).count("container") == 0
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_folder_that_cannot_be_mounted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no spaces, commas or colons.*--set runs=DIR"):
        render(job(Path("/a b")), SlurmTarget(container=Container(image="x", runtime="pyxis")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"container": {"image": "", "runtime": "pyxis"}}, "image must be the name"),
        (
            {"container": {"image": "a", "runtime": "docker"}},
            r"runtime must be one of: pyxis, apptainer\. Received: 'docker'",
        ),
        ({"container": {"image": "a", "runtime": "pyxis", "mounts": ["data"]}}, "/FROM:/TO"),
        ({"container": {"image": "a", "runtime": "pyxis", "mounts": ["/a:/b:/c"]}}, "/FROM:/TO"),
        ({"container": {"runtime": "pyxis"}}, "container.image must be given"),
        (
            {"container": {"image": "a", "runtime": "pyxis"}, "environment_from": "lock"},
            "environment_from must be python if the target has a container",
        ),
        ({"environments_folder": "envs"}, "environments_folder must be an absolute path"),
        ({"environment_on_local_disk": True}, "needs environment_from: lock"),
    ],
)
def test_settings_of_the_environment_that_mean_nothing_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(SlurmTarget, settings)
