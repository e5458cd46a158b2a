"""A real TensorBoard on the loopback shows what is written; a real full disk ends nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.telemetry.writers import Everywhere
from stoker.telemetry.writers.append_only import JsonLines
from stoker.telemetry.writers.summaries import Embedding
from stoker.telemetry.writers.tensorboard import TensorBoard

Ask = Callable[..., Any]
START_S = 600.0
"""Longest wait for the server: it imports TensorFlow."""


def write_run(folder: Path) -> None:
    writer = TensorBoard(folder)
    writer.settings({"train": {"epochs": 2, "xla": False}, "name": "small"}, run="run-1")
    writer.graph(_graph)
    for step in range(1, 5):
        writer.write(step, {"loss": 1.0 / step, "input_wait": 0.01})
        writer.histograms(step, {"weights/dense/kernel": np.array([[0.0, 1.0, 3.0]])})
        metrics = {"loss": 2.0 / step, "val_loss": 3.0 / step, "epoch": float(step)}
        writer.write(step, metrics)
    vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
    writer.embeddings([Embedding(name="city", vectors=vectors, labels=["Rome", "Oslo", "Lima"])])
    writer.results(4, {"val_loss": 0.75}, succeeded=True)
    writer.close()


def _graph() -> bytes:
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    graph = GraphDef()
    graph.node.add(name="x", op="Placeholder")
    graph.node.add(name="y", op="Relu", input=["x"])
    return bytes(graph.SerializeToString())


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Asks a server for a path below `/data`; it shows one run."""
    folder = tmp_path_factory.mktemp("logdir")
    write_run(folder / "run-1")
    log = folder.with_name("tensorboard.log")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"], stdout=stream, stderr=stream
        )
    try:
        base = _address(server, log)

        def get(path: str, **query: str) -> Any:
            url = f"{base}/data/{path}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(url, timeout=300) as answer:
                return answer.read()

        _until_loaded(get)
        yield get
    finally:
        server.terminate()
        server.wait(300)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text(errors="replace")):
            return found[0]
        time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace"))


def _until_loaded(get: Ask) -> None:
    give_up_s = time.monotonic() + START_S
    while len(json.loads(get("runs"))) < 3:
        assert time.monotonic() < give_up_s, "the server has not read the run"
        time.sleep(0.2)


def test_the_loss_of_both_splits_is_one_chart(ask: Ask) -> None:
    tags = json.loads(ask("plugin/scalars/tags"))

    assert "epoch_loss" in tags["run-1/train"]
    assert "epoch_loss" in tags["run-1/validation"]
    points = json.loads(ask("plugin/scalars/scalars", run="run-1/validation", tag="epoch_loss"))
    assert [(step, value) for _, step, value in points] == [
        (step, pytest.approx(3.0 / step)) for step in range(1, 5)
    ]
    points = json.loads(ask("plugin/scalars/scalars", run="run-1/train", tag="loss"))
    assert len(points) == 4


def test_histograms_are_shown_by_weight(ask: Ask) -> None:
    tag = "weights/dense/kernel"
    points = json.loads(ask("plugin/histograms/histograms", run="run-1/train", tag=tag))

    assert [step for _, step, _ in points] == [1, 2, 3, 4]
    assert points[0][2] == [[0.0, 1.0, 3.0]]


def test_the_graph_is_shown(ask: Ask) -> None:
    shown = ask("plugin/graphs/graph", run="run-1/train", conceptual="false").decode()

    assert 'op: "Relu"' in shown


def test_settings_and_results_are_a_row_of_hparams(ask: Ask) -> None:
    text = json.loads(ask("plugin/text/text", run="run-1", tag="settings"))
    assert "&quot;epochs&quot;: 2" in text[0]["text"] or '"epochs": 2' in text[0]["text"]

    query = {"experimentName": "", "colParams": [], "sliceSize": 10, "startIndex": 0}
    query["allowedStatuses"] = ["STATUS_SUCCESS"]
    query["colParams"] = [{"metric": {"group": ".", "tag": "best/val_loss"}}]
    answer = json.loads(ask("plugin/hparams/session_groups", request=json.dumps(query)))
    (group,) = answer["sessionGroups"]
    assert group["hparams"] == {"name": "small", "train.epochs": 2.0, "train.xla": False}
    values = {
        (metric["name"]["group"], metric["name"]["tag"]): metric["value"]
        for metric in group["metricValues"]
    }
    assert 0.75 in values.values()


def test_embeddings_are_shown_with_their_words(ask: Ask) -> None:
    assert json.loads(ask("plugin/projector/runs")) == ["run-1"]
    info = json.loads(ask("plugin/projector/info", run="run-1"))
    assert info["embeddings"][0]["tensorName"] == "city"
    raw = ask("plugin/projector/tensor", run="run-1", name="city")
    np.testing.assert_array_equal(np.frombuffer(raw, np.float32), np.arange(6))
    words = ask("plugin/projector/metadata", run="run-1", name="city").decode()
    assert words.splitlines() == ["Rome", "Oslo", "Lima"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_ends_no_training_and_what_was_written_stays_readable(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tiny_disk / "tensorboard")
    writer = Everywhere([JsonLines(tiny_disk / "metrics.jsonl"), board])
    embedding = Embedding(name="city", vectors=np.zeros((500, 50), np.float32))
    for step in range(1, 2000):
        writer.write(step, {"loss": 1.0 / step})
        if step % 20 == 0:
            # Both take their part of the disk.
            board.wait()
    board.embeddings([embedding])
    board.wait()
    assert os.statvfs(tiny_disk).f_bfree == 0
    said = [record.getMessage() for record in caplog.records]
    (tiny_disk / "metrics.jsonl").write_text("")
    writer.write(2000, {"loss": 7.0})
    writer.close()

    assert len(said) == 3
    assert all("cannot be written, training goes on" in line for line in said)
    events = EventAccumulator(str(tiny_disk / "tensorboard" / "train")).Reload().Scalars("loss")
    assert len(events) > 100
    assert [event.step for event in events[:-1]] == list(range(1, len(events)))
    assert events[-1].step == 2000
