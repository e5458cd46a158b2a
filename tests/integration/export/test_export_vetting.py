"""What must not be pushed is found by the gate that loads the SavedModel as a server does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from stoker.core.errors import CheckFailed
from stoker.data.columns import Column
from stoker.export.signatures import (
    EXAMPLES_INPUT,
    SERVING_DEFAULT,
    SERVING_EXAMPLES,
    argument_names,
    feature_specs,
    make_examples,
    parse_examples,
)
from stoker.export.vetting import vet_model

COLUMNS = (
    Column(name="x", dtype="float32"),
    Column(name="n", dtype="float64", whole=True),
    Column(name="s", dtype="string"),
)
ROWS = {
    "x": np.array([1.0, np.nan, 3.0], np.float32),
    "n": np.array([17031081700.0, np.nan, -3.0]),
    "s": np.array(["ä".encode(), b"", b"\xff"], dtype=object),
}
Endpoint = Callable[[dict[str, Any]], dict[str, tf.Tensor]]


def export(folder: Path, plain: Endpoint, parsed: Endpoint | None = None) -> Path:
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    archive = keras.export.ExportArchive()
    archive.track(layer)
    archive.add_endpoint(SERVING_DEFAULT, plain, input_signature=[feature_specs(COLUMNS)])
    spec = tf.TensorSpec([None], tf.string, name=EXAMPLES_INPUT)

    def examples(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        return (parsed or plain)(parse_examples(examples, COLUMNS))

    archive.add_endpoint(SERVING_EXAMPLES, examples, input_signature=[spec])
    archive.write_out(str(folder), verbose=False)
    return folder


def filled(inputs: dict[str, Any]) -> tf.Tensor:
    numbers = [tf.cast(inputs["x"], tf.float64), inputs["n"]]
    kept = [tf.where(tf.math.is_nan(number), tf.zeros_like(number), number) for number in numbers]
    return tf.add_n(kept) + tf.cast(tf.strings.length(inputs["s"]), tf.float64)


def test_a_model_that_answers_alike_by_both_signatures_passes(tmp_path: Path) -> None:
    model = export(tmp_path / "m", lambda inputs: {"answer": filled(inputs)})

    assert vet_model(model, COLUMNS, ROWS) == {
        "signatures": [SERVING_DEFAULT, SERVING_EXAMPLES],
        "rows": 3,
        "outputs": ["answer"],
    }


def lost_batch(inputs: dict[str, Any]) -> dict[str, tf.Tensor]:
    return {"answer": tf.reduce_sum(filled(inputs))[None]}


def with_nan(inputs: dict[str, Any]) -> dict[str, tf.Tensor]:
    return {"answer": inputs["x"] + tf.cast(filled(inputs), tf.float32)}


def other(inputs: dict[str, Any]) -> dict[str, tf.Tensor]:
    return {"answer": filled(inputs) + 1}


@pytest.mark.parametrize(
    ("plain", "parsed", "said"),
    [
        (lost_batch, None, "must have one answer per row"),
        (with_nan, None, "must be finite for every row .* row 2"),
        (
            lambda inputs: {"answer": filled(inputs)},
            other,
            "serving_default and serving_examples must give the same answer",
        ),
    ],
)
def test_a_model_that_must_not_be_served_is_refused(
    tmp_path: Path, plain: Endpoint, parsed: Endpoint | None, said: str
) -> None:
    model = export(tmp_path / "m", plain, parsed)

    with pytest.raises(CheckFailed, match=said):
        vet_model(model, COLUMNS, ROWS)


def test_missing_values_survive_the_way_through_examples() -> None:
    parsed = parse_examples(tf.constant(make_examples(COLUMNS, ROWS)), COLUMNS)

    for name, expected in ROWS.items():
        np.testing.assert_array_equal(parsed[name].numpy(), expected)


def test_every_column_has_an_argument_of_its_own_whatever_its_name() -> None:
    names = ["def", "a b", "a_b", "价格", "数量", "1st", "", "class"]
    arguments = argument_names([Column(name=name, dtype="int64") for name in names])

    assert list(arguments) == names
    assert len(set(arguments.values())) == len(names)
    assert all(name.isidentifier() and name.isascii() for name in arguments.values())
