"""`stoker train --workers N`: several processes train one experiment, and one of them dies."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from tests.job_folder import submitted

from stoker.app.experiment import Experiment, load_experiment
from stoker.app.task.job_start import start_job
from stoker.cli.main import invoke
from stoker.core.config import build
from stoker.core.files import hash_folder

HANG_S = 600.0
"""Longest wait for a process: it ends one that hangs, not one on a slow machine."""

STOKER_YAML = """\
name: pair
data: {source: data.csv, split_by: id}
model: model:build
label: bought
train:
  epochs: 4
  batch_size: 16
  steps_per_call: 4
  deterministic: true
  callbacks: model:callbacks
  checkpoint: {every_steps: 4}
"""

MODEL_PY = """\
import os
import signal
import time
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers


def wait(values):
    # The second worker computes so much longer.
    slow = os.environ.get("STOKER_RANK") == "1"
    time.sleep(float(os.environ["SLOW_S"]) if slow else 0)
    return values


class Slow(layers.Layer):
    def call(self, inputs):
        waited = tf.ensure_shape(tf.numpy_function(wait, [inputs], inputs.dtype), inputs.shape)
        return inputs + 0.0 * tf.stop_gradient(waited)


def build(features):
    x = layers.Concatenate()([keras.ops.expand_dims(features[n], -1) for n in ("age", "spent")])
    x = x / 50.0
    if "SLOW_S" in os.environ:  # a server does not take what calls Python
        x = Slow()(x)
    x = layers.Dropout(0.2)(layers.Dense(8, activation="relu")(x))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


class Die(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        fault = Path(os.environ.get("FAULT", "nowhere"))
        if epoch == 2 and os.environ.get("STOKER_RANK") == "1" and fault.exists():
            fault.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class Mark(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if "MARK" in os.environ:
            Path(os.environ["MARK"]).touch()
            time.sleep(1)  # so that it can be met in its middle


def callbacks():
    return [Die(), Mark()]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One experiment for all: the stages before training are done once."""
    folder = tmp_path_factory.mktemp("workers") / "pair"
    folder.mkdir()
    (folder / "stoker.yaml").write_text(STOKER_YAML)
    (folder / "model.py").write_text(MODEL_PY)
    rows = ["id,age,spent,bought"]
    rows += [f"{n},{20 + n % 50}.5,{(n * 37) % 90}.5,{int(n % 50 > 25)}" for n in range(400)]
    (folder / "data.csv").write_text("\n".join(rows) + "\n")
    return folder


def train(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "stoker", "train", str(folder), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def until(happened: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + HANG_S
    while not happened():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)  # another process's work


def weights(result: dict[str, Any]) -> str:
    """The hash of the state that is exported."""
    record = json.loads((Path(result["run"]) / "stages" / "train.json").read_text())
    return str(record["content"])


@pytest.fixture(scope="module")
def calm(folder: Path) -> tuple[dict[str, Any], str, str]:
    """What two workers train, one of them slow; the hash of its state; and what they report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_S", "0.08")
        result, said = train(folder, "--workers", "2", "--log-json")
    return result, weights(result), said


@pytest.mark.multiworker
@pytest.mark.slow
def test_a_slow_worker_is_named(calm: tuple[dict[str, Any], str, str]) -> None:
    result, _, said = calm

    (slow,) = result["stragglers"]
    assert slow["worker"] == "1"
    assert slow["ratio"] > 1.2
    lines = [json.loads(line) for line in said.splitlines()]
    assert all(line.keys() >= {"time", "level", "run", "worker", "message"} for line in lines)
    (named,) = [line for line in lines if "worker 1 is slow: " in line["message"]]
    assert (named["level"], named["worker"]) == ("warning", "0")
    assert named["run"] == Path(result["run"]).name
    assert list(Path(result["run"]).glob(".*")) == [], "nothing of the workers is left"


@pytest.mark.soak
@pytest.mark.multiworker
@pytest.mark.slow
def test_a_worker_that_is_killed_changes_no_weight(
    folder: Path,
    calm: tuple[dict[str, Any], str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Not in the experiment's folder: what is there is a part of the code.
    fault = tmp_path / "fault"
    monkeypatch.setenv("FAULT", str(fault))
    fault.write_text("once")

    killed, said = train(folder, "--workers", "2", "--again")

    assert not fault.exists()
    assert killed["restarts"] == ["worker 1 was killed by SIGKILL"]
    assert "all workers start again from the last checkpoint" in said
    for result in (calm[0], killed):
        assert (result["workers"], result["resolved"]["replicas"]) == (2, 2)
        assert result["resolved"]["strategy"] == "multi_worker"
    assert weights(killed) == calm[1]
    assert killed["metrics"] == calm[0]["metrics"]
    assert not list(Path(killed["run"]).glob(".workers*")), "nothing of the launcher is left"


class Tasks:
    """`stoker train` as a launcher of somebody else's starts it: once for each task of a cluster."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        second: Path | None = None,
        second_options: Sequence[str] = (),
        second_environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start two, the second from a folder, with options and in an environment of its own."""
        folders = [folder, second or folder]
        own = [[], [*second_options]]
        environs: list[Mapping[str, str]] = [{}, second_environ]
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in folders]
            self.ports = [each.getsockname()[1] for each in sockets]
            addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self._processes = [
            subprocess.Popen(
                [
                    *[sys.executable, "-m", "stoker", "train", str(folders[index]), "--json"],
                    *[*options, *own[index]],
                ],
                env={**os.environ, **environs[index], "TF_CONFIG": tf_config(addresses, index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(len(folders))
        ]

    def ask_to_end(self, index: int) -> None:
        self._processes[index].terminate()

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each."""
        outputs = [process.communicate(timeout=HANG_S) for process in self._processes]
        return [
            (process.returncode, out, error)
            for process, (out, error) in zip(self._processes, outputs, strict=True)
        ]


def tf_config(addresses: list[str], index: int) -> str:
    return json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )


@pytest.mark.soak
@pytest.mark.multiworker
@pytest.mark.slow
def test_tasks_of_another_launcher_connect_end_together_and_continue(
    folder: Path,
    calm: tuple[dict[str, Any], str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, mark = tmp_path / "pair", tmp_path / "mark"
    shutil.copytree(folder, own, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    monkeypatch.setenv("MARK", str(mark))
    tasks = Tasks(own)
    until(mark.exists)
    tasks.ask_to_end(1)
    first = tasks.end()
    monkeypatch.delenv("MARK")

    assert [code for code, _, _ in first] == [75, 75], first

    (code, out, said), (joined, nothing, other) = Tasks(own).end()

    assert (code, joined, nothing) == (0, 0, ""), said + other
    found = json.loads(out)
    assert "(continued)" in said
    assert re.search(r"worker 1 waits until worker 0 has prepared training", other)
    assert f"worker 1 trains with worker 0 in run {Path(found['run']).name}" in other
    assert (found["workers"], found["resolved"]["strategy"]) == (2, "multi_worker")
    (_, trained, _), (again, _, other) = Tasks(own).end()
    assert json.loads(trained)["skipped"]
    assert again == 0, "the worker that waits learns that nothing is to be trained"
    assert "worker 1 has nothing to train: worker 0 found the model already trained" in other
    left = [path.name for path in Path(found["run"]).parent.glob(".cluster*")]
    assert left == []
    assert weights(found) == calm[1], "as under our launcher"


class JobStart:
    """Two tasks of one start of a job, as the target `local` starts them."""

    def __init__(self, job: Path, **environ: str) -> None:
        """Take a number, and start both."""
        start = ["job-task", str(job), "--incarnation", str(start_job(job))]
        self._tasks = [
            subprocess.Popen(
                [sys.executable, "-m", "stoker", *start],
                env={**os.environ, **environ, "STOKER_TASKS": "2", "STOKER_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        self.below: list[int] = []

    def stop(self) -> None:
        """Stop both and all that they have started, as a machine that is suspended."""
        for task in self._tasks:
            task.send_signal(signal.SIGSTOP)
        waiting = [task.pid for task in self._tasks]
        while waiting:
            for pid in children(waiting.pop()):
                os.kill(pid, signal.SIGSTOP)
                self.below.append(pid)
                waiting.append(pid)

    def continue_training(self) -> None:
        """Resume all processes except the two tasks, and wait until the processes that they started have ended."""
        for pid in self.below:
            os.kill(pid, signal.SIGCONT)
        until(lambda: not any(is_alive(pid) for pid in self.below))

    def continue_tasks(self) -> None:
        for task in self._tasks:
            task.send_signal(signal.SIGCONT)

    def end(self) -> list[tuple[int, str]]:
        """Exit code and output of each."""
        said = [task.communicate(timeout=HANG_S)[0] for task in self._tasks]
        return [(task.returncode, text) for task, text in zip(self._tasks, said, strict=True)]


def read_log(job: Path, rank: int) -> str:
    return (job / "logs" / f"task-{rank}.log").read_text()


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.multiworker
@pytest.mark.soak
def test_a_later_start_of_a_job_goes_on_and_the_earlier_one_publishes_nothing_more(
    folder: Path,
    calm: tuple[dict[str, Any], str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine of the first start is suspended in the middle of training, and wakes up too late."""
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "local"))
    mark = tmp_path / "mark"
    job = submitted(folder, folder / "runs", "train", "--json", "--again", workers=2)
    first = JobStart(job, MARK=str(mark))
    until(mark.exists)
    first.stop()

    second = JobStart(job)
    ended = second.end()

    assert [code for code, _ in ended] == [0, 0], ended
    assert "(continued)" in ended[0][1]
    (name,) = set(re.findall(r"trains with worker 0 in run (\S+)", read_log(job, 1)))
    run = folder / "runs" / "pair" / name
    record = json.loads((run / "stages" / "train.json").read_text())
    assert record["content"] == calm[1], "as under our launcher, without a start in between"

    before = hash_folder(run)
    first.continue_training()
    first.continue_tasks()

    (code, leading), (other, _) = first.end()
    assert (code, other) == (76, 76), leading
    assert hash_folder(run) == before
    assert "start 1 of job " in leading
    assert "must not write any more. Received: start 2 has begun." in leading
    assert re.search(r"^\S+Z start 2 on ", read_log(job, 0), re.MULTILINE)
    assert "start 2: the command ended with exit code 0" in read_log(job, 0)


@pytest.mark.multiworker
def test_waiting_tasks_report_the_chiefs_error_before_training(
    folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "pair"
    shutil.copytree(folder, own, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    (own / "data.csv").write_text("")

    (code, _, said), (other_code, nothing, other_error) = Tasks(own).end()

    assert (code, other_code, nothing) == (2, 2, ""), said + other_error
    assert "worker 0 failed before training: the other tasks are informed" in said
    assert "data.csv must hold a header line" in said
    assert "worker 0 failed before training started. Received: " in other_error
    assert "data.csv must hold a header line" in other_error
    assert list((own / "runs").rglob(".cluster*")) == []


class Pair:
    """Two tasks with a copy of the experiment each, and one folder of runs."""

    def __init__(self, of: Path, place: Path) -> None:
        self.runs, self.first, self.second = place / "runs", place / "first", place / "second"
        for copy in (self.first, self.second):
            shutil.copytree(of, copy, ignore=shutil.ignore_patterns("runs", "__pycache__"))

    def refused(self, *options: str, **of_second: Any) -> list[str]:
        """Train; the line that each task ends with, and nothing else of it is left."""
        shared = ["--set", f"runs={self.runs}"]
        tasks = Tasks(self.first, *shared, *options, second=self.second, **of_second)
        ended = tasks.end()

        assert [(code, out) for code, out, _ in ended] == [(2, "")] * 2, ended
        for port in tasks.ports:
            with socket.socket() as asks:
                assert asks.connect_ex(("127.0.0.1", port)) != 0, "a worker is left"
        assert list(self.runs.rglob(".cluster*")) == []
        messages = [re.findall("^stoker: (.*)$", said, re.MULTILINE) for _, _, said in ended]
        assert [len(lines) for lines in messages] == [1, 1], ended
        return [lines[0] for lines in messages]


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(folder, tmp_path_factory.mktemp("pair"))


@contextlib.contextmanager
def changed(file: Path, old: str, new: str) -> Iterator[None]:
    """A file with other text in it, until the block ends."""
    before = file.read_text()
    assert old in before
    file.write_text(before.replace(old, new))
    try:
        yield
    finally:
        file.write_text(before)


@pytest.mark.multiworker
def test_tasks_with_different_settings_all_end_and_name_them(pair: Pair) -> None:
    with changed(pair.second / "stoker.yaml", "epochs: 4", "epochs: 5"):
        first, second = pair.refused(second_options=["--set", "train.seed=5"])

    assert first == second
    assert "must agree on settings train.epochs and settings train.seed. Received: " in first
    assert "settings train.epochs is 4 on worker 0 and 5 on worker 1; " in first
    assert "settings train.seed is 0 on worker 0 and 5 on worker 1. " in first


@pytest.mark.soak
@pytest.mark.multiworker
def test_tasks_with_different_code_or_libraries_all_end_and_name_them(
    pair: Pair, tmp_path: Path
) -> None:
    metadata = tmp_path / "duckdb-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: duckdb\nVersion: 0.0.1\n")
    shadowed = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))

    with changed(pair.second / "model.py", "Dense(8", "Dense(9"):
        first, second = pair.refused(
            "--set", "train.callbacks=null", second_environ={"PYTHONPATH": shadowed}
        )

    assert first == second
    assert "must agree on code model:build and versions duckdb. Received: " in first
    assert "versions duckdb is" in first
    assert "and 0.0.1 on worker 1. " in first


@pytest.mark.multiworker
def test_a_task_that_cannot_begin_ends_the_others_with_its_reason(pair: Pair) -> None:
    with changed(pair.second / "model.py", "def build(", "def build(("):
        first, second = pair.refused()

    assert f"{pair.second / 'model.py'} must be Python" in second
    assert first.startswith(f"worker 1 failed before training started. Received: {second[:60]}")


@pytest.mark.soak
@pytest.mark.multiworker
def test_workers_go_back_together_from_what_is_not_finite_and_leave_its_samples_out(
    folder: Path, tmp_path: Path
) -> None:
    """One row makes a NaN, in the share of one worker."""
    own = tmp_path / "pair"
    shutil.copytree(folder, own, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    lines = (own / "data.csv").read_text().splitlines()
    assert lines[42].startswith("41,")
    lines[42] = "41,20.5,-1.0,1"
    (own / "data.csv").write_text("\n".join(lines) + "\n")
    model = (own / "model.py").read_text()
    assert "x = x / 50.0" in model
    (own / "model.py").write_text(model.replace("x = x / 50.0", "x = keras.ops.sqrt(x)"))
    once = ["--set", "train.epochs=1", "--workers", "2"]

    result, said = train(own, *once, "--set", "train.on_nan=rollback")

    assert result["resolved"]["workers"] == 2
    (back,) = result["health"]["rollbacks"]
    assert len(back["bad_rows"]) == 1
    # Where TensorFlow fuses relu into the product of matrices, some hosts make a NaN a zero there:
    # then the loss is finite, and the gradient is not.
    found = dict(re.findall(r"\[worker ([01])\] the (?:loss|gradient) of step (\d+) must be", said))
    assert found == {"0": found["0"], "1": found["0"]}, "both find the same step"
    assert math.isfinite(result["metrics"]["loss"])


@pytest.mark.soak
@pytest.mark.multiworker
def test_what_parameter_servers_trained_is_exported_and_evaluated(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    served = ["--set", "train.deterministic=false"]

    trained, said = train(folder, "--workers", "2", "--parameter-servers", "1", *served)
    code = invoke(["evaluate", str(folder), "--json", *served], debug=False)
    evaluation = capfd.readouterr()

    resolved = trained["resolved"]
    assert (resolved["strategy"], resolved["replicas"]) == ("parameter_server", 1)
    assert (trained["epochs"], trained["steps"] % 4, trained["repeated_steps"]) == (4, 0, 0)
    assert trained["steps"] * 16 >= 4 * 300, "each sample once an epoch"
    assert (trained["busy_fraction"], trained["ceiling_step_time_s"]) == (None, None)
    assert 0 <= trained["input_wait"] < 1
    assert "ended by SIGTERM" not in said, "servers are let go in silence"
    assert code == 0, evaluation.err
    evaluated = json.loads(evaluation.out)
    assert evaluated["run"] == trained["run"]
    assert re.search(r"train +\d+\.\d s +skipped", evaluation.err)


@pytest.mark.soak
@pytest.mark.multiworker
def test_workers_that_are_still_building_end_at_once_on_a_signal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After TensorFlow has found the other workers it would swallow the signal."""
    building = tmp_path / "building"
    monkeypatch.setenv("BUILDING", str(building))
    slow = (
        "    import time; Path(os.environ['BUILDING']).touch(); time.sleep(60)\n    return model\n"
    )
    (folder / "model.py").write_text(MODEL_PY.replace("    return model\n", slow))
    command = [sys.executable, "-m", "stoker", "train", str(folder), "--workers", "2"]

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        until_s = time.monotonic() + HANG_S
        while not building.exists() and time.monotonic() < until_s:
            time.sleep(0.1)
        launcher.send_signal(signal.SIGTERM)
        _, said = launcher.communicate(timeout=HANG_S)
    (folder / "model.py").write_text(MODEL_PY)

    assert building.exists()
    assert launcher.returncode == 75, said
    assert "did not end in time" not in said


@pytest.mark.soak
@pytest.mark.multiworker
def test_a_user_error_is_one_line_however_many_workers_report_it(folder: Path) -> None:
    broken = MODEL_PY.replace("    return model\n", "    return None\n")
    (folder / "model.py").write_text(broken)
    command = [sys.executable, "-m", "stoker", "train", str(folder), "--workers", "2"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    (folder / "model.py").write_text(MODEL_PY)

    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "must return a compiled" in line]
    assert len(errors) == 1
    assert errors[0].startswith("stoker: model:build must return a compiled keras.Model.")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--workers", "0"], "--workers must be from 1 to 1024"),
        (["--pin"], "--parameter-servers and --pin need --workers"),
        (["--workers", "2", "--set", "train.strategy=mirrored"], "must be auto or multi_worker"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_read(
    folder: Path, options: list[str], rule: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["train", str(folder), *options], debug=False) == 2

    error = capfd.readouterr().err
    assert rule in error
    assert "ingest" not in error


def test_workers_receive_every_setting_of_the_experiment(folder: Path) -> None:
    experiment = load_experiment(
        folder, overrides=["train.class_weight={0: 1.0e-6, 1: 2}", "runs=here"]
    )

    plain = yaml.safe_load(yaml.safe_dump(experiment.to_json()))

    assert build(Experiment, plain) == experiment
    assert Path(plain["folder"]).is_absolute()
