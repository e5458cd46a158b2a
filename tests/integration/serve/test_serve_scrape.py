"""A scrape of a real server: only listed metrics, both formats, floods of scrapes, and skew as `stoker skew` finds it."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from keras.export import ExportArchive
from prometheus_client import parser
from prometheus_client.openmetrics import parser as strict_parser
from tests.integration.serve.test_serve_metrics import ask_all
from tests.prometheus_programs import program
from tests.scrape_flood import flood

from stoker.data.features.analysis.analyze import analyze
from stoker.data.features.analysis.anomalies import SKEW_SHARE
from stoker.data.features.analysis.request_skew import compare
from stoker.data.features.analysis.statistics import TRAIN
from stoker.data.ingest import IngestConfig, ingest
from stoker.registry.repository import Repository
from stoker.registry.training_statistics import (
    TRAINING_STATISTICS,
    read_training_statistics,
    write_training_statistics,
)
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.rest import RolloutRoutes
from stoker.rollout.routing.router import RolloutRouter
from stoker.rollout.state.settings import RolloutSettings
from stoker.serve.config import ServeConfig
from stoker.serve.limits import METRICS_PATH
from stoker.serve.observability import prediction_quality
from stoker.serve.observability.sampled_examples import MAX_EXAMPLES
from stoker.serve.process.server import Server
from stoker.telemetry.catalogue import serving
from stoker.telemetry.catalogue.all import METRICS
from stoker.telemetry.catalogue.metric import Kind, Writer

AskAt = Callable[..., Any]
OPENMETRICS_PATH = f"{METRICS_PATH}/openmetrics"
ROWS, PER_REQUEST = 512, 64
"""Rows of a window, and of each request of the first."""

KINDS = np.array(["cash", "card", "app"])
NOT_HERE = {
    serving.LOG_DROPPED.name,
    serving.WORKERS_REPLACED.name,
    serving.COPIES.name,
    serving.COPY_LATENCY.name,
    serving.QUEUED_REQUESTS.name,
}
"""Have no series without a full disk, a killed worker, a version in shadow or a request that waits; tests of those see
them."""


def rides(count: int, *, seed: int, mostly_app: bool = False) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    shares = [0.05, 0.05, 0.9] if mostly_app else [0.5, 0.3, 0.2]
    kinds, fares = rng.choice(KINDS, count, p=shares), rng.lognormal(2.0, 0.6, count)
    places = rng.normal(0.0, 1.0, (count, 2))
    return [
        {"fare": round(float(fare), 2), "kind": str(kind), "place": place.round(3).tolist()}
        for fare, kind, place in zip(fares, kinds, places, strict=True)
    ]


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `stoker analyze` writes about 2,000 rides."""
    folder = tmp_path_factory.mktemp("training")
    lines = [json.dumps({**row, "tip": row["fare"] / 10}) for row in rides(2500, seed=0)]
    (folder / "rides.jsonl").write_text("\n".join(lines) + "\n")
    dataset = ingest(IngestConfig(source=str(folder / "rides.jsonl")), folder / "data", label="tip")
    statistics, _, _ = analyze(dataset, folder / "analysis", labels=["tip"])
    write_training_statistics(folder, statistics.splits[TRAIN])
    return folder / "analysis"


def write_taxi(path: Path, specs: list[tf.TensorSpec]) -> None:
    """A model that takes its columns by name, and as Examples for Regress."""
    archive = ExportArchive()
    by_name: Any = tf.function(lambda fare, kind, place: {"tip": fare / 10.0})
    archive.add_endpoint("serving_default", by_name, input_signature=specs)
    parsing = {str(spec.name): tf.io.FixedLenFeature(spec.shape[1:], spec.dtype) for spec in specs}

    def regress(inputs: tf.Tensor) -> dict[str, Any]:
        return {"outputs": tf.io.parse_example(inputs, parsing)["fare"] / 10.0}

    spec = [tf.TensorSpec([None], tf.string, name="inputs")]
    archive.add_endpoint("regress", tf.function(regress), input_signature=spec)
    archive.write_out(str(path), verbose=False)


@pytest.fixture(scope="module")
def served(
    exported: dict[str, Path], analysis: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with a rollout, and with a model that carries its training statistics."""
    folder = tmp_path_factory.mktemp("scraped")
    repository = Repository(folder / "models")
    for name, source in (("half", "half_plus_two"), ("judge", "judge")):
        repository.push(exported[source], name)
    repository.push(exported["half_plus_three"], "half")
    specs = [tf.TensorSpec([None], tf.float32, name="fare")]
    specs += [tf.TensorSpec([None], tf.string, name="kind")]
    specs += [tf.TensorSpec([None, 2], tf.float32, name="place")]
    taxi = folder / "taxi"
    write_taxi(taxi, specs)
    write_training_statistics(taxi, read_training_statistics(analysis.parent).values())
    assert (repository.push(taxi, "taxi").path / TRAINING_STATISTICS).is_file()
    config = ServeConfig(
        root=repository.root, rest_port=0, grpc_port=0, poll_s=0.1, lame_duck_s=0.0, drain_s=5
    )
    settings = RolloutSettings(stages="50,100", step_time_s=600)
    ModelRollouts(repository.root, "half").start(2, settings, why="", baseline=1)
    server = Server(config, router=RolloutRouter(server="pod"), extra=RolloutRoutes())
    server.start()
    try:
        assert server.wait_until_ready(60)
        yield server
    finally:
        server.stop()


@pytest.fixture
def channel(served: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as opened:
        yield opened


def predict(served: Server, ask_at: AskAt, rows: list[dict[str, Any]]) -> None:
    body = {"instances": rows}
    assert ask_at(served.rest_port, "/v1/models/taxi:predict", body).status == 200


def value_of(text: str, name: str, column: str) -> float | None:
    found = re.search(rf'^{name}{{model_name="taxi",column="{column}"}} (\S+)$', text, re.MULTILINE)
    return None if found is None else float(found[1])


def until_computed(served: Server, ask_at: AskAt, name: str, column: str, at_least: float) -> str:
    """The scrape in which a value is there."""
    end_s = time.monotonic() + 30
    while True:
        text = str(ask_at(served.rest_port, METRICS_PATH).body)
        found = value_of(text, name, column)
        if found is not None and found >= at_least:
            return text
        assert time.monotonic() < end_s, text
        time.sleep(0.02)


def as_request(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "fare": np.array([row["fare"] for row in rows], np.float32),
        "kind": np.array([row["kind"] for row in rows]),
        "place": np.array([row["place"] for row in rows], np.float32),
    }


def skewed(analysis: Path, rows: list[dict[str, Any]]) -> set[str]:
    """The columns that `stoker skew` reports."""
    found = compare([as_request(rows)], analysis).anomalies
    return {each.column for each in found if each.kind == "skew"}


def test_skew_and_drift_of_requests_are_those_that_stoker_skew_reports(
    served: Server, ask_at: AskAt, analysis: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_quality, "INTERVAL_S", 0.0)
    monkeypatch.setattr(prediction_quality, "MIN_ROWS", ROWS)
    assert served.plane.quality is not None
    monkeypatch.setattr(served.plane.quality, "_window_s", 0.0)
    skew, drift = serving.PREDICTION_SKEW.name, serving.PREDICTION_DRIFT.name
    same, other = rides(ROWS, seed=1), rides(ROWS, seed=2, mostly_app=True)

    for start in range(0, ROWS, PER_REQUEST):
        predict(served, ask_at, same[start : start + PER_REQUEST])
    text = until_computed(served, ask_at, skew, "place", 0.0)

    columns = ("fare", "kind", "place")
    found = {column: value_of(text, skew, column) or 0.0 for column in columns}
    assert {column for column in columns if found[column] > SKEW_SHARE} == skewed(analysis, same)
    assert skewed(analysis, same) == set()
    assert value_of(text, drift, "kind") is None, "there is one window"

    for row in other:  # small requests, which are answered in the event loop
        predict(served, ask_at, [row])
    text = until_computed(served, ask_at, drift, "kind", SKEW_SHARE)

    found = {column: value_of(text, skew, column) or 0.0 for column in columns}
    assert {column for column in columns if found[column] > SKEW_SHARE} == skewed(analysis, other)
    assert skewed(analysis, other) == {"kind"}
    drifted = {column: value_of(text, drift, column) or 0.0 for column in columns}
    assert {column for column in columns if drifted[column] > SKEW_SHARE} == {"kind"}
    assert not re.search(rf'{skew}{{model_name="(half|judge)"', text), "they carry no statistics"


def test_examples_of_regress_are_compared_too(
    served: Server, ask_at: AskAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_quality, "INTERVAL_S", 0.0)
    assert served.plane.quality is not None
    monkeypatch.setattr(served.plane.quality, "_window_s", 0.0)
    skew, rows = serving.PREDICTION_SKEW.name, rides(ROWS, seed=4)
    for row in rows:
        row["fare"] *= 100.0  # in cents
    before = value_of(str(ask_at(served.rest_port, METRICS_PATH).body), skew, "fare") or 0.0

    for start in range(0, ROWS, MAX_EXAMPLES):
        body = {"signature_name": "regress", "examples": rows[start : start + MAX_EXAMPLES]}
        assert ask_at(served.rest_port, "/v1/models/taxi:regress", body).status == 200
    text = until_computed(served, ask_at, skew, "fare", 0.6)

    assert before < SKEW_SHARE
    assert (value_of(text, skew, "place") or 0.0) < SKEW_SHARE


def listed(text: str) -> None:
    """Every metric of a scrape is in the catalogue, with its kind, help and labels."""
    by_name = {metric.name: metric for metric in METRICS}
    for line in text.splitlines():
        if line.startswith("# "):
            keyword, name, rest = line[2:].split(" ", 2)
            assert rest == (by_name[name].help if keyword == "HELP" else by_name[name].kind)
            continue
        sample = re.fullmatch(r"([A-Za-z_:]+?)(_bucket|_sum|_count)?\{(.*)\} \S+", line)
        assert sample is not None, line
        whole = sample[1] + (sample[2] or "")
        metric = by_name.get(whole) or by_name[sample[1]]
        labels = tuple(name for name in re.findall(r'([A-Za-z_]+)="', sample[3]) if name != "le")
        assert labels == metric.labels, line
        assert (metric.kind is Kind.HISTOGRAM) == (whole not in by_name), line


def test_a_scrape_has_exactly_what_the_catalogue_lists(
    served: Server, channel: grpc.Channel, ask_at: AskAt
) -> None:
    ask_all(served, channel, ask_at)

    text = str(ask_at(served.rest_port, METRICS_PATH).body)

    listed(text)
    expected = {
        metric.name for metric in METRICS if metric.writer in (Writer.SERVER, Writer.ROLLOUT)
    }
    types = {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    of_gpus = {metric.name for metric in METRICS if metric.writer is Writer.EXPORTER}
    assert types - of_gpus == expected
    samples = {re.split(r"(_bucket|_sum|_count)?\{", line)[0] for line in text.splitlines()}
    samples |= {line.split("{")[0] for line in text.splitlines()}
    assert expected - samples <= NOT_HERE
    assert 'stoker_model_loaded{model_name="half",version="2"} 1\n' in text


def test_promtool_and_prometheus_clients_parsers_read_it(served: Server, ask_at: AskAt) -> None:
    plain = ask_at(served.rest_port, METRICS_PATH, accept="application/openmetrics-text")
    strict = ask_at(served.rest_port, OPENMETRICS_PATH)

    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert strict.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    there = list(parser.text_string_to_metric_families(plain.body))
    parse: Any = strict_parser.text_string_to_metric_families  # the library has no types for it
    here = list(parse(strict.body))
    assert len(here) == len(there) > 20
    assert {sample.name for one in here for sample in one.samples} == {
        line.split("{")[0] for line in plain.body.splitlines() if line[0] != "#"
    }
    done = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=plain.body,
        capture_output=True,
        text=True,
        check=False,
    )
    # It has advice on names, which TensorFlow Serving chose; a scrape that it cannot read is an error.
    assert "error while linting" not in done.stderr, done.stderr
    assert done.returncode in (0, 3)


def test_a_scrape_is_compressed_for_those_that_accept_it(served: Server) -> None:
    bodies = []
    for accept in ("gzip", "identity"):
        connection = http.client.HTTPConnection("127.0.0.1", served.rest_port, timeout=30)
        connection.request("GET", OPENMETRICS_PATH, headers={"accept-encoding": accept})
        response = connection.getresponse()
        assert response.headers["content-encoding"] == (accept if accept == "gzip" else None)
        bodies.append(response.read())
        connection.close()

    assert len(bodies[0]) < len(bodies[1]) / 5
    names = [
        {line.split(b"{")[0] for line in text.splitlines()}
        for text in (gzip.decompress(bodies[0]), bodies[1])
    ]
    assert names[0] == names[1]


def test_a_flood_of_scrapes_shares_its_builds_and_holds_up_no_request(
    served: Server, ask_at: AskAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, builds, answers = served.plane.metrics, list[str](), list[Any]()
    blocks, may_go_on = metrics.blocks, threading.Event()

    def slow(*arguments: Any) -> Any:
        builds.append(threading.current_thread().name)
        may_go_on.wait(60)
        return blocks(*arguments)

    monkeypatch.setattr(metrics, "blocks", slow)
    threads = [
        threading.Thread(target=lambda: answers.append(ask_at(served.rest_port, METRICS_PATH)))
        for _ in range(40)
    ]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + 30
    while served._app._in_flight < len(threads):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    for _ in range(20):  # more than there are threads for requests
        predict(served, ask_at, rides(1, seed=3))
    assert answers == []
    may_go_on.set()
    for thread in threads:
        thread.join()

    assert [answer.status for answer in answers] == [200] * 40
    assert all(answer.body.endswith("\n") and "request_count" in answer.body for answer in answers)
    assert len(builds) <= 2, "scrapes that wait share a build"
    assert set(builds) == {"stoker-scrape_0"}, "not the event loop, and no thread of requests"


def test_a_hundred_scrapes_a_second_leave_the_machine_to_requests(
    served: Server, ask_at: AskAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, begun_s = served.plane.metrics, list[float]()
    blocks = metrics.blocks

    def counted(*arguments: Any) -> Any:
        begun_s.append(time.monotonic())
        time_s = time.thread_time()
        yield from blocks(*arguments)
        while time.thread_time() < time_s + 0.02:  # as long as 40 models would take
            pass

    monkeypatch.setattr(metrics, "blocks", counted)
    with flood(f"127.0.0.1:{served.rest_port}", METRICS_PATH) as answers:
        while len(begun_s) < 10:
            predict(served, ask_at, rides(1, seed=3))

    assert set(answers) == {200}
    # Each build is followed by a pause four times as long.
    assert all(later - earlier >= 0.1 for earlier, later in pairwise(begun_s))


def test_a_scrape_that_fails_is_an_error_and_the_next_one_is_answered(
    served: Server, ask_at: AskAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(served.plane.metrics, "blocks", broken)
        assert ask_at(served.rest_port, METRICS_PATH).status == 500
    assert ask_at(served.rest_port, METRICS_PATH).status == 200
