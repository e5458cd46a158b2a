"""Whole numbers that float64 does not hold: the numeric analyzers keep every digit of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from tests.datasets import write_dataset

import stoker.transform as st
from stoker.data.columns import Column
from stoker.data.features.analyzers import moments
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.features.preprocessing.transform import Transform

ROWS = 1000
STEPS = np.random.default_rng(7).permutation(ROWS)
"""What tells the rows apart: 0 to 999, each once."""

FIRST = {
    "positive": 2**60,
    "negative": -(2**63),
    "largest": 2**63 - ROWS,
    "just beyond": 2**53,
    "just below": 2**53 - ROWS,
}
COLUMNS = {name: (STEPS + first).astype(np.int64) for name, first in FIRST.items()}


def every_analyzer(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    outputs: dict[str, tf.Tensor] = {}
    for name in FIRST:
        x = inputs[name]
        pair = tf.stack([x, x + tf.constant([0], tf.int64)], axis=1)
        outputs |= {
            f"z {name}": st.scale_to_z_score(x),
            f"01 {name}": st.scale_to_0_1(x),
            f"range {name}": st.scale_by_min_max(x, -1.0, 3.0),
            f"buckets {name}": st.bucketize(x, 10),
            f"pair z {name}": st.scale_to_z_score(pair)[:, 1],
            f"pair buckets {name}": st.bucketize(pair, 10)[:, 1],
            f"above min {name}": x - st.min(x),
            f"below max {name}": st.max(x) - x,
            f"var {name}": tf.zeros_like(x, tf.float32) + st.var(x),
        }
    unsigned = tf.cast(inputs["positive"], tf.uint64) + tf.constant(2**63, tf.uint64)
    outputs["z unsigned"] = st.scale_to_z_score(unsigned)
    outputs["01 unsigned"] = st.scale_to_0_1(unsigned)
    outputs["buckets unsigned"] = st.bucketize(unsigned, 10)
    whole = st.scale_to_0_1(inputs["whole range"])
    return outputs | {
        "01 whole range": whole,
        "z whole range": st.scale_to_z_score(inputs["whole range"]),
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Transform:
    root = tmp_path_factory.mktemp("data")
    ends = np.where(STEPS % 2 == 0, -(2**63), 2**63 - 1).astype(np.int64)
    columns: dict[str, Any] = COLUMNS | {"whole range": ends, "y": STEPS % 2}
    dataset = write_dataset(
        root,
        [Column(name=name, dtype="int64") for name in columns],
        {"train": [pa.table(columns)]},
    )
    return build_transform(dataset, every_analyzer, root / "transform", label="y")


@pytest.fixture(scope="module")
def features(built: Transform) -> dict[str, Any]:
    ends = np.where(STEPS % 2 == 0, -(2**63), 2**63 - 1).astype(np.int64)
    raw = {**COLUMNS, "whole range": ends}
    inputs = {c.name: tf.constant(raw[c.name], tf.int64) for c in built.serving_columns}
    return {name: found.numpy() for name, found in built.apply_features(inputs).items()}


NAMES = [*FIRST, "unsigned"]


@pytest.mark.parametrize("name", [*NAMES, *(f"pair z {name}" for name in FIRST)])
def test_z_scores_are_those_of_the_exact_numbers(features: dict[str, Any], name: str) -> None:
    found = features[name if name.startswith("pair") else f"z {name}"]

    expected = (STEPS - STEPS.mean()) / STEPS.std()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_scaled_numbers_are_those_of_the_exact_numbers(features: dict[str, Any], name: str) -> None:
    np.testing.assert_allclose(features[f"01 {name}"], STEPS / (ROWS - 1), rtol=1e-6, atol=1e-7)
    if name in FIRST:
        scaled = -1 + 4 * STEPS / (ROWS - 1)
        np.testing.assert_allclose(features[f"range {name}"], scaled, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*NAMES, *(f"pair buckets {name}" for name in FIRST)])
def test_buckets_hold_equally_many_of_the_exact_numbers(
    features: dict[str, Any], name: str
) -> None:
    found = features[name if name.startswith("pair") else f"buckets {name}"]

    np.testing.assert_array_equal(found, STEPS // (ROWS // 10))


@pytest.mark.parametrize("name", FIRST)
def test_limits_and_variance_are_those_of_the_exact_numbers(
    features: dict[str, Any], name: str
) -> None:
    np.testing.assert_array_equal(features[f"above min {name}"], STEPS)
    np.testing.assert_array_equal(features[f"below max {name}"], ROWS - 1 - STEPS)
    np.testing.assert_allclose(features[f"var {name}"], STEPS.var(), rtol=1e-6)


def test_a_column_may_span_all_of_64_bits(features: dict[str, Any]) -> None:
    is_low = STEPS % 2 == 0

    np.testing.assert_allclose(features["01 whole range"], np.where(is_low, 0, 1), atol=1e-6)
    np.testing.assert_allclose(features["z whole range"], np.where(is_low, -1, 1), rtol=1e-6)


def test_boundaries_that_are_written_as_whole_numbers_are_exact() -> None:
    cuts = [[2**60 + 1, 2**60 + 2]]
    x = tf.constant([2**60, 2**60 + 1, 2**60 + 2, 2**60 + 3], tf.int64)

    assert st.apply_buckets(x, cuts).numpy().tolist() == [0, 1, 2, 2]
    assert st.apply_buckets(x, tf.constant(cuts, tf.int64)).numpy().tolist() == [0, 1, 2, 2]


def test_the_description_holds_the_exact_limits(built: Transform) -> None:
    [moments] = [
        call["answer"]
        for call in built.spec.analyzers
        if (call["kind"], call["of"]) == ("moments", "positive")
    ]

    assert (moments["low"], moments["high"]) == (2**60, 2**60 + ROWS - 1)
    assert moments["mean"] == float(2**60 + 499)  # to the next multiple of 256
    assert moments["var"] == pytest.approx(STEPS.var())


@pytest.mark.parametrize("first", [2**41, 1_600_000_000_000_000, 4_500_000_000_000_000, 2**52])
def test_the_variance_of_neighbors_below_what_float64_rounds_is_theirs(
    tmp_path: Path, first: int
) -> None:
    path = tmp_path / "values.parquet"
    pq.write_table(pa.table({"value": first + np.arange(ROWS) % 2}), path)

    found = moments(ibis.duckdb.connect().read_parquet(path))

    assert (float(found.mean - first), found.var) == (0.5, 0.25)
