"""Outputs that cannot be written: before training that is an error, while it runs it is none."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.cli.main import invoke
from stoker.core.errors import EXIT_DONE, EXIT_USER

from .conftest import Folder

IN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Nothing but ASCII can be printed."""


def train(folder: Folder, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "stoker", "train", str(folder.path), *arguments]


@pytest.mark.soak
def test_training_goes_on_without_a_reader_and_with_a_full_disk_of_logs(
    make_folder: Callable[[], Folder],
) -> None:
    """`LANG=C stoker train 2>LOG | true`, where LOG takes no byte more."""
    folder = make_folder()
    folder.run(until="transform")
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full, os.fdopen(writer, "w") as pipe:
        done = subprocess.run(train(folder), stdout=pipe, stderr=full, env=os.environ | IN_C)

    assert done.returncode == EXIT_DONE
    (record,) = folder.path.glob("runs/*/*/stages/train.json")
    assert json.loads(record.read_text())["result"]["epochs"] == 2


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that is mounted read-only."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    commands = [["mount", "--bind", str(folder), str(folder)]]
    commands += [["mount", "-o", "remount,bind,ro", str(folder)]]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_read_only_folder_is_an_error_in_the_first_second(
    make_folder: Callable[[], Folder], read_only: Path
) -> None:
    folder = make_folder()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        train(folder, "--set", f"runs={read_only / 'runs'}"), capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    assert done.returncode == EXIT_USER
    assert done.stdout == ""
    (line,) = filter(None, done.stderr.splitlines())
    assert "must be a folder that can be written. Received: Read-only file system." in line
    # TensorFlow alone would take longer to import; the rest is Python's and pyarrow's own start.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0


def test_a_run_in_a_read_only_folder_is_not_continued(
    make_folder: Callable[[], Folder], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder()
    result, _ = folder.run(until="ingest")
    runs = folder.path / "runs"
    for command in (["--bind", str(runs), str(runs)], ["-o", "remount,bind,ro", str(runs)]):
        done = subprocess.run(["mount", *command], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        code = invoke(["train", str(folder.path)], debug=False)
    finally:
        subprocess.run(["umount", "--lazy", str(runs)], check=True)

    error = capfd.readouterr().err
    assert code == EXIT_USER, error
    assert "can be written. Received: Read-only file system." in error
    assert "ingest" not in error
    assert result.run.is_dir()
