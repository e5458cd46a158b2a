"""A small TensorFlow training on a real Slurm through `stoker submit`, whose steps are noted and can be slowed down."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tests.slurm_cluster import Cluster, wait_until

from stoker.jobs.provider import JobState
from stoker.jobs.providers.slurm.provider import SlurmProvider
from stoker.jobs.providers.slurm.settings import SlurmTarget

NAME, TARGET = "pair", "cluster"

TRAINED_S = 600.0
"""Longest wait for a step or an end, seconds: imports of TensorFlow on a busy machine."""

STOKER_YAML = """\
name: pair
data: {source: data.csv, split_by: id}
model: model:build
label: bought
train:
  epochs: EPOCHS
  batch_size: 16
  steps_per_call: 1
  deterministic: true
  callbacks: model:callbacks
  checkpoint: {every_steps: EVERY}
  tensorboard: {histograms_every_steps: 0, gradients: false, graph: false}
"""

MODEL_PY = """\
import hashlib
import json
import os
import time
from pathlib import Path

import keras
from keras import layers


def build(features):
    x = layers.Concatenate()([keras.ops.expand_dims(features[n], -1) for n in ("age", "spent")])
    x = layers.Dropout(0.2)(layers.Dense(8, activation="relu")(x / 50.0))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


class Noted(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        folder, rank = Path(os.environ["NOTES"]), json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        start = os.environ.get("STOKER_INCARNATION", ":0").rpartition(":")[2]
        step = int(self.model.optimizer.iterations.value.read_value())
        weights = hashlib.sha256()
        for variable in self.model.weights:
            weights.update(variable.value.read_value().numpy().tobytes())
        with (folder / f"steps-{rank}").open("a") as stream:
            stream.write(f"{time.time():.3f} {start} {step} {weights.hexdigest()}\\n")
        hold = folder / "hold"
        if hold.exists() and step == int(hold.read_text()):
            time.sleep(3600)  # until it is killed
        if (folder / "slow").exists():
            time.sleep(float(os.environ["STEP_S"]))


def callbacks():
    return [Noted()]
"""

NOT_INPUTS = "$NOTES\n$STEP_S\n$TF_CONFIG\n$STOKER_INCARNATION\n"
"""`.stokerignore`: variables that only tell where to note steps."""


class Step(NamedTuple):
    """A step that a worker has done."""

    at_s: float
    """Seconds since the epoch."""

    start: int
    """Number of the job's start; 0 outside of a job."""

    number: int

    weights: str
    """Hash of the weights after it."""


def write_experiment(
    folder: Path, *, rows: int = 400, epochs: int = 6, every_steps: int = 4
) -> None:
    """Write an experiment whose callback notes each step of each worker.

    Args:
        folder: Its folder, which does not exist.
        rows: Of the table; a fifth of them validates.
        epochs: Of the training.
        every_steps: Interval of its checkpoints.
    """
    folder.mkdir()
    text = STOKER_YAML.replace("EPOCHS", str(epochs)).replace("EVERY", str(every_steps))
    (folder / "stoker.yaml").write_text(text)
    (folder / "model.py").write_text(MODEL_PY)
    (folder / ".stokerignore").write_text(NOT_INPUTS)
    lines = ["id,age,spent,bought"]
    lines += [f"{n},{20 + n % 50}.5,{(n * 37) % 90}.5,{int(n % 50 > 25)}" for n in range(rows)]
    (folder / "data.csv").write_text("\n".join(lines) + "\n")


@dataclass
class Training:
    """One training: an experiment, its folder of runs, and the job that trains it."""

    cluster: Cluster
    experiment: Path
    home: Path
    """Folder of its runs, notes and targets."""

    workers: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the target."""

    step_s: float = 0.1
    """How much longer a step takes while the training is slow, seconds."""

    job: str = ""
    """The job's ID, once it was submitted."""

    def __post_init__(self) -> None:
        self.notes.mkdir(parents=True)
        (self.home / "stoker").mkdir()
        environment = self.environment()
        if "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        self.settings = {
            "python": sys.executable,
            "grace_s": 30,
            "environment": environment,
            **self.settings,
        }
        targets = {TARGET: {"provider": "slurm", **self.settings}}
        (self.home / "stoker" / "targets.yaml").write_text(yaml.safe_dump(targets))

    @property
    def runs(self) -> Path:
        """Its folder of runs."""
        return self.home / "runs"

    @property
    def notes(self) -> Path:
        """Folder in which the workers note their steps."""
        return self.home / "notes"

    @property
    def place(self) -> Path:
        """Folder of the job."""
        return self.runs / ".jobs" / self.job

    def environment(self) -> dict[str, str]:
        """Variables of its workers."""
        return {"CUDA_VISIBLE_DEVICES": "-1", "NOTES": str(self.notes), "STEP_S": str(self.step_s)}

    def slow(self) -> None:
        """Let each step take longer."""
        (self.notes / "slow").touch()

    def hold_at(self, step: int) -> None:
        """Let a step have no end."""
        (self.notes / "hold").write_text(str(step))

    def fast(self) -> None:
        """Let steps take as long as they do."""
        for name in ("slow", "hold"):
            (self.notes / name).unlink(missing_ok=True)

    def submit(self) -> str:
        """Submit it by a process of its own, and return the job's ID."""
        options = ("--on", TARGET, "--workers", str(self.workers), "--set", f"runs={self.runs}")
        answer = self.stoker("submit", str(self.experiment), *options, "--json")
        self.job = str(json.loads(answer)["job"])
        return self.job

    def stoker(self, *arguments: str) -> str:
        """Run a command, and return what it prints."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "stoker", *arguments],
            env={**os.environ, "XDG_CONFIG_HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=TRAINED_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self) -> JobState:
        """What is known of the job."""
        return SlurmProvider(TARGET, SlurmTarget(**self.settings)).state(self.job)

    def scheduler_id(self) -> str:
        """The job's number in Slurm."""
        return str(json.loads((self.place / "submitted.json").read_text())["scheduler_id"])

    def starts(self) -> int:
        """Number of its starts so far."""
        names = (self.place / "incarnations").glob("*")
        return max((int(path.name) for path in names if path.name.isdecimal()), default=0)

    def have_saved(self, start: int) -> bool:
        """Whether all workers of a start have saved before its end."""
        codes = list((self.place / "exits" / str(start)).glob("[0-9]*"))
        return len(codes) == self.workers and {path.read_text() for path in codes} == {"75\n"}

    def lost_steps(self, rank: int) -> dict[int, int]:
        """Start of the job -> how many of its steps a worker had to do again in a later start."""
        found, steps = {}, self.steps(rank)
        starts = sorted({each.start for each in steps})
        for ended, start in itertools.pairwise(starts):
            # One on a lost machine goes on for a while without effect.
            begun_s = (self.place / "incarnations" / str(start)).stat().st_mtime
            # Steps of earlier starts do not count: this one may have saved before it was as far as they were.
            reached = max(
                (e.number for e in steps if e.start == ended and e.at_s < begun_s), default=0
            )
            found[ended] = reached + 1 - next(e.number for e in steps if e.start == start)
        return found

    def steps(self, rank: int = 0) -> list[Step]:
        """The steps that a worker has done, of all starts in order."""
        path = self.notes / f"steps-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        words = (line.split() for line in lines)
        return [Step(float(at), int(start), int(number), text) for at, start, number, text in words]

    def wait_for_step(self, number: int, *, start: int = 1) -> None:
        """Wait until a start of the job has done a step, or a later one."""
        wait_until(
            lambda: any(each.start == start and each.number >= number for each in self.steps()),
            lambda: f"step {number} of start {start}: {self.log()}",
            TRAINED_S,
        )

    def wait_for_start(self, number: int) -> None:
        """Wait until the job has begun a start; fail if it is over before."""

        def begun() -> bool:
            over = self.place / "outcome"
            assert not over.exists(), f"over before start {number}: {self.log()}"
            return self.starts() >= number

        wait_until(begun, lambda: f"start {number}: {self.log()}", TRAINED_S)

    def wait_for_end(self) -> JobState:
        """Wait until the job is over."""
        wait_until(lambda: self.state().phase.is_over, f"end of {self.job}", TRAINED_S)
        return self.state()

    def log(self) -> str:
        """What the job's script and first worker have printed."""
        texts = (self.place / "logs" / name for name in ("slurm.log", "task-0.log"))
        return "\n".join(path.read_text() for path in texts if path.exists())

    def weights(self) -> str:
        """The hash of the state that is exported."""
        (record,) = self.runs.glob(f"{NAME}/*/stages/train.json")
        return str(json.loads(record.read_text())["content"])

    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of each line of the run's metrics, in the order of the file."""
        (metrics,) = self.runs.glob(f"{NAME}/*/train/metrics.jsonl")
        lines = map(json.loads, metrics.read_text().splitlines())
        return [
            (each["step"], each["loss"]) for each in lines if "loss" in each and "epoch" not in each
        ]
