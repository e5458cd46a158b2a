"""A version under rollout that kills or blocks its worker: real models, real processes."""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tests.integration.serve.conftest import ask_port, export, half_plus

from stoker.registry.repository import Repository
from stoker.rollout.control.supervisor import RolloutSupervisor
from stoker.rollout.counts.counts import read_counts, read_failures
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.routing.router import RolloutRouter
from stoker.rollout.state.changes import advance, promote_fully
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER, Phase, RolloutState
from stoker.rollout.statistics.histogram import count_above
from stoker.serve.config import ServeConfig
from stoker.serve.process.workers import WorkerEndedError, run_workers
from stoker.serve.routing import Served, VersionInUse
from stoker.serve.runtime.stuck_call_watchdog import StuckCallWatchdog
from stoker.serve.runtime.versions_in_use import VersionsInUse, read_versions_in_use
from stoker.serve.servables.model_config import ModelConfig
from stoker.serve.servables.servable import LoadOptions
from stoker.serve.servables.versions import ModelVersions

ROWS = [tf.TensorSpec([None, 1], tf.float32, name="x")]
KILLS_AT, HANGS_AT = 5.0, 6.0
LIMIT_S = 60.0
"""The promise: a version that dies or hangs is off the traffic within a minute."""


def good(path: Path) -> Path:
    return export(path, lambda x: {"y": x + 1.0}, ROWS)


def kills(path: Path) -> Path:
    """y = x + 2; at one value it needs a text of 8 GiB, and TensorFlow dies of that it cannot have it."""

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        def grown() -> tf.Tensor:
            text = tf.strings.join(["a" * 1024, tf.strings.as_string(x[0, 0])])
            for parts in (128, 128, 512):
                text = tf.strings.join([text] * parts)
            return tf.cast(tf.strings.length(text), tf.float32)

        is_fatal = tf.reduce_any(x == KILLS_AT)
        return {"y": x + 2.0 + tf.cond(is_fatal, grown, lambda: tf.constant(0.0))}

    return export(path, call, ROWS)


def hangs(path: Path) -> Path:
    """y = x + 3; at one value it never ends."""

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        is_endless = tf.reduce_any(x == HANGS_AT)
        (turns,) = tf.while_loop(lambda turn: is_endless | (turn < 0), lambda t: [t + 1], [0])
        return {"y": x + 3.0 + tf.cast(turns, tf.float32)}

    return export(path, call, ROWS)


@dataclass(frozen=True)
class Serving:
    root: Path
    process: subprocess.Popen[str]
    parent: int
    port: int
    grpc_port: int

    @property
    def rollouts(self) -> ModelRollouts:
        return ModelRollouts(self.root, "m")

    @property
    def state(self) -> RolloutState:
        return self.rollouts.status().state

    def ask(self, x: float) -> float | int:
        """y - x, or the status of the error; waits for the next worker where there is none."""
        body = {"instances": [[x]]}
        answer = ask_port(self.port, "/v1/models/m:predict", body, timeout_s=LIMIT_S)
        return answer.json()["predictions"][0][0] - x if answer.status == 200 else answer.status

    def begin(self, version: int) -> None:
        """Start a rollout, and wait until its version answers half of the requests."""
        settings = RolloutSettings(
            stages="50,100", step_time_s=600, warm_up_s=0, dry_run=("slow_p99",)
        )
        self.rollouts.start(version, settings, why="")

        def measured(state: RolloutState) -> RolloutState:
            return advance(replace(state, slow_s={"slow_p99": 0.5}), now_s=time.time())

        self.rollouts.apply(measured, what="x", why="")
        wait_for(lambda: self.ask(1.0) == version, what="the candidate takes no traffic")

    def counts(self, version: int) -> VersionCounts:
        counts = read_counts(self.root / "m" / FOLDER, rollout=self.state.rollout)
        return counts.get(0, {}).get(version, VersionCounts())

    def metric(self, name: str) -> list[float]:
        lines = ask_port(self.port, "/monitoring/prometheus/metrics").body.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")]


def wait_for(claim: Callable[[], bool], *, what: str) -> float:
    """Seconds until a claim holds."""
    began_s = time.monotonic()
    while not claim():
        assert time.monotonic() - began_s < LIMIT_S, what
        time.sleep(0.05)
    return time.monotonic() - began_s


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("parent")
    repository = Repository(folder / "models")
    for version, make in enumerate((good, kills, hangs), start=1):
        repository.push(make(folder / str(version)), "m")
    ModelRollouts(repository.root, "m").start(2, RolloutSettings(), why="", baseline=1)
    ModelRollouts(repository.root, "m").roll_back(to=None, why="the state decides from now on")
    command = [sys.executable, "-m", "stoker", "serve", str(repository.root), "--json"]
    command += ["--rest_api_port=0", "--port=0", "--poll-s=0.2", "--max-run-s=3"]
    command += ["--max-memory-mb=3000", "--warm-up-sizes=off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield Serving(
            root=repository.root,
            process=process,
            parent=ready["pid"],
            port=ready["rest_port"],
            grpc_port=ready["grpc_port"],
        )
        process.terminate()
        process.wait(30)


def test_the_parent_judges_and_loads_no_tensorflow(serving: Serving) -> None:
    serving.begin(2)
    wait_for(lambda: serving.state.lease > 0, what="no process judges")
    # The state's history names the process that took the lease.
    who = [event.who for event, _ in serving.rollouts.history() if event.what == "controller"]
    assert who[-1].endswith(f"/{serving.parent}")
    maps = Path(f"/proc/{serving.parent}/maps").read_text()
    assert "libpython" in maps or "python" in maps
    assert "libtensorflow" not in maps
    ages = serving.metric("stoker_rollout_state_age_seconds")
    assert ages
    assert max(ages) < 2.0


def test_a_version_that_kills_its_worker_is_off_the_traffic_before_the_next_one_listens(
    serving: Serving,
) -> None:
    assert serving.state.phase is Phase.RUNNING
    lost = 0
    while not lost:
        try:
            serving.ask(KILLS_AT)
        except (OSError, http.client.HTTPException):
            lost += 1

    # Sent at once, while no process answers: they are not refused, but wait for the next worker.
    patient = [("grpc.min_reconnect_backoff_ms", int(LIMIT_S * 1e3))]
    with grpc.insecure_channel(f"127.0.0.1:{serving.grpc_port}", options=patient) as channel:
        health = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
        by_grpc = health.future(b"", timeout=LIMIT_S)
        answers = [serving.ask(KILLS_AT) for _ in range(50)]
        assert by_grpc.result() == b"\x08\x01"
    assert answers == [1.0] * 50
    state = serving.state
    assert (state.phase, state.rejected) == (Phase.ROLLED_BACK, (2,))
    assert state.reason.startswith("it killed a worker (signal ")
    assert serving.counts(2).bad == lost == 1
    assert serving.metric("stoker_workers_replaced") == [1.0]


def test_a_version_that_hangs_is_rolled_back_within_the_minute(serving: Serving) -> None:
    serving.begin(3)
    began_s, answers = time.monotonic(), [1.0]

    def ask_until_it_hangs() -> None:
        while answers[-1] == 1.0:
            answers.append(serving.ask(HANGS_AT))

    client = threading.Thread(target=ask_until_it_hangs)
    client.start()
    slow_and_bad = set()
    while client.is_alive():
        counts = serving.counts(3)
        slow_and_bad.add((count_above(counts.latency, 0.5), counts.bad))
        time.sleep(0.05)
    assert answers[-1] == 504
    assert (1, 0) in slow_and_bad  # it was slow before it had any end

    wait_for(lambda: serving.state.phase is Phase.ROLLED_BACK, what="it stays on the traffic")
    assert time.monotonic() - began_s < LIMIT_S
    assert serving.state.reason == "a run of it does not end"
    wait_for(
        lambda: [serving.ask(HANGS_AT) for _ in range(10)] == [1.0] * 10, what="no worker follows"
    )


def test_what_was_counted_in_the_last_second_is_written_when_a_server_ends(
    serving: Serving,
) -> None:
    serving.begin(2)
    before = -1
    while before != (now := serving.counts(1).requests + serving.counts(2).requests):
        before = now
        time.sleep(2.5)
    assert {serving.ask(1.0) for _ in range(30)} == {1.0, 2.0}
    serving.process.terminate()
    serving.process.wait(LIMIT_S)

    assert serving.counts(1).requests + serving.counts(2).requests == before + 30


def test_the_version_to_go_back_to_stays_loaded_though_somebody_deletes_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = Repository(tmp_path / "models")
    repository.push(good(tmp_path / "1"), "m")
    repository.push(hangs(tmp_path / "2"), "m")
    rollouts = ModelRollouts(repository.root, "m")
    rollouts.start(2, RolloutSettings(keep_previous_s=600), why="")
    rollouts.apply(lambda now: promote_fully(now, now_s=time.time()), what="promote", why="")
    router, base = RolloutRouter(server="me"), repository.base("m")
    in_use = VersionsInUse(tmp_path / "0.versions")
    versions = ModelVersions(
        ModelConfig(name="m", base=base), LoadOptions(router=router, in_use=in_use)
    )
    try:
        with caplog.at_level(logging.INFO):
            versions.poll()
        served = [each.getMessage() for each in caplog.records if "is served" in each.getMessage()]
        assert served == ["m version 1 is served", "m version 2 is served"]
        shutil.rmtree(base / "1")
        versions.poll()
        assert versions.serves(1)
        with versions.use(1) as (_, model):
            assert model.call("serving_default", {"x": np.zeros((1, 1), np.float32)})["y"] == 1.0
            used = {each.version: each for each in read_versions_in_use(tmp_path / "0.versions")}
            assert (used[1].requests, used[2].requests, used[1].base) == (1, 0, base)

        # After --keep-previous it is not needed any more.
        rollouts.apply(lambda now: replace(now, began_s=1.0), what="x", why="")
        router.refresh({"m": Served(base=base, failed={})})
        versions.poll()
        assert not versions.serves(1)
    finally:
        versions.close()


def test_a_version_under_rollout_whose_load_does_not_end_is_reported(
    tmp_path: Path,
) -> None:
    repository = Repository(tmp_path / "models")
    for version in (1, 2):
        repository.push(half_plus(tmp_path / str(version), addend=float(version)), "m")
    # Without patience each load takes too long.
    ModelRollouts(repository.root, "m").start(2, RolloutSettings(load_limit_s=1e-9), why="")
    router, base = RolloutRouter(server="me"), repository.base("m")
    stuck = threading.Event()
    watchdog = StuckCallWatchdog(max_run_s=0.02, on_stuck=stuck.set, router=router)
    versions = ModelVersions(
        ModelConfig(name="m", base=base), LoadOptions(router=router, runs=watchdog)
    )
    try:
        versions.poll()
        assert stuck.wait(LIMIT_S)
        router.refresh({"m": Served(base=base, failed={})})
    finally:
        versions.close()
        watchdog.close()

    assert read_failures(base / FOLDER, rollout=1) == {2: "its load does not end"}


def test_a_version_that_ended_a_worker_is_not_loaded_again_though_a_label_names_it(
    tmp_path: Path,
) -> None:
    repository = Repository(tmp_path / "models")
    for version, alias in ((1, "champion"), (2, "candidate")):
        repository.push(half_plus(tmp_path / str(version), addend=float(version)), "m", alias=alias)
    rollouts, base = ModelRollouts(repository.root, "m"), repository.base("m")
    rollouts.start(2, RolloutSettings(), why="")
    use = VersionInUse(model="m", base=base, version=2, requests=0, loading=True)
    RolloutSupervisor(server="me").worker_ended([use], how="signal 6")

    router = RolloutRouter(server="me")
    versions = ModelVersions(ModelConfig(name="m", base=base), LoadOptions(router=router))
    try:
        versions.poll()
        assert (versions.serves(1), versions.serves(2)) == (True, False)

        rollouts.start(2, RolloutSettings(), why="an operator tries it again")
        router.refresh({"m": Served(base=base, failed={})})
        versions.poll()
        assert versions.serves(2)
    finally:
        versions.close()


WORKER = """
import os, sys
from pathlib import Path
from stoker.core.files import write_json
from stoker.rollout.routing.router import RolloutRouter
from stoker.serve.process.worker import stuck_file
from stoker.serve.runtime.versions_in_use import LOADING, VersionsInUse, versions_file

base, folder = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--worker-folder") + 1])
row = VersionsInUse(versions_file(folder, 0)).row("m", base, 2)
if 2 in RolloutRouter(server="w", folder=folder).wanted("m", base):
    row[LOADING] = 1.0
    if sys.argv[2] == "hangs":
        stuck_file(folder, 0, on_gpu=False).touch()
        sys.stdin.read()
    os.kill(os.getpid(), 9)
write_json(Path(sys.argv[sys.argv.index("--ready-file") + 1]), {"models": ["m"]})
sys.stdin.read()
"""
"""A worker that dies or hangs while it loads version 2, if it has to load it; it has no TensorFlow, so it starts quickly."""


@pytest.mark.parametrize("ending", ["dies", "hangs"])
def test_a_server_starts_although_a_version_under_rollout_kills_or_blocks_what_loads_it(
    tmp_path: Path, ending: str
) -> None:
    repository = Repository(tmp_path / "models")
    for version in (1, 2):
        repository.push(half_plus(tmp_path / str(version), addend=float(version)), "m")
    rollouts = ModelRollouts(repository.root, "m")
    rollouts.start(2, RolloutSettings(), why="")
    config = ServeConfig(root=repository.root, rest_port=0, grpc_port=0)
    command = [sys.executable, "-c", WORKER, str(repository.base("m")), ending]

    run_workers(
        config,
        command,
        lambda ready: os.kill(ready.pid, signal.SIGTERM),
        supervisor=RolloutSupervisor(server="me"),
    )

    assert rollouts.status().state.reason == (
        "a worker ended (signal 9) while it loaded this version"
    )
    with pytest.raises(WorkerEndedError):
        run_workers(config, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
