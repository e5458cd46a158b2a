"""How a run offers its metrics: a port, a textfile, OTLP; and that none of it holds training up."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from stoker.telemetry import publish
from stoker.telemetry.publish import Destinations, offered
from stoker.telemetry.run_info import RunInfo
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.targets import live_targets
from stoker.telemetry.writers import otlp
from stoker.telemetry.writers.live import LiveMetrics, Sources

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def live() -> LiveMetrics:
    made = LiveMetrics(
        RunInfo(run="r1", experiment="e"), Sources(run_time=RunTime(), checkpoint_age_s=lambda: 2.0)
    )
    made.write(10, {"loss": 0.5, "step_time_s": 0.01})
    return made


def until(happened: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_a_port_answers_scrapes_and_is_announced_until_the_end(
    live: LiveMetrics, tmp_path: Path
) -> None:
    with offered(live, Destinations(runs=tmp_path, port=0), environ={}):
        (target,) = live_targets(tmp_path)
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics") as answer:
            text = answer.read().decode()
            kind = answer.headers["Content-Type"]

    assert kind.startswith("text/plain; version=0.0.4")
    assert _without_time(text) == _without_time(live.text())
    assert 'stoker_train_loss{run="r1"} 0.5' in text
    assert live_targets(tmp_path) == []
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{target['targets'][0]}/metrics")


def _without_time(text: str) -> list[str]:
    """The lines that do not grow from one scrape to the next."""
    return [line for line in text.splitlines() if "wall_seconds_total{" not in line]


def test_a_port_that_is_taken_is_one_warning(
    live: LiveMetrics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with offered(live, Destinations(runs=tmp_path, port=port), environ={}):
            assert live_targets(tmp_path) == []

    (record,) = caplog.records
    assert "training goes on" in record.getMessage()
    assert f"127.0.0.1:{port}" in record.getMessage()


def test_a_port_that_is_open_to_others_says_so_and_is_announced_by_an_address_to_ask(
    live: LiveMetrics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with offered(live, Destinations(runs=tmp_path, port=0, host="127.0.0.2"), environ={}):
        (target,) = live_targets(tmp_path)
        assert target["targets"][0].startswith("127.0.0.2:")
    assert "other machines" not in caplog.text, "only this machine reaches 127.0.0.2"

    with offered(live, Destinations(runs=tmp_path, port=0, host="0.0.0.0"), environ={}):
        (target,) = live_targets(tmp_path)
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics") as answer:
            assert b'stoker_train_loss{run="r1"} 0.5' in answer.read()

    assert not target["targets"][0].startswith("0.")
    opened = [each for each in caplog.messages if "other machines" in each]
    assert opened == ["other machines can read these metrics: train.metrics_host is 0.0.0.0"]


def test_a_textfile_is_whole_at_every_instant_and_removed_at_the_end(
    live: LiveMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "TEXTFILE_EVERY_S", 0.001)
    path = tmp_path / "collector" / "stoker.prom"
    with offered(live, Destinations(runs=tmp_path, textfile=path), environ={}):
        until(path.exists)
        for _ in range(200):
            text = path.read_text()
            assert text.startswith("# HELP")
            assert text.endswith("\n")
            assert 'stoker_train_loss{run="r1"} 0.5' in text

    assert list(path.parent.iterdir()) == []


HOSTILE = '\udcff"\\\n\u00e9' + "x" * 10_000
"""As from an environment variable that is not UTF-8."""


def test_hostile_names_reach_node_exporter_and_a_collector(
    tmp_path: Path, sends: pytest.MonkeyPatch
) -> None:
    live = LiveMetrics(RunInfo(run="r1", experiment="e", team=HOSTILE), Sources(run_time=RunTime()))
    path, collector = tmp_path / "stoker.prom", Collector()
    with contextlib.closing(collector):
        sends.setenv(ENDPOINT, collector.endpoint)
        where = Destinations(runs=tmp_path, textfile=path)
        with offered(live, where, environ={ENDPOINT: collector.endpoint}):
            until(lambda: collector.requests and path.exists())
            text = path.read_bytes().decode()

    line = next(each for each in text.splitlines() if each.startswith("stoker_run_info{"))
    assert r'team="?\"\\\né' in line
    assert len(line) < 300
    (last,) = collector.requests[-1].resource_metrics[0].scope_metrics
    info = next(each for each in last.metrics if each.name == "stoker_run_info")
    attributes = {each.key: each.value for each in info.gauge.data_points[0].attributes}
    assert attributes["team"].string_value.startswith('?"\\\n')


def test_a_textfile_that_cannot_be_written_is_one_warning(
    live: LiveMetrics,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publish, "TEXTFILE_EVERY_S", 0.001)
    (tmp_path / "file").write_text("")
    where = Destinations(runs=tmp_path, textfile=tmp_path / "file" / "stoker.prom")
    with offered(live, where, environ={}):
        until(lambda: caplog.records)
        time.sleep(0.05)  # some more attempts

    (record,) = caplog.records
    assert "cannot be written, training goes on" in record.getMessage()


class Collector:
    """Takes metrics as a collector does; OTLP over HTTP."""

    def __init__(self, code: int = 200) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.code = code
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/metrics"
                collector.requests.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(collector.code)
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class GrpcCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Takes metrics as a collector does; OTLP over gRPC."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_to = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
        add_to(self, self._server)  # type: ignore[no-untyped-call] # grpcio has no types
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        self.requests.append(request)
        return ExportMetricsServiceResponse()

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Sends often, and gives up soon; the collector's address is still to be set."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    yield monkeypatch
    logging.getLogger("opentelemetry.exporter").setLevel(logging.NOTSET)


PROTOCOL, OF_METRICS = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
OVER_HTTP, OVER_GRPC = "http/protobuf", "grpc"


@pytest.mark.parametrize(
    ("receiver", "protocol"),
    [
        (Collector, {}),
        (GrpcCollector, {PROTOCOL: OVER_GRPC}),
        (GrpcCollector, {PROTOCOL: OVER_HTTP, OF_METRICS: OVER_GRPC}),
    ],
    ids=["by default", "gRPC", "gRPC for metrics"],
)
def test_metrics_are_sent_by_otlp_also_at_the_end(
    live: LiveMetrics,
    tmp_path: Path,
    sends: pytest.MonkeyPatch,
    receiver: type[Collector | GrpcCollector],
    protocol: dict[str, str],
) -> None:
    for name, value in protocol.items():
        sends.setenv(name, value)
    collector = receiver()
    with contextlib.closing(collector):
        sends.setenv(ENDPOINT, collector.endpoint)
        with offered(live, Destinations(runs=tmp_path), environ={ENDPOINT: collector.endpoint}):
            until(lambda: collector.requests)
            live.write(20, {"loss": 0.25, "step_time_s": 0.01})

    last = collector.requests[-1].resource_metrics[0]
    resource = {each.key: each.value.string_value for each in last.resource.attributes}
    assert resource["service.name"] == "stoker-train"
    assert resource["service.instance.id"] == "r1"
    found = {metric.name: metric for metric in last.scope_metrics[0].metrics}
    (loss,) = found["stoker_train_loss"].gauge.data_points
    assert loss.as_double == 0.25
    assert [(each.key, each.value.string_value) for each in loss.attributes] == [("run", "r1")]
    steps = found["stoker_train_steps_total"].sum
    assert steps.is_monotonic
    (point,) = found["stoker_train_step_seconds"].histogram.data_points
    assert (point.count, sum(point.bucket_counts)) == (20, 20)
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1


def test_a_collector_that_is_gone_or_refuses_is_one_warning_until_it_is_there_again(
    live: LiveMetrics,
    tmp_path: Path,
    sends: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = Collector(code=400)
    with contextlib.closing(collector):
        sends.setenv(ENDPOINT, collector.endpoint)
        with offered(live, Destinations(runs=tmp_path), environ={ENDPOINT: collector.endpoint}):
            until(lambda: len(collector.requests) > 3)
            messages = [record.getMessage() for record in caplog.records]
            collector.code = 200
            until(lambda: len(caplog.records) > 1)

    assert len(messages) == 1
    assert "metrics are not sent by OTLP, training goes on" in messages[0]
    assert "sent by OTLP again" in caplog.records[1].getMessage()


def test_a_silent_collector_delays_neither_a_step_nor_the_end(
    live: LiveMetrics, tmp_path: Path, sends: pytest.MonkeyPatch
) -> None:
    sends.setattr(otlp, "FLUSH_S", 0.1)
    sends.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sends.setenv(ENDPOINT, endpoint)
        with offered(live, Destinations(runs=tmp_path), environ={ENDPOINT: endpoint}):
            connection, _ = silent.accept()
            begun_s = time.monotonic()
            for step in range(1000):
                live.write(step, {"loss": 0.5, "step_time_s": 0.01})
        took_s = time.monotonic() - begun_s
        connection.close()

    assert took_s < 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon"), ("OTEL_METRIC_EXPORT_INTERVAL", "0")],
)
def test_invalid_variables_of_opentelemetry_are_one_warning(
    live: LiveMetrics,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sends: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    sends.setenv(name, value)
    with offered(live, Destinations(runs=tmp_path), environ={ENDPOINT: "http://127.0.0.1:1"}):
        pass

    (record,) = caplog.records
    assert "metrics are not sent, training goes on: " in record.getMessage()
    assert "OTEL_" in record.getMessage()


def test_an_exporter_that_is_not_installed_is_one_warning(
    live: LiveMetrics,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sends: pytest.MonkeyPatch,
) -> None:
    sends.setenv(PROTOCOL, OVER_GRPC)
    sends.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.metric_exporter", None)
    with offered(live, Destinations(runs=tmp_path), environ={ENDPOINT: "http://127.0.0.1:1"}):
        pass

    (record,) = caplog.records
    assert "metrics are not sent, training goes on: " in record.getMessage()
    assert "pip install 'stoker[otel]'" in record.getMessage()


def test_opentelemetrys_switches_turn_it_off(live: LiveMetrics, tmp_path: Path) -> None:
    threads = threading.active_count()
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_METRICS_EXPORTER", "none")):
        environ = {ENDPOINT: "http://127.0.0.1:1", name: value}
        with offered(live, Destinations(runs=tmp_path), environ=environ):
            assert threading.active_count() == threads
