"""Labels for each output, and weights of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from stoker.core.errors import ConfigError, DataError
from stoker.data.columns import to_numpy
from stoker.data.dataset import Dataset
from stoker.data.features.analysis.labels import require_known_labels
from stoker.data.features.preprocessing.build import ColumnRoles, build_transform
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.ingest import IngestConfig, ingest

ROWS = 60


def table(folder: Path, **changes: Callable[[int], Any]) -> Dataset:
    """`x`, a `kind` of three, a `price`, a `weight` and a `note`, by row; or as changed."""
    columns: dict[str, Callable[[int], Any]] = {
        "x": lambda row: row / 7,
        "kind": lambda row: ("rose", "iris", "lily")[row % 3],
        "price": lambda row: row * 1.5,
        "weight": lambda row: row % 2,
        "note": lambda row: f"n{row % 5}",
    } | changes
    lines = [",".join(columns)]
    lines += [",".join(str(column(row)) for column in columns.values()) for row in range(ROWS)]
    folder.mkdir(parents=True)
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    config = IngestConfig(source=str(folder / "data.csv"), split_by="price")
    return ingest(config, folder / "shards")


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return table(tmp_path_factory.mktemp("flowers") / "data")


def raw_of(dataset: Dataset, transform: Transform) -> dict[str, tf.Tensor]:
    columns = transform.columns
    batch = next(dataset.batches("train", columns=[c.name for c in columns], rows=ROWS))
    return {c.name: tf.constant(to_numpy(c, batch.column(c.name)), c.tensor_dtype) for c in columns}


def test_each_output_has_its_label_and_serving_needs_none_of_their_columns(
    flowers: Dataset, tmp_path: Path
) -> None:
    label = {"species": "kind", "again": "kind", "cost": "double"}

    def function(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"x": inputs["x"], "double": inputs["price"] * 2}

    transform = build_transform(flowers, function, tmp_path / "t", label=label)

    raw = raw_of(flowers, transform)
    found = transform.apply_label(raw)
    assert list(found) == ["species", "again", "cost"]
    kinds = ["iris", "lily", "rose"]
    assert [kinds[i] for i in found["species"].numpy()] == [k.decode() for k in raw["kind"].numpy()]
    np.testing.assert_array_equal(found["again"], found["species"])
    np.testing.assert_array_equal(found["cost"], raw["price"] * 2)
    assert transform.output.num_classes == {"species": 3, "again": 3, "cost": None}
    assert [column.name for column in transform.serving_columns] == ["x"]
    assert [feature.name for feature in transform.features] == ["x"]
    (targets,) = transform.apply_targets(raw)
    np.testing.assert_array_equal(targets["cost"], found["cost"])


def test_a_class_that_only_the_eval_split_has_is_refused_in_every_label(
    flowers: Dataset, tmp_path: Path
) -> None:
    price = next(flowers.batches("eval", columns=["price"], rows=1)).column("price")[0].as_py()
    rare = round(price / 1.5)
    dataset = table(tmp_path / "new", kind=lambda row: "rare" if row == rare else "iris")

    transform = build_transform(dataset, None, tmp_path / "t", label={"a": "price", "b": "kind"})

    require_known_labels(transform, dataset, "train")
    with pytest.raises(DataError, match=r"label 'kind' of split 'eval' .* a class of the training"):
        require_known_labels(transform, dataset, "eval")


def test_a_raw_weight_is_neither_a_feature_nor_an_input_of_serving(
    flowers: Dataset, tmp_path: Path
) -> None:
    transform = build_transform(
        flowers, None, tmp_path / "t", label="price", roles=ColumnRoles(sample_weight="weight")
    )

    raw = raw_of(flowers, transform)
    label, weight = transform.apply_targets(raw)
    np.testing.assert_array_equal(label, raw["price"])
    assert weight.dtype == tf.float32
    np.testing.assert_array_equal(weight, tf.cast(raw["weight"], tf.float32))
    assert [column.name for column in transform.serving_columns] == ["x", "kind", "note"]
    assert "weight" not in {feature.name for feature in transform.features}


def test_a_weight_may_be_computed_of_a_column_that_a_feature_needs(
    flowers: Dataset, tmp_path: Path
) -> None:
    def function(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"x": inputs["x"], "much": tf.where(inputs["x"] > 4.0, 3, 1)[:, None]}

    transform = build_transform(
        flowers, function, tmp_path / "t", label="much", roles=ColumnRoles(sample_weight="much")
    )

    raw = raw_of(flowers, transform)
    label, weight = transform.apply_targets(raw)
    np.testing.assert_array_equal(weight, np.where(raw["x"] > 4.0, 3.0, 1.0))
    np.testing.assert_array_equal(label[:, 0], weight)
    assert [column.name for column in transform.columns] == ["x"]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("wieght", "raw column or an output.*Did you mean 'weight'"),
        ("note", "of numbers. Received: 'note', which holds string"),
        ("pair", r"one number per row. Received: 'pair', of shape \(None, 2\)"),
    ],
)
def test_what_can_be_no_weight_is_refused(
    flowers: Dataset, tmp_path: Path, weight: str, message: str
) -> None:
    def function(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"x": inputs["x"], "pair": tf.stack([inputs["x"], inputs["x"]], axis=1)}

    with pytest.raises(ConfigError, match=message):
        build_transform(
            flowers,
            function,
            tmp_path / "t",
            label="price",
            roles=ColumnRoles(sample_weight=weight),
        )


@pytest.mark.parametrize(
    ("value", "message"), [("", "a missing value"), ("-1", "-1"), ("inf", "inf")]
)
def test_a_weight_that_is_missing_negative_or_infinite_is_named_with_its_record(
    tmp_path: Path, value: str, message: str
) -> None:
    dataset = table(tmp_path / "bad", weight=lambda row: value if row % 9 == 4 else 1.5)
    transform = build_transform(
        dataset, None, tmp_path / "t", label="price", roles=ColumnRoles(sample_weight="weight")
    )

    with pytest.raises(DataError, match=rf"sample_weight 'weight'.*\(record \d+\).*{message}"):
        require_known_labels(transform, dataset, "train")


def test_a_value_that_a_computed_weight_would_hide_is_refused_unless_it_asks_itself(
    tmp_path: Path,
) -> None:
    dataset = table(tmp_path / "bad", weight=lambda row: "" if row % 9 == 4 else 1.5)

    def hides(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"x": inputs["x"], "much": tf.where(inputs["weight"] > 1.0, 2.0, 1.0)}

    def asks(inputs: dict[str, Any]) -> dict[str, Any]:
        known = ~tf.math.is_nan(inputs["weight"])
        return {"x": inputs["x"], "much": tf.where(known, 2.0, 1.0)}

    hiding, asking = (
        build_transform(
            dataset,
            function,
            tmp_path / name,
            label="price",
            roles=ColumnRoles(sample_weight="much"),
        )
        for name, function in (("hides", hides), ("asks", asks))
    )

    require_known_labels(asking, dataset, "train")
    said = r"column 'weight', which only the sample weight 'much' needs.*\(record \d+ of split 'train'\)"
    with pytest.raises(DataError, match=said):
        require_known_labels(hiding, dataset, "train")


def test_one_label_that_asks_itself_excuses_no_column_of_another_one(tmp_path: Path) -> None:
    """Also where a column goes through a function of its own, a branch, or a cast before."""
    dataset = table(
        tmp_path / "bad",
        weight=lambda row: "" if row % 9 == 4 else 1.5,
        size=lambda row: "" if row % 7 == 4 else 2.5,
    )

    @tf.function
    def known(values: tf.Tensor) -> tf.Tensor:
        return tf.logical_not(tf.math.is_nan(tf.cast(values, tf.float64)))

    def outputs(inputs: dict[str, Any]) -> dict[str, Any]:
        size, weight = inputs["size"], inputs["weight"]
        seen = tf.cond(tf.size(size) > 0, lambda: known(size), lambda: tf.zeros([0], tf.bool))
        of_rows = {"is_known": known(weight), "has_size": seen, "is_big": size > 2.0}
        of_rows |= {"is_heavy": weight > 1.0, "is_dear": inputs["price"] > 9.0}
        return {name: tf.cast(value, tf.int64) for name, value in of_rows.items()}

    def judged(*labels: str) -> None:
        """No feature needs what the labels do."""

        def function(inputs: dict[str, Any]) -> dict[str, Any]:
            found = outputs(inputs)
            return {"x": inputs["x"]} | {name: found[name] for name in labels}

        transform = build_transform(
            dataset, function, tmp_path / "-".join(labels), label={name: name for name in labels}
        )
        require_known_labels(transform, dataset, "train")

    judged("is_known", "is_dear", "has_size")
    judged("is_known", "is_heavy")
    with pytest.raises(DataError, match=r"column 'size', which only the label.*needs"):
        judged("is_known", "is_big")
    with pytest.raises(DataError, match=r"column 'weight', which only the label.*needs"):
        judged("has_size", "is_heavy")
