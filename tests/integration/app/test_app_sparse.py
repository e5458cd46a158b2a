"""Sparse vectors in two lists, from JSON Lines to a served answer, against `tf.io.SparseFeature`."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import stoker
import stoker.transform as st
from stoker.app.experiment import load_experiment
from stoker.core.errors import ConfigError, DataError
from stoker.data.feed.pipeline import Feed
from stoker.export.signatures import SERVING_DEFAULT, SERVING_EXAMPLES, make_examples
from stoker.registry.exported_model import load_model
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server
from stoker.train.config import TrainConfig
from stoker.train.setup.feeds import open_feeds

from .conftest import Trained

SIZE = 50

STOKER_YAML = """\
name: sparse
data: {source: data.jsonl}
model: model:build
preprocessing: model:preprocessing_fn
label: liked
train: {epochs: 1, batch_size: 32, deterministic: true}
evaluate: {metrics: [auc]}
"""

MODEL_PY = f"""\
import keras
import tensorflow as tf
from keras import layers

import stoker.transform as st


def preprocessing_fn(inputs):
    scaled = st.scale_to_z_score(inputs["value"])
    words = tf.sparse.to_dense(st.sparse_from_lists(inputs["at"], scaled, {SIZE}))
    return {{"words": tf.where(tf.math.is_nan(words), 0.0, words)}}


def build(features, transform):
    outputs = layers.Dense(1, activation="sigmoid")(features["words"])
    model = keras.Model(features, outputs)
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model
"""


def write_folder(folder: Path, *, last: dict[str, Any] | None = None) -> Path:
    """300 rows with up to six places in any order; now and then the last value is missing."""
    rng = np.random.default_rng(4)
    rows: list[dict[str, Any]] = []
    for number in range(300):
        at = rng.choice(SIZE, rng.integers(0, 7), replace=False).tolist()
        value: list[float | None] = [*rng.gamma(2.0, size=len(at)).round(3).tolist()]
        if at and number % 20 == 0:
            value[-1] = None
        rows.append({"at": at, "value": value, "liked": int(any(place < 9 for place in at))})
    rows += [] if last is None else [last]
    folder.mkdir()
    (folder / "stoker.yaml").write_text(STOKER_YAML)
    (folder / "model.py").write_text(MODEL_PY)
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


class Sparse(Trained):
    """A finished run, and what its feature must be."""

    def dense(self, split: str) -> np.ndarray[Any, Any]:
        """What the feature must be: by NumPy, row by row."""
        table = self.dataset.table(split, columns=["at", "value"]).to_pydict()
        whole = np.array([x for row in self.values("train") for x in row if x is not None])
        found = np.zeros((len(table["at"]), SIZE))
        for row, (at, value) in enumerate(zip(table["at"], table["value"], strict=True)):
            for place, number in zip(at, value, strict=False):
                found[row, place] = (number - whole.mean()) / whole.std()
        return found

    def values(self, split: str) -> list[list[float]]:
        values: list[list[float]] = self.dataset.table(split, columns=["value"])[
            "value"
        ].to_pylist()
        return values


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return Sparse(write_folder(tmp_path_factory.mktemp("sparse") / "sparse"))


def test_the_training_feed_gives_the_dense_vectors(trained: Sparse) -> None:
    feed, _ = open_feeds(trained.dataset, trained.transform, config=TrainConfig(), memory_bytes=0)
    assert isinstance(feed, Feed)
    with feed.in_order(batch_size=feed.rows) as batches:
        fed, _ = feed.load(next(iter(batches)))

    assert any(len(row) < 6 for row in trained.values("train"))
    np.testing.assert_allclose(fed["words"], trained.dense("train"), atol=1e-5)


@pytest.fixture(scope="module")
def url(trained: Sparse) -> Iterator[str]:
    root = trained.experiment.models_root
    server = Server(ServeConfig(root=root, rest_port=0, grpc_port=0, lame_duck_s=0.0, drain_s=5))
    server.start()
    try:
        assert server.wait_until_ready(60)
        yield f"http://127.0.0.1:{server.rest_port}/v1/models/sparse:predict"
    finally:
        server.stop()


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_examples_and_padded_lists_are_answered_as_evaluate_answers_them(
    trained: Sparse, url: str
) -> None:
    rows = trained.rows("eval")
    loaded = load_model(trained.chain.output("export"))
    (evaluated,) = loaded.call(SERVING_DEFAULT, rows).values()
    loaded.close()
    examples = make_examples(trained.transform.serving_columns, rows)
    lists = {name: values.tolist() for name, values in rows.items()}
    encoded = [{"b64": base64.b64encode(example).decode()} for example in examples]

    by_name = post(url, {"inputs": lists})["outputs"]
    body = {"signature_name": SERVING_EXAMPLES, "instances": encoded}
    by_example = post(url, body)["predictions"]

    np.testing.assert_array_equal(np.array(by_name, np.float32), evaluated)
    np.testing.assert_array_equal(np.array(by_example, np.float32), evaluated)


def test_a_row_that_is_not_a_sparse_vector_is_refused_and_the_next_one_answered(
    trained: Sparse, url: str
) -> None:
    refused = {
        "places from 0 to 49": {"at": [3, 50], "value": [1.0, 2.0]},
        "each place at most once": {"at": [3, 3], "value": [1.0, 2.0]},
        "a place for each value": {"at": [3], "value": [1.0, 2.0]},
    }
    for rule, row in refused.items():
        with pytest.raises(urllib.error.HTTPError) as error:
            post(url, {"instances": [row]})
        assert error.value.code == 400
        assert f"sparse_from_lists: every row must have {rule}" in error.value.read().decode()
    assert post(url, {"instances": [{"at": [3], "value": [1.0]}]})["predictions"]


def test_training_rows_that_are_not_sparse_vectors_end_with_the_rule(tmp_path: Path) -> None:
    wrong = {"at": [1, SIZE], "value": [1.0, 2.0], "liked": 1}
    folder = write_folder(tmp_path / "sparse", last=wrong)

    with pytest.raises((ConfigError, DataError), match="every row must have places from 0 to 49"):
        stoker.run(load_experiment(folder))


def test_what_is_made_of_the_lists_is_what_sparse_feature_parses() -> None:
    pairs: list[tuple[list[int], list[float]]] = [([7, 2], [0.5, 1.5]), ([], []), ([9], [2.0])]
    examples = [
        tf.train.Example(
            features=tf.train.Features(
                feature={
                    "at": tf.train.Feature(int64_list=tf.train.Int64List(value=at)),
                    "value": tf.train.Feature(float_list=tf.train.FloatList(value=value)),
                }
            )
        ).SerializeToString()
        for at, value in pairs
    ]
    parsed = tf.io.parse_example(
        examples, {"x": tf.io.SparseFeature("at", "value", tf.float32, 10)}
    )
    at, value = (
        tf.ragged.constant([pair[place] for pair in pairs], dtype=dtype)
        for place, dtype in enumerate((tf.int64, tf.float32))
    )

    made = st.sparse_from_lists(at, value, 10)

    for found, expected in zip(
        tf.nest.flatten(made, expand_composites=True),
        tf.nest.flatten(parsed["x"], expand_composites=True),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.string, tf.int64])
def test_missing_values_at_the_end_are_missing_and_whole_numbers_never_are(dtype: tf.DType) -> None:
    at = tf.ragged.constant([[4, 1, 0], [], [2]], dtype=tf.int32)
    values = tf.cast(tf.ragged.constant([[1], [], []], dtype=tf.int64), tf.float32)
    values = tf.strings.as_string(values) if dtype == tf.string else tf.cast(values, dtype)

    if dtype == tf.int64:
        with pytest.raises(tf.errors.InvalidArgumentError, match="a value for each place"):
            st.sparse_from_lists(at, values, 5)
        return
    made = st.sparse_from_lists(at, values, 5)
    assert made.indices.numpy().tolist() == [[0, 0], [0, 1], [0, 4], [2, 2]]
    is_missing = made.values == "" if dtype == tf.string else tf.math.is_nan(made.values)
    assert is_missing.numpy().tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("at", "size", "said"),
    [
        (tf.constant([[1]]), 5, "lists of varying length. Received: .*and RaggedTensor"),
        (tf.ragged.constant([[1.0]]), 5, "places that are whole numbers. Received: float32"),
        (tf.ragged.constant([[1]]), 0, "size must be a whole number of at least 1"),
    ],
)
def test_what_no_sparse_vector_is_made_of_is_refused(at: Any, size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        st.sparse_from_lists(at, tf.ragged.constant([[1.0]]), size)
