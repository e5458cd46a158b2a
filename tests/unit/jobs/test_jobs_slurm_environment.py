"""Environments of locks, made by the real uv from a small wheel; Slurm is not needed for that."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.slurm_cluster import wait_until
from tests.small_lock import PYTHON_FOLDER, small_lock, uv_folder

import stoker
from stoker.core.errors import ConfigError, UserError
from stoker.jobs.job import Job, write_job
from stoker.jobs.providers.slurm.environment.lock import read_lock
from stoker.jobs.providers.slurm.environment.maker import (
    MAKER,
    environment_files,
    interpreter,
    make_environment,
    require_maker,
)
from stoker.jobs.providers.slurm.machine import Here
from stoker.jobs.providers.slurm.settings import SlurmTarget

TARGET = SlurmTarget(environment_from="lock")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
HASH = "--hash=sha256:" + "0" * 64


@pytest.fixture
def counted_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real uv behind a script that notes each call, and waits as long as there is a file `wait`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "uv"
    program.write_text(
        f'#!/bin/bash\necho "$1 $2" >> {folder}/calls\n'
        f'{uv_folder()}/uv "$@" || exit\nwhile [ -e {folder}/wait ]; do sleep 0.1; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}:{PYTHON_FOLDER}")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def locked(job: Job, tmp_path: Path) -> Job:
    """A job of an experiment with a lock."""
    folder = tmp_path / "experiment of O'Neil"
    small_lock(folder.parent / "wheels")
    folder.mkdir()
    (folder.parent / "wheels" / "requirements.lock").rename(folder / "requirements.lock")
    found = replace(job, folder=folder)
    write_job(found)
    return found


def make(job: Job, target: SlurmTarget = TARGET) -> None:
    """Make the environment of a job as a submission does."""
    for name, content in environment_files(job.folder, target).items():
        (job.place / name).write_bytes(content)
    make_environment(job.place, interpreter(job, target), target, Here())


def environments(job: Job) -> list[str]:
    """What lies next to the environments, without their locks."""
    return [path.name for path in (job.runs / ".environments").iterdir() if path.suffix != ".lock"]


def test_two_jobs_at_once_make_one_environment(locked: Job, counted_uv: Path) -> None:
    other = replace(locked, labels={"second": "yes"})
    write_job(other)
    (counted_uv / "wait").touch()
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(make, each) for each in (locked, other)]
        wait_until((counted_uv / "calls").exists, "call of uv")
        time.sleep(0.5)  # the second one comes to the lock, which cannot be seen
        (counted_uv / "wait").unlink()
        for each in both:
            each.result()

    python = interpreter(locked, TARGET)
    assert python == interpreter(other, TARGET)
    assert environments(locked) == [Path(python).parents[1].name]
    assert (counted_uv / "calls").read_text().split("\n")[:-1] == ["venv --quiet", "pip sync"]
    code = "import sys, stoker; print(stoker.__file__.startswith(sys.prefix))"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_maker_that_is_killed_leaves_nothing_half_made(locked: Job, counted_uv: Path) -> None:
    python = interpreter(locked, TARGET)
    (counted_uv / "wait").touch()
    lock = str(locked.folder / "requirements.lock")
    words = [str(Path(python).parents[1]), VERSION, stoker.__version__, lock]
    maker = subprocess.Popen(["bash", str(MAKER), *words], start_new_session=True)
    calls = counted_uv / "calls"
    left = (locked.runs / ".environments").glob
    wait_until(lambda: list(left("*.partial.*/bin/python")), "half an environment")
    os.killpg(maker.pid, signal.SIGKILL)
    maker.wait()
    (counted_uv / "wait").unlink()

    assert not Path(python).exists()
    assert len(environments(locked)) >= 1, "what it left"
    make(locked)
    assert environments(locked) == [Path(python).parents[1].name]
    calls.unlink()
    make(locked)
    assert not calls.exists(), "it is there already"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"missing==1.0 {HASH}", "missing was not found"),
        (f"stoker-extra @ file:///nowhere/x-1.0-py3-none-any.whl {HASH}", "uv cannot install"),
    ],
)
def test_a_lock_that_does_not_resolve_is_one_line(
    locked: Job, counted_uv: Path, line: str, words: str
) -> None:
    with (locked.folder / "requirements.lock").open("a") as stream:
        stream.write(f"{line}\n")

    with pytest.raises(UserError) as caught:
        make(locked)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert environments(locked) == []


@pytest.mark.parametrize("kib", [8, 72])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    locked: Job, counted_uv: Path, small_disk: Path, kib: int
) -> None:
    left = shutil.disk_usage(small_disk).free - 1024 * kib
    (small_disk / "other").write_bytes(bytes(left))
    target = replace(TARGET, environments_folder=str(small_disk / "made"))

    with pytest.raises(UserError, match=r"a disk is full: that of .*/made, or of the cache of uv"):
        make(locked, target)

    assert [path.suffix for path in (small_disk / "made").iterdir()] == [".lock"]


def test_a_wheel_with_another_hash_and_a_python_that_is_not_there_are_one_line(
    locked: Job, counted_uv: Path
) -> None:
    with pytest.raises(UserError, match=r"with Python 3\.99:.* No interpreter found"):
        make(locked, replace(TARGET, python="3.99"))
    lock = locked.folder / "requirements.lock"
    lock.write_text(f"{lock.read_text().partition(' --hash')[0]} {HASH}\n")
    with pytest.raises(UserError, match=r"uv cannot install the lock: .*[Hh]ash mismatch"):
        make(locked)
    assert environments(locked) == []


def test_without_uv_it_is_one_line_before_anything_is_written(
    locked: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only-bash").mkdir()
    (tmp_path / "only-bash" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "only-bash"))
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(UserError, match=r"uv must be on the PATH of .*pip install uv"):
        require_maker(interpreter(locked, TARGET), TARGET, Here())
    assert not (locked.runs / ".environments").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must contain stoker=="),
        (f"numpy==2.2.0 {HASH}", "must contain stoker=="),
        (f"stoker==9.9.9 {HASH}", "Received: stoker==9.9.9. Submit with Stoker 9.9.9"),
        (f"stoker @ https://w/stoker-9.9.9-py3-none-any.whl {HASH}", "Received: stoker==9.9.9"),
        ("stoker==0.1.0", "have a hash for each package"),
        ("-r other.txt", "name all packages itself"),
        ("--find-links wheels", "absolute paths or URLs"),
        (f"=== {HASH}", "consist of requirements"),
    ],
)
def test_a_lock_that_cannot_be_the_jobs_is_one_line(job: Job, text: str, words: str) -> None:
    (job.folder / "requirements.txt").write_text(f"# by hand\n{text}\n")

    with pytest.raises(ConfigError) as caught:
        interpreter(job, TARGET)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_lock_is_looked_for_up_to_the_root_of_the_repository(locked: Job, tmp_path: Path) -> None:
    outside = tmp_path / "requirements.txt"
    outside.write_text("not locked\n")
    repository = tmp_path / "repository"
    folder = repository / "models" / "trip"
    folder.mkdir(parents=True)
    names = "Received: none of requirements.lock, uv.lock, requirements.txt. "
    with pytest.raises(ConfigError) as caught:
        read_lock(folder)
    assert str(caught.value).startswith(f"{folder} must have a lock"), "it is in no repository"

    (repository / ".git").write_text("gitdir: elsewhere\n")
    with pytest.raises(ConfigError) as caught:
        read_lock(folder)
    assert str(caught.value).startswith(f"{folder} or a folder above it up to {repository} must")
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)

    lock = repository / "requirements.lock"
    lock.write_text((locked.folder / "requirements.lock").read_text())
    assert read_lock(folder).path == lock
    (folder / "requirements.txt").write_text(lock.read_text())
    assert read_lock(folder).path == folder / "requirements.txt", "the nearest folder counts"


def test_the_lock_of_a_workspace_is_that_of_each_project_in_it(
    locked: Job, counted_uv: Path
) -> None:
    wheels = locked.folder.parent / "wheels"
    root = locked.folder.parent / "workspace"
    for name, requires in (("trip", f"stoker=={stoker.__version__}"), ("other", "trip")):
        (root / name).mkdir(parents=True)
        (root / name / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "1"\nrequires-python = ">=3.11"\n'
            f'dependencies = ["{requires}"]\n'
        )
    (root / ".git").mkdir()
    (root / "pyproject.toml").write_text(
        '[tool.uv.workspace]\nmembers = ["trip", "other"]\n[tool.uv.sources]\n'
        f'stoker = {{path = "../wheels/stoker-{stoker.__version__}-py3-none-any.whl"}}\n'
        "trip = {workspace = true}\n"
    )
    subprocess.run(["uv", "lock", "--quiet"], cwd=root, check=True)

    lock = read_lock(root / "trip")

    assert lock.path == root / "uv.lock"
    assert f"{wheels.resolve().as_uri()}/stoker-" in lock.text
    assert not [line for line in lock.text.splitlines() if line.startswith((".", "-e"))]


def test_lines_may_be_continued_and_the_first_of_the_locks_counts(job: Job) -> None:
    (job.folder / "requirements.txt").write_text("unlocked\n")
    text = f"stoker=={stoker.__version__} \\\n    {HASH} \\\n    {HASH}\n    # via -r in.txt\n"
    (job.folder / "requirements.lock").write_text(text)

    assert read_lock(job.folder).path.name == "requirements.lock"


def test_a_project_of_uv_is_exported_without_the_project(locked: Job, counted_uv: Path) -> None:
    (locked.folder / "requirements.lock").unlink()
    wheel = locked.folder.parent / "wheels" / f"stoker-{stoker.__version__}-py3-none-any.whl"
    simple = wheel.parent / "simple" / "stoker"
    simple.mkdir(parents=True)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    link = f'<a href="{wheel.as_uri()}#sha256={digest}">{wheel.name}</a>'
    (simple / "index.html").write_text(link)
    (locked.folder / "pyproject.toml").write_text(
        '[project]\nname = "trip"\nversion = "1"\nrequires-python = ">=3.11"\n'
        f'dependencies = ["stoker=={stoker.__version__}"]\n'
        f'[[tool.uv.index]]\nurl = "{wheel.parent.as_uri()}/simple"\ndefault = true\n'
    )
    subprocess.run(["uv", "lock", "--quiet"], cwd=locked.folder, check=True)

    lock = read_lock(locked.folder)

    assert "trip==" not in lock.text
    make(locked)
    assert Path(interpreter(locked, TARGET)).exists()
    (locked.folder / "uv.lock").write_text("version = 1\n[[package]\n")
    with pytest.raises(ConfigError, match=r"uv\.lock must be a lock that uv can export"):
        read_lock(locked.folder)


def test_what_a_lock_installs_as_stoker_is_looked_at(locked: Job, counted_uv: Path) -> None:
    """A wheel may have another version inside than its name says."""
    python = interpreter(locked, TARGET)
    words = [str(Path(python).parents[1]), VERSION, "9.9.9"]
    lock = str(locked.folder / "requirements.lock")

    done = subprocess.run(
        ["bash", str(MAKER), *words, lock], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    said = (
        f"the lock must contain stoker==9.9.9, which submitted the job; it has {stoker.__version__}"
    )
    assert done.stdout == f"{said}\n"
    assert environments(locked) == []
