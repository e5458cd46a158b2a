"""A real training of two workers through `stoker submit` on Kubernetes, ended five times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.jobs.kubernetes_jobs import IMAGE, KubernetesJobs
from tests.slurm_cluster import wait_until

from stoker.jobs.job import read_job

TRAINED_S = 600.0
"""Longest wait for a training, seconds: two imports of TensorFlow on a busy machine."""

STOKER_YAML = """\
name: pair
data: {source: data.csv, split_by: id}
model: model:build
label: bought
train:
  epochs: 12
  batch_size: 16
  steps_per_call: 4
  deterministic: true
  callbacks: model:callbacks
  checkpoint: {every_steps: 4}
"""

MODEL_PY = """\
import time

import keras
from keras import layers


def build(features):
    x = layers.Concatenate()([keras.ops.expand_dims(features[n], -1) for n in ("age", "spent")])
    x = layers.Dropout(0.2)(layers.Dense(8, activation="relu")(x / 50.0))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(2)


def callbacks():
    return [Slow()]
"""


def stoker(*arguments: str) -> str:
    """Run a command, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "stoker", *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def facts(job: str) -> dict[str, Any]:
    """What `stoker jobs show` knows."""
    found: dict[str, Any] = json.loads(stoker("jobs", "show", job, "--json"))["state"]
    return found


def trained(runs: Path) -> str:
    """The hash of the state that is exported."""
    (record,) = runs.glob("pair/*/stages/train.json")
    return str(json.loads(record.read_text())["content"])


def require_done(job: str) -> dict[str, Any]:
    """Wait for its end; what is known of it then."""
    over = ("done", "failed", "stopped")
    wait_until(lambda: facts(job)["phase"] in over, f"end of {job}", TRAINED_S)
    state = facts(job)
    assert state["phase"] == "done", (state, stoker("logs", job))
    return state


@pytest.fixture
def experiment(tmp_path: Path, kubernetes: KubernetesJobs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small experiment, and a target `cluster` on the cluster of this machine."""
    folder = tmp_path / "pair"
    folder.mkdir()
    (folder / "stoker.yaml").write_text(STOKER_YAML)
    (folder / "model.py").write_text(MODEL_PY)
    rows = ["id,age,spent,bought"]
    rows += [f"{n},{20 + n % 50}.5,{(n * 37) % 90}.5,{int(n % 50 > 25)}" for n in range(400)]
    (folder / "data.csv").write_text("\n".join(rows) + "\n")
    kubernetes.cluster.add_claim("data", directory=folder)
    target = {
        "provider": "kubernetes",
        "image": IMAGE,
        "kubeconfig": str(kubernetes.kubeconfig),
        "cpus": 0.5,
        "grace_s": 60,
        "volumes": [
            {"claim": "runs", "path": str(kubernetes.runs)},
            {"claim": "data", "path": str(folder), "read_only": True},
        ],
    }
    (tmp_path / "config" / "stoker").mkdir(parents=True)
    (tmp_path / "config" / "stoker" / "targets.yaml").write_text(
        yaml.safe_dump({"cluster": target})
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder


def submitted(experiment: Path, runs: Path) -> str:
    """Submit it with two workers; the job's ID."""
    runs.mkdir()
    options = ("--on", "cluster", "--workers", "2", "--set", f"runs={runs}", "--json")
    return str(json.loads(stoker("submit", str(experiment), *options))["job"])


ENDS = ("preempt", "kill_task", "evict", "kill_out_of_memory", "evict_for_memory")
"""What the cluster does to a worker, each after another epoch at least. A lost node is left to the counting jobs: here
its process would keep the port that the next start needs, as all pods are on one machine."""


@pytest.mark.soak
@pytest.mark.multiworker
@pytest.mark.timeout(1800)
def test_a_training_whose_pods_are_ended_five_times_ends_with_the_same_bits(
    experiment: Path, kubernetes: KubernetesJobs
) -> None:
    calm, disturbed = (kubernetes.runs / name for name in ("calm", "disturbed"))
    job = submitted(experiment, calm)
    assert require_done(job)["restarts"] == 0

    job = submitted(experiment, disturbed)
    place = disturbed / ".jobs" / job
    log = place / "logs" / "task-0.log"
    for number, end in enumerate(ENDS):
        wait_for_epoch(log)
        start = kubernetes.starts(read_job(place))
        pods = kubernetes.pods(read_job(place))
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        getattr(kubernetes.cluster, end)(running[number % 2])
        wait_for_start(kubernetes, place, after=start)
    state = require_done(job)
    assert state["restarts"] >= len(ENDS), kubernetes.log(read_job(place))

    assert trained(disturbed) == trained(calm)


def wait_for_start(kubernetes: KubernetesJobs, place: Path, *, after: int) -> None:
    """Wait until a further start has begun."""
    job = read_job(place)
    wait_until(lambda: kubernetes.starts(job) > after, f"a start after {after}", TRAINED_S)


def wait_for_epoch(log: Path) -> None:
    """Wait until a further epoch has ended; some may be repeated ones."""
    seen = _epochs(log)
    wait_until(lambda: _epochs(log) > seen, f"an epoch after {seen}", TRAINED_S)


def _epochs(log: Path) -> int:
    return log.read_text().count("/12") if log.exists() else 0
