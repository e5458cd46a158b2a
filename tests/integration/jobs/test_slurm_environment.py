"""Environments of locks and containers on a real Slurm: what starts the workers' Python."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.jobs.conftest import Counting
from tests.small_lock import PYTHON_FOLDER, small_lock, uv_folder

from stoker.jobs.job import Job, write_job
from stoker.jobs.places import add_to_index
from stoker.jobs.provider import Phase
from stoker.jobs.providers.slurm.container import Container
from stoker.jobs.providers.slurm.environment.maker import interpreter
from stoker.jobs.providers.slurm.provider import SlurmProvider
from stoker.jobs.providers.slurm.settings import SlurmTarget

OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)


@pytest.fixture(scope="module", autouse=True)
def uv(counting: Counting) -> Iterator[str]:
    """A line of `setup` that puts uv on the PATH, as it is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{uv_folder()}:{os.environ['PATH']}:{PYTHON_FOLDER}")
        patch.setenv("UV_CACHE_DIR", str(counting.runs / "cache"))
        yield f'export UV_CACHE_DIR="$place/../../cache" PATH={uv_folder()}:$PATH:{PYTHON_FOLDER}'


@pytest.fixture(scope="module", autouse=True)
def bereft(counting: Counting, uv: str) -> dict[str, Job]:
    """Jobs whose environment is removed before they start, one of them without uv on its machine."""
    setups = {"again": uv, "without-uv": "export PATH=/usr/bin:/bin HOME=/"}
    jobs = {name: locked(counting, name, f"# {name}") for name in setups}
    target = SlurmTarget(environment_from="lock", grace_s=20, sbatch=("--hold",))
    for name, job in jobs.items():
        submit(job, replace(target, setup=(setups[name],)))
        shutil.rmtree(Path(interpreter(job, target)).parents[1])
        counting.cluster.run("scontrol", "release", counting.state(job).scheduler_id)
    return jobs


def locked(counting: Counting, name: str, *lines: str) -> Job:
    """A job of an experiment with a lock, which differs by its lines."""
    job = counting.job(name, "5")
    folder = counting.runs.parent / f"experiment-{name}"
    small_lock(folder, *lines)
    found = replace(job, folder=folder)
    add_to_index(write_job(found))
    return found


def submit(job: Job, target: SlurmTarget) -> None:
    provider = SlurmProvider("test", target)
    provider.validate(job)
    provider.submit(job)


def prefix(job: Job, verb: str = "job-task", rank: int = 0) -> Path:
    """The environment in which a worker ran."""
    return Path((job.place / f"prefix-{verb}-{rank}").read_text())


def test_workers_run_in_the_environment_of_the_lock_or_in_a_copy_of_it(
    counting: Counting, tmp_path: Path
) -> None:
    target = SlurmTarget(environment_from="lock", nodes=1, grace_s=20)
    plain, copied, full = (locked(counting, name) for name in ("plain", "copied", "full"))
    submit(plain, target)
    local = {"TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    submit(copied, replace(target, environment_on_local_disk=True, environment=local))
    # /proc takes no files, as a full disk.
    nowhere = replace(target, environment_on_local_disk=True, environment={"TMPDIR": "/proc"})
    submit(full, nowhere)

    for job in (plain, copied, full):
        assert counting.wait(job, *OVER).phase is Phase.DONE, counting.log(job)
        counting.require_whole_count(job, 5)
        shared = Path(interpreter(job, target)).parents[1]
        assert prefix(job, "job-start") == shared
    assert prefix(plain) == prefix(plain, rank=1) == Path(interpreter(plain, target)).parents[1]
    shared = Path(interpreter(copied, target)).parents[1]
    copy = tmp_path / f"stoker-environments-{os.getuid()}" / shared.name
    assert prefix(copied) == prefix(copied, rank=1) == copy
    assert sorted(path.name for path in copy.parent.iterdir()) == [copy.name, f"{copy.name}.lock"]
    assert prefix(full) == Path(interpreter(full, target)).parents[1]
    assert "cannot be copied to /proc/stoker-environments" in counting.log(full)


def test_an_environment_that_is_gone_is_made_again_before_anything_trains(
    counting: Counting, bereft: dict[str, Job]
) -> None:
    again, without = bereft["again"], bereft["without-uv"]
    assert counting.wait(again, *OVER).phase is Phase.DONE
    counting.require_whole_count(again, 5)
    state = counting.wait(without, *OVER)
    assert (state.phase, state.restarts) == (Phase.FAILED, 0)
    assert state.reason.startswith("uv must be on the PATH of ")
    assert not (without.place / "incarnations").exists()


APPTAINER = """#!/bin/bash
# Replaces apptainer, which is not on this machine: it writes down its arguments and runs the command as it is.
echo "$@" >> "$(dirname "$0")/calls"
[ "$1" = exec ] && [ "$2" = --bind ] && [ -f "$4" ] || exit 255
IFS=, read -ra mounts <<< "$3"
for mount in "${mounts[@]}"; do [ -d "${mount%%:*}" ] || exit 255; done
shift 4
exec "$@"
"""
SRUN = """#!/bin/bash
# Replaces an srun with the plugin pyxis, which is not on this machine: it takes its options, and passes the rest to srun.
if [ "$1" = --help ]; then echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"; exit; fi
words=()
for word in "$@"; do
	case $word in
		--container-*) echo "$word" >> "$(dirname "$0")/calls" ;;
		*) words+=("$word") ;;
	esac
done
exec SRUN "${words[@]}"
"""


def stand_in(folder: Path, program: str, text: str) -> Path:
    """Write a program that replaces another one; the returned file gets its arguments."""
    folder.mkdir()
    (folder / program).write_text(text.replace("SRUN", str(shutil.which("srun"))))
    (folder / program).chmod(0o755)
    return folder / "calls"


def test_workers_run_in_a_container_by_the_runtime_of_the_target(
    counting: Counting, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    image, data = tmp_path / "image.sif", tmp_path / "data"
    image.touch()
    data.mkdir()
    calls = {
        "apptainer": stand_in(tmp_path / "apptainer", "apptainer", APPTAINER),
        "pyxis": stand_in(tmp_path / "pyxis", "srun", SRUN),
    }
    jobs = {}
    for runtime, found in calls.items():
        container = Container(image=str(image), runtime=runtime, mounts=(f"{data}:/in:ro",))  # type: ignore[arg-type]  # a string of a Literal
        path = f"export PATH={found.parent}:$PATH"
        for name, setup in ((runtime, (path,)), (f"no-{runtime}", ())):
            job = replace(counting.job(name, "5"), runs=runs, folder=tmp_path)
            add_to_index(write_job(job))
            jobs[name] = job
            python = str(counting.python)
            submit(job, SlurmTarget(container=container, python=python, setup=setup, grace_s=20))

    for runtime in calls:
        assert counting.wait(jobs[runtime], *OVER).phase is Phase.DONE, counting.log(jobs[runtime])
        counting.require_whole_count(jobs[runtime], 5)
        state = counting.wait(jobs[f"no-{runtime}"], *OVER)
        assert (state.phase, state.restarts) == (Phase.FAILED, 0)
        assert state.reason.startswith(("apptainer must be on", "srun must know --container"))
    mounts = f"{tmp_path}:{tmp_path},{data}:/in:ro"
    start, *workers = calls["apptainer"].read_text().splitlines()
    place = jobs["apptainer"].place
    assert start == f"exec --bind {mounts} {image} {counting.python} -m stoker job-start {place}"
    worker = f"{counting.python} -m stoker.jobs.providers.slurm.worker {place}/exits/1"
    assert len(workers) == 2
    assert workers[0].startswith(f"exec --bind {mounts} {image} {worker}")
    options = [f"--container-image={image}", f"--container-mounts={mounts}"]
    assert calls["pyxis"].read_text().splitlines() == options * 2
