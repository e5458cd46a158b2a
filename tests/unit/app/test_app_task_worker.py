"""A task of a cluster finds what its chief trains, and nothing that a dead one has left."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from stoker.app.task import worker
from stoker.app.task.worker import task_of
from stoker.app.task.worker_process import WorkerSpec
from stoker.core.errors import ConfigError

PAIR = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}

SPEC = WorkerSpec(
    experiment="name: pair",
    run_id="r1",
    outputs={},
    identities={},
    results={},
    accept_change=False,
    folder="/runs/r1/train",
)


def environ(cluster: dict[str, Any], job: str = "worker", index: int = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


def test_a_process_is_a_task_if_tf_config_names_others() -> None:
    second = task_of(environ(PAIR, index=1))
    chief = task_of(environ({"chief": ["10.0.0.1:1"], "worker": ["10.0.0.1:2"]}, "chief"))
    with_chief = task_of(environ({"chief": ["10.0.0.1:1"], "worker": ["10.0.0.1:2"]}))

    assert second is not None
    assert chief is not None
    assert with_chief is not None
    assert (second.leads, second.leader, second.near) == (False, "worker 0", 1)
    assert (chief.leads, chief.leader, chief.near) == (True, "the chief", 2)
    assert (with_chief.leads, with_chief.rank) == (False, 1)
    assert task_of({}) is None
    assert task_of(environ({"worker": ["10.0.0.1:2222"]})) is None


@pytest.mark.parametrize(
    ("job", "got"), [("evaluator", "an evaluator"), ("ps", "TF_CONFIG with parameter servers: 1")]
)
def test_a_task_that_does_not_train_is_refused(job: str, got: str) -> None:
    cluster = PAIR | {job: ["10.0.0.3:2222"]}

    with pytest.raises(ConfigError) as caught:
        task_of(environ(cluster, job))

    assert got in caught.value.line()


def test_a_task_waits_for_a_living_chief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there is of a dead one, then half a file, then a stranger's; at last one beats."""
    monkeypatch.setattr(worker, "BEAT_S", 0.01)
    monkeypatch.setattr(worker, "POLL_S", 0.01)
    place, cluster = tmp_path / "there.json", task_of(environ(PAIR, index=1))
    assert cluster is not None
    place.write_text(json.dumps({"beat": "7-1", "spec": {"of": "a dead one"}, "failed": ""}))
    said: list[str] = []
    found: list[Any] = []
    waits = threading.Thread(
        target=lambda: found.append(worker._wait_for_chief(place, cluster, said.append))
    )
    waits.start()
    stranger = json.dumps({"beat": "7-1", "spec": {}, "failed": ""})
    for text in ('{"beat": "7-1", "sp', "[1]", stranger):
        waits.join(0.1)
        assert waits.is_alive()
        place.write_text(text)
    waits.join(0.1)
    assert waits.is_alive()

    with worker._published(place, SPEC):
        waits.join(20)

    assert WorkerSpec(**found[0]["spec"]) == SPEC
    assert said == [f"worker 1 waits until worker 0 has prepared training, in {place}"]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BEAT_S", 0.01)
    place, tries, wrote = tmp_path / "there.json", [0], threading.Event()
    real = worker._write

    def write(path: Path, value: object) -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise OSError(28, "No space left on device")
        real(path, value)
        wrote.set()

    monkeypatch.setattr(worker, "_write", write)
    with worker._published(place, SPEC):
        assert wrote.wait(20)
        assert json.loads(place.read_text())["spec"]["run_id"] == "r1"
