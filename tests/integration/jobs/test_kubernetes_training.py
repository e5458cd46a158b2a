"""A real training of two workers through `stoker submit` on Kubernetes, with a preemption in its middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.integration.jobs.kubernetes_jobs import IMAGE, KubernetesJobs
from tests.integration.jobs.test_slurm_training import (
    MODEL_PY,
    STOKER_YAML,
    TRAINED_S,
    require_done,
    stoker,
    trained,
)
from tests.slurm_cluster import wait_until

from stoker.jobs.job import read_job


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


@pytest.mark.soak
@pytest.mark.multiworker
def test_a_training_whose_pod_is_preempted_ends_with_the_same_bits(
    experiment: Path, kubernetes: KubernetesJobs
) -> None:
    calm, disturbed = (kubernetes.runs / name for name in ("calm", "disturbed"))
    job = submitted(experiment, calm)
    assert require_done(job)["restarts"] == 0

    job = submitted(experiment, disturbed)
    place = disturbed / ".jobs" / job
    log = place / "logs" / "task-0.log"
    wait_until(lambda: log.exists() and "epoch 1/6" in log.read_text(), "epoch 1", TRAINED_S)
    kubernetes.cluster.preempt(kubernetes.pods(read_job(place))[1])
    state = require_done(job)
    assert state["restarts"] == 1, kubernetes.log(read_job(place))

    assert trained(disturbed) == trained(calm)
