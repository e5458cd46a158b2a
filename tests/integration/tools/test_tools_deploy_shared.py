"""Servers of one deployment with a shared repository, as in their pods, watched by a real Prometheus."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import tensorflow as tf
import yaml
from tests.integration.tools.conftest import export
from tests.prometheus_programs import program
from tests.slurm_cluster import wait_until

from stoker.cli.main import invoke
from stoker.registry.repository import Repository
from stoker.rollout.gates.prometheus import query_numbers
from stoker.rollout.http_call import NoAnswerError
from stoker.serve.request_record import VERSION_HEADER

MODEL = "slow"
CLIENTS = 40
"""So many that more than `QUEUE_TARGET` wait at each server only with those that wait for one of its 8 threads."""

QUEUE_TARGET = 8
FOLLOW_S = 120.0


def slow(path: Path, *, addend: float) -> Path:
    """y = x / 2 + addend, and some milliseconds of work."""

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        # Of the input, so that TensorFlow does not do it once and for all.
        work = tf.random.stateless_uniform((600, 600), (1, 2)) + 1e-9 * tf.reduce_mean(x)
        for _ in range(4):
            work = tf.linalg.matmul(work, work) / 300.0
        return {"y": x * 0.5 + addend + tf.minimum(tf.reduce_mean(work), 0.0)}

    return export(path, call, [tf.TensorSpec([None], tf.float32, name="x")])


@dataclass
class Pod:
    """A server."""

    process: subprocess.Popen[bytes]
    port: int


@dataclass
class Site:
    """Two servers, and the folders that `stoker deploy` wrote for each version."""

    models: Path
    written: dict[int, Path]
    pods: list[Pod]


def manifest(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def seed(container: Any, written: Path, models: Path) -> subprocess.Popen[bytes]:
    """Run the container that adds the image's version to the repository."""
    assert "COPY --chmod=755 models/ /seed/\n" in (written / "Dockerfile").read_text()
    here = {"/seed": str(written / "models"), "/models": str(models)}
    assert container["command"][-2:] == list(here)
    command = [here.get(part, part) for part in container["command"]]
    return subprocess.Popen([sys.executable, *command[1:]], stdout=subprocess.DEVNULL)


@contextmanager
def server(container: Any, models: Path) -> Iterator[Pod]:
    port = free_port()
    here = {
        "/models": str(models),
        "--host=0.0.0.0": "--host=127.0.0.1",
        "--port=8500": "--port=0",
        "--rest_api_port=8501": f"--rest_api_port={port}",
    }
    assert set(here) <= set(container["args"])
    arguments = [here.get(part, part) for part in container["args"]]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", *arguments], stderr=subprocess.DEVNULL
    )
    try:
        yield Pod(process, port)
    finally:
        process.terminate()
        process.wait(300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pods")
    images, written = Repository(folder / "images"), {}
    for version in (1, 2):
        images.push(slow(folder / str(version), addend=float(version)), MODEL)
        out = written[version] = folder / f"written{version}"
        flags = ["--target", "kubernetes", "--shared-repository", "pvc://models"]
        flags += ["--queue-target", str(QUEUE_TARGET), "--version", str(version)]
        base = str(images.base(MODEL))
        assert invoke(["deploy", base, *flags, "--out", str(out)], debug=False) == 0
    pod = manifest(written[1] / "kubernetes" / "deployment.yaml")["spec"]["template"]["spec"]
    seeds = [seed(pod["initContainers"][0], written[1], folder / "models") for _ in range(2)]
    assert [each.wait(300) for each in seeds] == [0, 0]
    with ExitStack() as stack:
        pods = [
            stack.enter_context(server(pod["containers"][0], folder / "models")) for _ in range(2)
        ]
        path = pod["containers"][0]["startupProbe"]["httpGet"]["path"]
        wait_until(lambda: {probe(each, path) for each in pods} == {200}, "ready server", FOLLOW_S)
        yield Site(models=folder / "models", written=written, pods=pods)


def probe(pod: Pod, path: str) -> int:
    """The status of a probe's answer; 0: connection refused."""
    with closing(http.client.HTTPConnection("127.0.0.1", pod.port, timeout=30)) as connection:
        try:
            connection.request("GET", path)
        except ConnectionRefusedError:
            return 0
        return connection.getresponse().status


@dataclass
class Load:
    """Clients of a service: each keeps a connection, and opens another one where it is closed or refused."""

    pods: list[Pod]
    headers: dict[str, str] = field(default_factory=dict)
    answers: list[tuple[int, str, float]] = field(default_factory=list)
    """Port, version and value of each answer."""

    lost: list[str] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._threads = [
            threading.Thread(target=self._call_until_end, args=(n,)) for n in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads)

    def _call_until_end(self, at: int) -> None:
        while not self._end.is_set():
            at += 1
            port = self.pods[at % len(self.pods)].port
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                with suppress(ConnectionRefusedError):
                    connection.connect()
                while connection.sock is not None and not self._end.is_set():
                    self._call(connection)

    def _call(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.request(
                "POST", f"/v1/models/{MODEL}:predict", '{"instances": [1.0]}', self.headers
            )
            answer = connection.getresponse()
            body = json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            self.lost.append(f"{connection.port}: {error!r}")
            connection.close()
            return
        if answer.status != 200:
            self.lost.append(f"{connection.port}: {answer.status} {body}")
            return
        version = answer.headers[VERSION_HEADER]
        self.answers.append((connection.port, version, body["predictions"][0]))


@contextmanager
def prometheus(pods: list[Pod], folder: Path) -> Iterator[str]:
    """Prometheus that scrapes each server with the labels that prometheus-operator sets."""
    address = f"127.0.0.1:{free_port()}"
    targets = [
        {
            "targets": [f"127.0.0.1:{pod.port}"],
            "labels": {"namespace": "default", "pod": f"slow-{number}"},
        }
        for number, pod in enumerate(pods)
    ]
    job = {
        "job_name": "servers",
        "metrics_path": "/monitoring/prometheus/metrics",
        "static_configs": targets,
    }
    config = {"global": {"scrape_interval": "250ms"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program("prometheus"), *flags, f"--web.listen-address={address}"], stderr=log
        )
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def adapter_query(written: Path, autoscaler: Any) -> str:
    """The query that prometheus-adapter makes for the autoscaler's metric.

    Source: prometheus-adapter, docs/config.md, "Querying".
    """
    (rule,) = manifest(written / "prometheus-adapter.yaml")["rules"]["custom"]
    metric = autoscaler["spec"]["metrics"][1]["pods"]["metric"]["name"]
    assert rule["name"]["as"] == metric
    series, _, labels = rule["seriesQuery"].partition("{")
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    assert labels == 'namespace!="",pod!=""}'
    return (
        str(rule["metricsQuery"])
        .replace("<<.Series>>", series)
        .replace("<<.LabelMatchers>>", 'pod=~"slow-0|slow-1",namespace="default"')
        .replace("<<.GroupBy>>", "pod")
    )


def test_the_autoscalers_metric_rises_with_the_queue(site: Site, tmp_path: Path) -> None:
    written = site.written[1]
    autoscaler = manifest(written / "kubernetes" / "autoscaler.yaml")
    target = float(autoscaler["spec"]["metrics"][1]["pods"]["target"]["averageValue"])
    assert target == QUEUE_TARGET
    query = adapter_query(written, autoscaler)

    def numbers(url: str) -> list[float]:
        try:
            return query_numbers(url, query, timeout_s=10.0)
        except NoAnswerError:  # Prometheus is starting
            return []

    with prometheus(site.pods, tmp_path) as url:
        # Servers that have had no request yet report 0 to the autoscaler.
        wait_until(lambda: numbers(url) == [0.0, 0.0], "metric of idle servers", FOLLOW_S)
        with Load(site.pods) as load:
            wait_until(lambda: min(numbers(url), default=0.0) > target, "longer queue", FOLLOW_S)
            found = numbers(url)
    assert load.lost == []
    # All clients but those whose requests run are in a queue.
    assert sum(found) <= CLIENTS


def test_both_follow_a_rollout_and_one_that_ends_loses_no_answer(site: Site) -> None:
    push = manifest(site.written[2] / "push.yaml")["spec"]["template"]["spec"]
    with Load(site.pods) as load:
        assert seed(push["containers"][0], site.written[2], site.models).wait(300) == 0
        wait_until(
            lambda: Repository(site.models).versions(MODEL) == [1, 2],
            "version that the Job pushes",
            FOLLOW_S,
        )
        seen = len(load.answers)
        wait_until(lambda: len(load.answers) > seen + 2 * CLIENTS, "answers", FOLLOW_S)
    assert {(version, value) for _, version, value in load.answers} == {("1", 1.5)}

    start = ["start", MODEL, "2", "--models", str(site.models), "--canary", "header=x-canary,100"]
    assert invoke(["rollout", *start, "--detach"], debug=False) == 0
    ports = {pod.port for pod in site.pods}
    with Load(site.pods, headers={"x-canary": "1"}) as load:

        def follow() -> bool:
            # Another version that loads takes no server out of service.
            assert [probe(pod, "/readyz") for pod in site.pods] == [200, 200]
            return {port for port, version, _ in load.answers if version == "2"} == ports

        wait_until(follow, "rollout in both servers", FOLLOW_S)
        ending, other = site.pods
        ending.process.send_signal(signal.SIGTERM)
        wait_until(lambda: probe(ending, "/readyz") in (503, 0), "end of readiness", FOLLOW_S)
        wait_until(lambda: ending.process.poll() is not None, "end of the server", FOLLOW_S)
        seen = len(load.answers)
        wait_until(lambda: len(load.answers) > seen + 2 * CLIENTS, "answers", FOLLOW_S)
    assert ending.process.returncode == 0
    assert load.lost == []
    assert {port for port, _, _ in load.answers[seen + CLIENTS :]} == {other.port}
    assert {(version, value) for _, version, value in load.answers} <= {("1", 1.5), ("2", 2.5)}
