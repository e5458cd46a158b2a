"""Fault 106: what shows a training may be missing or broken: it goes on, with one warning each."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.integration.train.killed import Trainer, newest, write_table

from stoker.telemetry.targets import live_targets


def test_training_goes_on_where_tensorboard_prometheus_and_a_collector_are_missing(
    trainer: Trainer, tmp_path: Path
) -> None:
    folder, runs = tmp_path / "small", tmp_path / "runs"
    write_table(folder)
    (tmp_path / "file").write_text("")
    code = trainer.run(folder, runs, verb="transform")
    assert code == 0, trainer.said()
    (run,) = (runs / "small").glob("2*")
    (run / "train").mkdir()
    (run / "train" / "tensorboard").write_text("in the way")
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        options = {
            "metrics_port": taken.getsockname()[1],
            "metrics_textfile": tmp_path / "file" / "stoker.prom",
        }
        sets = [part for k, v in options.items() for part in ("--set", f"train.{k}={v}")]
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{gone.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2",
            "OTEL_METRIC_EXPORT_INTERVAL": "50",
            # Long enough for several attempts.
            "STEP_S": "0.02",
        }

        code = trainer.run(folder, runs, *sets, "--resume", run.name, environment=environment)

    said = trainer.said()
    assert code == 0, said
    assert newest(runs).step == 150
    for warning in (
        "nothing is written for TensorBoard, training goes on: ",
        "metrics are not served, training goes on: ",
        f"{tmp_path / 'file' / 'stoker.prom'} cannot be written, training goes on: ",
        "metrics are not sent by OTLP, training goes on: ",
    ):
        assert said.count(warning) == 1, (warning, said)
    assert (run / "train" / "metrics.jsonl").read_text().count("epoch") == 3
    assert live_targets(runs) == []
