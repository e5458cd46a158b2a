"""kill -9 at any stage: the next `stoker run` goes on and ends as if nothing had happened."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.train.killed import TIMEOUT_S, Trainer

from stoker.train.checkpoints.store import STATE, best

from .conftest import Folder


def kill_when(trainer: Trainer, process: int, happened: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not happened():
        assert Path(f"/proc/{process}").exists(), trainer.said()
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    assert trainer.end() == -signal.SIGKILL, trainer.said()


def seen_below(runs: Path, pattern: str) -> bool:
    return any(runs.glob(f"*/{pattern}"))


MOMENTS = [
    "stages/ingest.json",  # between two stages
    ".transform.*.tmp",  # while a stage writes its hidden folder
    "train/checkpoints/step-*/manifest.json",  # in the middle of training
    "model/saved_model.pb",  # just published, its record perhaps not yet written
    ".evaluation.*.tmp",
]


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_weights_and_answers(
    make_folder: Callable[[], Any], finished: Folder, trainer: Trainer, tmp_path: Path
) -> None:
    folder = make_folder()
    shutil.copytree(finished.path, tmp_path / "undisturbed")
    undisturbed, _ = Folder(tmp_path / "undisturbed").run()
    runs = folder.path / "runs" / "small"
    for pattern in MOMENTS:
        process = trainer.start(folder.path, runs.parent, verb="push")
        kill_when(trainer, process, functools.partial(seen_below, runs, pattern))

    result, seen = folder.run()

    assert len(list(runs.glob("[!.]*"))) == 1, "every start went on with the one unfinished run"
    assert "ingest" not in seen.worked
    assert "transform" not in seen.worked
    assert not list(result.run.glob(".*.tmp"))
    killed = best(result.output("train") / "checkpoints").manifest.hashes[STATE]
    assert killed == best(undisturbed.output("train") / "checkpoints").manifest.hashes[STATE]
    assert result.results["evaluate"]["metrics"] == undisturbed.results["evaluate"]["metrics"]
    versions = [p for p in (folder.path / "models" / "small").iterdir() if p.name.isdigit()]
    assert [p.name for p in versions] == ["1"]


STEP = os.environ.get("STOKER_KILL_STEP", "7")
"""Every so many calls is one at which a run is killed."""

EVERY_CALL = """
import os, shutil, sys
from pathlib import Path

from stoker.app.chain import run_chain
from stoker.app.experiment import load_experiment

sys.path.insert(0, sys.argv[3])
from conftest import Recorder

CALLS = ["rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "chmod"]
REAL = {name: getattr(os, name) for name in CALLS}


def child(path, fatal):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seen = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == fatal:
                os._exit(9)
            return real(*args, **kwargs)
        return call

    for name in CALLS:
        setattr(os, name, counted(REAL[name]))
    try:
        run_chain(load_experiment(path), Recorder(), until="ingest")
    except BaseException as error:
        print(fatal, repr(error), flush=True)
        os._exit(1)
    os._exit(0)


template = Path(sys.argv[1])
for fatal in range(1, 1000, int(sys.argv[2])):
    path = template.parent / f"killed-{fatal}"
    shutil.copytree(template, path)
    code = child(path, fatal)
    if code == 0:
        break
    assert code == 9, (fatal, code)
    result = run_chain(load_experiment(path), Recorder(), until="ingest")
    assert result.results["ingest"]["rows"], fatal
    runs = list((path / "runs" / "small").glob("[!.]*"))
    assert len(runs) == 1, (fatal, runs)
    left = [p for p in path.rglob(".*.tmp") if p.is_file() or list(p.iterdir())]
    assert not left, (fatal, left)
print("calls", fatal - 1)
"""


def test_a_kill_at_any_publishing_system_call_leaves_one_run_that_continues(
    make_folder: Callable[[], Any], trainer: Trainer, tmp_path: Path
) -> None:
    """Through prepare, the run's folder, the shards and the record of ingest.

    At every seventh call; `make soak` takes each of them.
    """
    folder = make_folder()
    folder.edit("stoker.yaml", "source: data.csv", "source: made.csv, prepare: prepare:copy")
    (folder.path / "prepare.py").write_text(
        "import shutil\nfrom pathlib import Path\n\n\ndef copy(path):\n"
        "    shutil.copy(Path(__file__).parent / 'data.csv', path)\n"
    )

    script = tmp_path / "every_call.py"
    script.write_text(EVERY_CALL)

    printed = trainer.script(script, folder.path, STEP, Path(__file__).parent)

    assert int(printed.split()[-1]) > 30


def test_a_full_disk_is_reported_and_the_run_continues_once_there_is_room(
    make_folder: Callable[[], Any], tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        folder = make_folder()
        from stoker.core.errors import UserError

        with pytest.raises(UserError, match="must have room for it"):
            folder.run(f"runs={disk}", until="analyze")
        assert not list(disk.glob("small/*/stages/analyze.json"))
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        result, _ = folder.run(f"runs={disk}", until="analyze")
        assert (result.output("analyze") / "report.html").is_file()
        assert len(list((disk / "small").glob("[!.]*"))) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)
