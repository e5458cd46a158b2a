"""A real server's request log against the data that the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2
from tests.integration.serve.conftest import export

from stoker.cli.main import invoke
from stoker.core.errors import DataError
from stoker.data.features.analysis.analyze import analyze
from stoker.data.features.analysis.request_skew import compare
from stoker.data.ingest import IngestConfig, ingest
from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server
from stoker.serve.request_log.reader import logged_requests

CONFIG = """config {{ name: "{name}" base_path: "{base}" logging_config {{
  log_collector_config {{ filename_prefix: "{logs}/{name}" }} sampling_config {{ sampling_rate: 1 }} }} }}
"""
KINDS = np.array(["cash", "card", "app"])
SAME, CENTS, MOSTLY_APP, TRUCK = "same", "cents", "mostly_app", "truck"


def rides(count: int, *, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    fares, kinds = rng.lognormal(2.0, 0.6, count), rng.choice(KINDS, count, p=[0.5, 0.3, 0.2])
    places = rng.normal(0.0, 1.0, (count, 2))
    return [
        {"fare": round(float(fare), 2), "kind": str(kind), "place": place.round(3).tolist()}
        for fare, kind, place in zip(fares, kinds, places, strict=True)
    ]


def requests_of(name: str) -> list[dict[str, Any]]:
    """400 rides from elsewhere, in one case each with something planted."""
    rows = rides(400, seed=1)
    for number, row in enumerate(rows):
        if name == CENTS:
            row["fare"] *= 100
        if name == MOSTLY_APP and number % 10:
            row["kind"] = "app"
        if name == TRUCK and number == 7:
            row["kind"] = "truck"
    return rows


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `stoker analyze` leaves of 2,000 rides with their tips."""
    folder = tmp_path_factory.mktemp("training")
    lines = [json.dumps({**row, "tip": row["fare"] / 10}) for row in rides(2500, seed=0)]
    (folder / "rides.jsonl").write_text("\n".join(lines) + "\n")
    dataset = ingest(IngestConfig(source=str(folder / "rides.jsonl")), folder / "data", label="tip")
    analyze(dataset, folder / "analysis", labels=["tip"])
    return folder / "analysis"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, ask_at: Callable[..., Any]) -> Path:
    """What a server has logged: of each kind of requests, under its name."""
    folder = tmp_path_factory.mktemp("logged")
    specs = [tf.TensorSpec([None], tf.float32, name="fare")]
    specs += [tf.TensorSpec([None], tf.string, name="kind")]
    specs += [tf.TensorSpec([None, 2], tf.float32, name="place")]
    model = export(folder / "exported", lambda fare, kind, place: {"tip": fare / 10.0}, specs)
    base = Repository(folder / "models").push(model, "taxi").path.parent
    names = (SAME, CENTS, MOSTLY_APP, TRUCK)
    each = [CONFIG.format(name=name, base=base, logs=folder / "logs") for name in names]
    (folder / "models.config").write_text(f"model_config_list {{ {' '.join(each)} }}")
    server = Server(
        ServeConfig(
            model_config_file=folder / "models.config",
            rest_port=0,
            grpc_port=0,
            poll_s=0.1,
            lame_duck_s=0.0,
            drain_s=5,
        )
    )
    server.start()
    try:
        assert server.wait_until_ready(60)
        for name in names:
            rows = requests_of(name)
            for start in range(0, len(rows), 20):
                body = {"instances": rows[start : start + 20]}
                path = f"/v1/models/{name}:predict"
                assert ask_at(server.rest_port, path, body).status == 200
    finally:
        server.stop()
    return folder / "logs"


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        (SAME, 0, set()),
        (CENTS, 3, {("fare", "out_of_range"), ("fare", "skew")}),
        (MOSTLY_APP, 3, {("kind", "skew")}),
        (TRUCK, 3, {("kind", "new_values")}),
    ],
)
def test_planted_skew_is_found_and_none_where_there_is_none(
    analysis: Path,
    logs: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    code: int,
    said: set[tuple[str, str]],
) -> None:
    files = [str(path) for path in sorted(logs.glob(f"{name}-*"))]

    ended = invoke(["skew", *files, "--analysis", str(analysis), "--json"], debug=False)

    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["compared"]) == (400, ["fare", "kind", "place"])
    assert {(one["column"], one["kind"]) for one in found["anomalies"]} == said
    assert ended == code


def test_a_person_reads_what_is_otherwise(
    analysis: Path, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = logs.glob(f"{MOSTLY_APP}-*")

    assert invoke(["skew", str(file), "--analysis", str(analysis)], debug=False) == 3

    first, second = capsys.readouterr().out.splitlines()
    assert first == "400 rows, compared: fare, kind, place"
    assert second.startswith("warning: kind: 'app' is 9")


def test_examples_are_taken_apart_and_what_they_leave_out_is_missing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=[2.5]))
    word = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"cash"]))
    whole = tf.train.Example(features=tf.train.Features(feature={"fare": feature, "kind": word}))
    less = tf.train.Example(features=tf.train.Features(feature={"kind": word}))
    by_predict, by_classify = prediction_log_pb2.PredictionLog(), prediction_log_pb2.PredictionLog()
    both = [whole.SerializeToString(), less.SerializeToString()]
    by_predict.predict_log.request.inputs["examples"].CopyFrom(tf.make_tensor_proto(both))
    given = by_classify.classify_log.request.input.example_list_with_context
    given.context.CopyFrom(less)
    given.examples.append(whole)
    with tf.io.TFRecordWriter(str(log)) as writer:
        writer.write(by_predict.SerializeToString())
        writer.write(by_classify.SerializeToString())

    found = list(logged_requests([log]))

    plain = [{name: values.tolist() for name, values in one.items()} for one in found]
    row = {"fare": [[2.5]], "kind": [[b"cash"]]}
    assert plain == [row, {"kind": [[b"cash"]]}, row]


def test_what_requests_leave_out_is_found_and_requests_without_rows_are_refused(
    analysis: Path,
) -> None:
    rows = rides(400, seed=2)
    rows_sent = [{"fare": np.array([row["fare"]], np.float32)} for row in rows]
    for one, row in list(zip(rows_sent, rows, strict=True))[::2]:
        one["kind"] = np.array([row["kind"]])

    found = compare([*rows_sent, {"fare": np.zeros((0, 1))}], analysis)

    assert (found.rows, found.compared) == (400, ("fare", "kind"))
    assert [(one.column, one.kind) for one in found.anomalies] == [("kind", "missing")]
    with pytest.raises(DataError, match="must have the same number of rows"):
        compare([{"fare": np.array(2.5)}], analysis)
    with pytest.raises(DataError, match="the same number of values of 'place'"):
        compare([{"place": np.zeros((1, 2))}, {"place": np.zeros((1, 3))}], analysis)


def test_no_file_and_no_analysis_are_one_line(
    analysis: Path, logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = logs.glob(f"{SAME}-*")
    (tmp_path / "cut.tfrecord").write_bytes(file.read_bytes()[:-3])
    (tmp_path / "empty.tfrecord").touch()
    for arguments, words in (
        ([str(tmp_path / "none"), "--analysis", str(analysis)], "must be a file"),
        ([str(file), "--analysis", str(tmp_path)], "schema.json"),
        ([str(tmp_path / "cut.tfrecord"), "--analysis", str(analysis)], "a record's length"),
        ([str(tmp_path / "empty.tfrecord"), "--analysis", str(analysis)], "at least one row"),
    ):
        assert invoke(["skew", *arguments], debug=False) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_lists_of_requests_are_compared_without_their_padding(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def lists(tags: list[str], count: int) -> list[list[str]]:
        return [rng.choice(tags, rng.integers(0, 4)).tolist() for _ in range(count)]

    lines = [json.dumps({"tags": tags, "n": n}) for n, tags in enumerate(lists(["a", "b"], 900))]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    dataset = ingest(IngestConfig(source=str(tmp_path / "d.jsonl")), tmp_path / "data")
    analyze(dataset, tmp_path / "analysis")

    def requests(tags: list[str]) -> list[dict[str, Any]]:
        sent = [[*row, "", "", ""][: 3 + n % 2] for n, row in enumerate(lists(tags, 300))]
        return [{"tags": np.array([row], object)} for row in sent]

    same = compare(requests(["a", "b"]), tmp_path / "analysis")
    other = compare(requests(["a", "b", "b", "b", "new"]), tmp_path / "analysis")

    assert (same.rows, same.compared, same.anomalies) == (300, ("tags",), ())
    assert {each.kind for each in other.anomalies} == {"new_values", "skew"}
