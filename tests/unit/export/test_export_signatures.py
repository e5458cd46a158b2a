"""Rows as serialized Examples and back: single values and vectors, present and missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.columns import PADDING, VARYING, Column, list_lengths
from stoker.data.user_dataset.description import TensorColumn
from stoker.export.signatures import feature_specs, make_examples, parse_examples, takes_examples

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32)  # NaN, which means missing, among them
WHOLE = st.one_of(st.integers(-(2**24), 2**24).map(float), st.just(float("nan")))

VALUES = {
    Column(name="an int", dtype="int64"): INT64,
    Column(name="ints", dtype="int64", length=3): INT64,
    Column(name="a float", dtype="float32"): FLOAT32,
    Column(name="floats", dtype="float32", length=2): FLOAT32,
    Column(name="a whole", dtype="float32", whole=True): WHOLE,
    Column(name="wholes", dtype="float64", whole=True, length=2): WHOLE,
    Column(name="a text", dtype="string"): st.text().map(str.encode),
    Column(name="texts", dtype="string", length=2): st.text().map(str.encode),
}


@st.composite
def rows_of_all(draw: st.DrawFn) -> dict[str, Any]:
    """Column -> [rows] or [rows, length] values."""
    count = draw(st.integers(1, 4))
    return {
        column.name: np.array(
            draw(st.lists(values, min_size=(size := count * (column.length or 1)), max_size=size)),
            dtype=object if column.dtype == "string" else column.dtype,
        ).reshape(count, *column.shape)
        for column, values in VALUES.items()
    }


@given(rows=rows_of_all())
@settings(max_examples=50)
def test_examples_hold_what_the_rows_hold(rows: dict[str, Any]) -> None:
    columns = list(VALUES)

    parsed = parse_examples(tf.constant(make_examples(columns, rows)), columns)

    for name, spec in feature_specs(columns).items():
        assert parsed[name].dtype == spec.dtype
        assert spec.shape.is_compatible_with(parsed[name].shape)
        np.testing.assert_array_equal(parsed[name].numpy(), rows[name])


def test_a_vector_without_a_value_is_left_out_and_comes_back_missing() -> None:
    column = Column(name="x", dtype="float32", length=2)
    rows = {"x": np.array([[np.nan, np.nan], [1.0, np.nan]], np.float32)}

    first, second = make_examples([column], rows)

    assert not tf.train.Example.FromString(first).features.feature
    assert len(tf.train.Example.FromString(second).features.feature["x"].float_list.value) == 2
    np.testing.assert_array_equal(
        parse_examples(tf.constant([first, second]), [column])["x"], rows["x"]
    )


def test_lists_of_varying_length_go_through_examples_without_their_padding() -> None:
    columns = [
        Column(name="n", dtype="int64", length=VARYING),
        Column(name="f", dtype="float32", length=VARYING),
        Column(name="s", dtype="string", length=VARYING),
    ]
    nan, none = np.nan, PADDING["int64"]
    rows = {
        "n": np.array([[1, 2], [3, none], [none, none]]),
        "f": np.array([[nan, 1.5, nan], [nan, nan, nan], [0.0, nan, nan]], np.float32),
        "s": np.array([[b"", b"a"], [b"b", b""], [b"", b""]], object),
    }

    examples = make_examples(columns, rows)

    held = [tf.train.Example.FromString(example).features.feature for example in examples]
    assert [list(each["n"].int64_list.value) for each in held] == [[1, 2], [3], []]
    assert [len(each["f"].float_list.value) for each in held] == [2, 0, 1]
    assert [list(each["s"].bytes_list.value) for each in held] == [[b"", b"a"], [b"b"], []]
    parsed = parse_examples(tf.constant([*examples, b""]), columns)
    for column in columns:
        found, given_ = parsed[column.name].numpy(), rows[column.name]
        assert feature_specs(columns)[column.name].shape.as_list() == [None, None]
        np.testing.assert_array_equal(found[:3], given_[:, : found.shape[1]])
        lengths = list_lengths(column, given_).tolist()
        assert list_lengths(column, found).tolist() == [*lengths, 0]


def test_tensors_of_a_users_own_dataset_go_through_examples_whole() -> None:
    columns = [
        TensorColumn(name="grid", dtype="float32", shape=(2, 3)),
        TensorColumn(name="one", dtype="int64", shape=()),
        TensorColumn(name="text", dtype="string", shape=(1,)),
    ]
    # NaN is a value like any other here: no setting says that it means "missing".
    grid = np.array([np.arange(6), np.full(6, np.nan)], np.float32).reshape(2, 2, 3)
    rows = {"grid": grid, "one": np.array([1, 2]), "text": np.array([[b"a"], [b""]], object)}

    assert takes_examples(columns)
    parsed = parse_examples(tf.constant(make_examples(columns, rows)), columns)

    for column in columns:
        np.testing.assert_array_equal(parsed[column.name].numpy(), rows[column.name])


def test_an_example_holds_three_types_and_no_open_size() -> None:
    assert not takes_examples([TensorColumn(name="x", dtype="uint8", shape=(4,))])
    assert not takes_examples([TensorColumn(name="x", dtype="float32", shape=(None,))])
