"""The transform against plain statements of its meaning, on data with gaps, ties and constants."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from tests.datasets import write_dataset

import stoker.transform as st
from stoker.core.errors import ConfigError, DataError
from stoker.core.multi_output import ONLY
from stoker.data.columns import VARYING, Column, to_numpy
from stoker.data.dataset import Dataset
from stoker.data.features.analysis.labels import require_known_labels
from stoker.data.features.preprocessing.build import ColumnRoles, build_transform
from stoker.data.features.preprocessing.transform import Transform, load_transform

ROWS = 1000

COLUMNS = (
    Column(name="mean radius", dtype="float32"),
    Column(name="same", dtype="float32"),
    Column(name="wide", dtype="float64", whole=True),
    Column(name="stamp", dtype="int64"),
    Column(name="Company", dtype="string"),
    Column(name="company", dtype="string"),
    Column(name="kind", dtype="string"),
    Column(name="tips", dtype="float32"),
    Column(name="target", dtype="int64"),
)

Arrays = dict[str, Any]


def make_table(rows: int, seed: int, *, shift: float) -> pa.Table:
    rng = np.random.default_rng(seed)
    words = ["b", "a", "Z", "", "line\\nend", "é", "line\r\nend", "once" + str(seed)]
    radius = (np.round(rng.gamma(2, 3, rows), 1) + shift).astype(np.float32)
    return pa.table(
        {
            "mean radius": pa.array(radius, mask=rng.random(rows) < 0.1),
            "same": pa.array(np.full(rows, 0.1, np.float32), mask=rng.random(rows) < 0.1),
            "wide": pa.array(np.round(rng.random(rows) * 1e10) + 17e9, mask=rng.random(rows) < 0.1),
            "stamp": rng.integers(1_362_000_000, 1_400_000_000, rows),
            "Company": ["x"] * rows,
            "company": rng.choice(words[:-1], rows, p=[0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]),
            "kind": rng.choice(["malignant", "benign", "other"], rows),
            "tips": rng.random(rows).astype(np.float32),
            "target": rng.integers(0, 2, rows),
        }
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("data [1]")  # a glob pattern: must be taken literally
    train = make_table(ROWS, 1, shift=0)
    return write_dataset(
        root,
        COLUMNS,
        {
            "train": [train.slice(0, 700), train.slice(700)],
            "eval": [make_table(200, 2, shift=1000)],
        },
        row_group_size=300,
    )


def read(dataset: Dataset, split: str = "train") -> Arrays:
    table = dataset.table(split)
    return {column.name: to_numpy(column, table.column(column.name)) for column in COLUMNS}


def tensors(transform: Transform, arrays: Arrays) -> dict[str, tf.Tensor]:
    return {c.name: tf.constant(arrays[c.name], c.tensor_dtype) for c in transform.columns}


@pytest.fixture(scope="module")
def raw(dataset: Dataset) -> Arrays:
    return read(dataset)


def every_function(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    radius = inputs["mean radius"]
    log = tf.math.log1p(radius)
    terms = st.vocabulary(inputs["company"], vocab_filename="company.txt")
    return {
        "z": st.scale_to_z_score(radius),
        "z same": st.scale_to_z_score(inputs["same"]),
        "z wide": st.scale_to_z_score(inputs["wide"]),
        "z stamp": st.scale_to_z_score(inputs["stamp"]),
        "01": st.scale_to_0_1(radius),
        "01 same": st.scale_to_0_1(inputs["same"]),
        "range": st.scale_by_min_max(inputs["stamp"], -1.0, 3.0),
        "words": st.apply_vocabulary(inputs["company"], terms),
        "words oov": st.apply_vocabulary(inputs["company"], terms, num_oov_buckets=3),
        "top": st.compute_and_apply_vocabulary(inputs["company"], top_k=2, default_value=9),
        "often": st.compute_and_apply_vocabulary(inputs["company"], frequency_threshold=150),
        "stamp id": st.compute_and_apply_vocabulary(inputs["target"]),
        "buckets": st.bucketize(radius, 7),
        "buckets wide": st.bucketize(inputs["wide"], 4),
        "buckets same": st.bucketize(inputs["same"], 3),
        "one bucket": st.bucketize(radius, 1),
        "given": st.apply_buckets(radius, [[2.0, 5.0]]),
        "hash": st.hash_strings(inputs["company"], 11),
        "hash key": st.hash_strings(inputs["company"], 11, key=[1, 2]),
        "mean": radius - st.mean(radius),
        "var": radius - st.var(inputs["stamp"]),
        "min": radius - st.min(radius),
        "max": inputs["stamp"] - st.max(inputs["stamp"]),
        "quantile": radius - st.quantiles(radius, 4)[0, 1],
        "chained": st.bucketize(st.scale_to_0_1(log), 5),
        "pair": st.scale_to_z_score(tf.stack([radius, inputs["same"]], axis=1)),
        "text": tf.strings.upper(inputs["company"]),
        "derived words": st.compute_and_apply_vocabulary(tf.strings.upper(inputs["company"])),
        "as it is": inputs["wide"],
        "label": tf.cast(inputs["tips"] > st.mean(inputs["tips"]), tf.int32),
    }


@pytest.fixture(scope="module")
def built(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Transform:
    folder = tmp_path_factory.mktemp("built") / "transform"
    return build_transform(
        dataset, every_function, folder, label="label", roles=ColumnRoles(label_only=["tips"])
    )


@pytest.fixture(scope="module")
def features(built: Transform, raw: Arrays) -> Arrays:
    found = built.apply_features(tensors(built, raw))
    return {name: tensor.numpy() for name, tensor in found.items()}


def finite(values: Any) -> Any:
    return values[np.isfinite(values)].astype(np.float64)


def z_score(values: Any) -> Any:
    known = finite(values)
    return (values.astype(np.float64) - known.mean()) / known.std()


def ids_of(values: Any, terms: list[bytes], default: int = -1) -> Any:
    return np.array([terms.index(v) if v in terms else default for v in values])


def by_frequency(values: Any) -> list[bytes]:
    counts: dict[bytes, int] = {}
    for value in values:
        if value:
            counts[value] = counts.get(value, 0) + 1
    return sorted(counts, key=lambda value: (counts[value], value), reverse=True)


def exact_buckets(values: Any, buckets: int) -> Any:
    known = np.sort(finite(values))
    cuts = [known[i * len(known) // buckets] for i in range(1, buckets)]
    ids = np.searchsorted(cuts, values.astype(np.float64), side="right")
    return np.where(np.isnan(values), buckets - 1, ids)


MEANINGS: dict[str, Callable[[Arrays], Any]] = {
    "z": lambda raw: z_score(raw["mean radius"]),
    "z same": lambda raw: np.where(np.isnan(raw["same"]), np.nan, 0.0),
    "z wide": lambda raw: z_score(raw["wide"]),
    "z stamp": lambda raw: z_score(raw["stamp"]),
    "01": lambda raw: (
        (raw["mean radius"] - np.nanmin(raw["mean radius"]))
        / (np.nanmax(raw["mean radius"]) - np.nanmin(raw["mean radius"]))
    ),
    "01 same": lambda raw: 1 / (1 + np.exp(-raw["same"])),
    "range": lambda raw: (
        -1 + 4 * (raw["stamp"] - raw["stamp"].min()) / (raw["stamp"].max() - raw["stamp"].min())
    ),
    "words": lambda raw: ids_of(raw["company"], by_frequency(raw["company"])),
    "top": lambda raw: ids_of(raw["company"], by_frequency(raw["company"])[:2], 9),
    "often": lambda raw: ids_of(
        raw["company"],
        [v for v in by_frequency(raw["company"]) if (raw["company"] == v).sum() >= 150],
    ),
    "stamp id": lambda raw: ids_of(
        raw["target"].astype(str).astype(np.bytes_),
        by_frequency(raw["target"].astype(str).astype(np.bytes_)),
    ),
    "buckets": lambda raw: exact_buckets(raw["mean radius"], 7),
    "buckets wide": lambda raw: exact_buckets(raw["wide"], 4),
    "buckets same": lambda raw: np.full(ROWS, 2),
    "one bucket": lambda raw: np.zeros(ROWS),
    "given": lambda raw: np.where(
        np.isnan(raw["mean radius"]), 2, np.digitize(raw["mean radius"], [2.0, 5.0])
    ),
    "hash": lambda raw: tf.strings.to_hash_bucket_fast(raw["company"], 11).numpy(),
    "hash key": lambda raw: tf.strings.to_hash_bucket_strong(raw["company"], 11, [1, 2]).numpy(),
    "mean": lambda raw: raw["mean radius"] - finite(raw["mean radius"]).mean(),
    "var": lambda raw: raw["mean radius"] - raw["stamp"].astype(np.float64).var(),
    "min": lambda raw: raw["mean radius"] - np.nanmin(raw["mean radius"]),
    "max": lambda raw: raw["stamp"] - raw["stamp"].max(),
    "quantile": lambda raw: (
        raw["mean radius"]
        - np.sort(finite(raw["mean radius"]))[len(finite(raw["mean radius"])) // 2]
    ),
    "pair": lambda raw: z_score(np.stack([raw["mean radius"], raw["same"]], axis=1)),
    "text": lambda raw: np.char.upper(raw["company"].astype(np.bytes_)),
    "derived words": lambda raw: ids_of(
        [value.upper() for value in raw["company"]],
        by_frequency([value.upper() for value in raw["company"]]),
    ),
    "as it is": lambda raw: raw["wide"],
}


@pytest.mark.parametrize("name", MEANINGS)
def test_output_is_what_its_function_means(name: str, features: Arrays, raw: Arrays) -> None:
    expected = MEANINGS[name](raw)

    if features[name].dtype.kind == "f":
        np.testing.assert_allclose(features[name], expected, rtol=2e-5, atol=2e-5)
    else:
        np.testing.assert_array_equal(features[name], expected)


def test_out_of_vocabulary_tokens_get_a_bucket_above_the_terms(
    features: Arrays, raw: Arrays
) -> None:
    terms = len(by_frequency(raw["company"]))
    known = ids_of(raw["company"], by_frequency(raw["company"])) >= 0

    np.testing.assert_array_equal(features["words oov"][known], features["words"][known])
    assert set(features["words oov"][~known]) <= {terms, terms + 1, terms + 2}
    assert (~known).any()


def test_analyzers_follow_one_another(features: Arrays, raw: Arrays) -> None:
    log = np.log1p(raw["mean radius"].astype(np.float64))
    scaled = (log - np.nanmin(log)) / (np.nanmax(log) - np.nanmin(log))
    counts = np.bincount(features["chained"][~np.isnan(log)], minlength=5)

    # Equal up to values that lie on a boundary, where log1p's last bit decides.
    assert (features["chained"] == exact_buckets(scaled, 5)).mean() > 0.9
    assert counts.min() > 120


def test_types_are_those_of_tensorflow_transform(built: Transform) -> None:
    types = {feature.name: feature.dtype for feature in built.features}

    assert types["z"] == types["z stamp"] == types["01"] == types["range"] == "float32"
    assert types["z wide"] == "float64"
    assert types["words"] == types["buckets"] == types["hash"] == "int64"
    assert types["text"] == "string"


def test_only_the_training_split_is_learned_from(built: Transform, raw: Arrays) -> None:
    moments_analyzers = [
        a for a in built.spec.analyzers if (a["kind"], a["of"]) == ("moments", "mean radius")
    ]
    moments = moments_analyzers[0]["answer"]

    assert len(moments_analyzers) == 1  # four functions use it, it is computed once
    assert moments["high"] == np.nanmax(raw["mean radius"])
    assert moments["count"] == np.isfinite(raw["mean radius"]).sum()


def test_label_and_its_column_are_not_in_the_serving_part(built: Transform) -> None:
    columns = [column.name for column in built.serving_columns]
    graph = built.module().compute.concrete_functions[0].graph.as_graph_def()
    ops = [node.op for function in graph.library.function for node in function.node_def]

    assert "tips" not in columns
    assert [column.name for column in built.label_columns] == ["tips"]
    assert "Greater" not in ops
    assert "LookupTableFindV2" in ops


def test_label_is_an_output_of_the_function(built: Transform, raw: Arrays) -> None:
    labels = built.apply_label(tensors(built, raw)).numpy()

    np.testing.assert_array_equal(labels, raw["tips"] > np.float32(raw["tips"].mean()))
    assert built.labels[ONLY].dtype == "int64"
    assert "label" not in [feature.name for feature in built.features]


@pytest.mark.parametrize("way", ["tf.data", "graph", "reloaded", "one row at a time"])
def test_every_way_gives_the_same_bits(
    way: str, built: Transform, features: Arrays, raw: Arrays
) -> None:
    exact = [name for name in features if name not in ("01 same", "chained")]
    found = WAYS[way](built, tensors(built, raw), exact)

    for name in exact:
        np.testing.assert_array_equal(found[name], features[name], err_msg=name)


def by_tf_data(transform: Transform, inputs: dict[str, tf.Tensor], names: list[str]) -> Arrays:
    rows: Any = tf.data.Dataset.from_tensor_slices(cast(Any, inputs))
    batches = rows.batch(64).map(transform.apply_features)
    shapes = {feature.name: (None, *feature.shape) for feature in transform.features}
    assert {k: tuple(v.shape) for k, v in batches.element_spec.items()} == shapes
    parts = list(batches.as_numpy_iterator())
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def by_graph(transform: Transform, inputs: dict[str, tf.Tensor], names: list[str]) -> Arrays:
    found = tf.function(transform.apply_features)(inputs)
    return {name: found[name].numpy() for name in names}


def by_reload(transform: Transform, inputs: dict[str, tf.Tensor], names: list[str]) -> Arrays:
    found = load_transform(transform.root).apply_features(inputs)
    return {name: found[name].numpy() for name in names}


def by_row(transform: Transform, inputs: dict[str, tf.Tensor], names: list[str]) -> Arrays:
    rows = [
        transform.apply_features({name: tensor[i : i + 1] for name, tensor in inputs.items()})
        for i in range(ROWS)
    ]
    return {name: np.concatenate([row[name].numpy() for row in rows]) for name in names}


WAYS = {
    "tf.data": by_tf_data,
    "graph": by_graph,
    "reloaded": by_reload,
    "one row at a time": by_row,
}


def test_scalers_and_buckets_have_the_same_bits_when_compiled(
    dataset: Dataset, raw: Arrays, tmp_path: Path
) -> None:
    def numbers(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        outputs = {}
        for name in ("mean radius", "same", "wide", "stamp"):
            outputs[f"z {name}"] = st.scale_to_z_score(inputs[name])
            outputs[f"range {name}"] = st.scale_by_min_max(inputs[name], -1.0, 3.0)
            outputs[f"buckets {name}"] = st.bucketize(inputs[name], 7)
        del outputs["range same"]  # a sigmoid, which XLA computes in its own way
        return outputs

    transform = build_transform(dataset, numbers, tmp_path / "t", label=None)
    inputs = tensors(transform, raw)
    plain = transform.apply_features(inputs)
    compiled = tf.function(transform.apply_features, jit_compile=True)(inputs)

    for name, values in plain.items():
        np.testing.assert_array_equal(compiled[name], values, err_msg=name)


def test_sizes_for_embeddings_are_given_by_output_and_by_file_name(
    built: Transform, raw: Arrays
) -> None:
    terms = len(by_frequency(raw["company"]))
    output = built.output

    assert output.vocabulary_size("words") == terms
    assert output.vocabulary_size("company.txt") == output.vocabulary_size("words oov") == terms
    assert output.num_buckets("words") == terms
    assert output.num_buckets("words oov") == terms + 3
    assert output.num_buckets("top") == 10  # the default value 9 is an id, too
    assert output.num_buckets("buckets") == 7
    assert output.num_buckets("given") == 3
    assert output.num_buckets("hash") == 11
    with pytest.raises(ConfigError, match="Did you mean 'words'"):
        output.vocabulary_size("wordz")
    with pytest.raises(ConfigError, match="num_buckets needs"):
        output.num_buckets("z")


def test_two_builds_are_alike(built: Transform, dataset: Dataset, tmp_path: Path) -> None:
    again = build_transform(
        dataset,
        every_function,
        tmp_path / "again",
        label="label",
        roles=ColumnRoles(label_only=["tips"]),
    )

    assert (again.root / "spec.json").read_bytes() == (built.root / "spec.json").read_bytes()
    for vocabulary in built.spec.vocabularies.values():
        assert (again.root / vocabulary.file).read_bytes() == (
            built.root / vocabulary.file
        ).read_bytes()


def test_description_is_json_without_nan(built: Transform) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    json.loads((built.root / "spec.json").read_text(), parse_constant=refuse)


def test_damaged_transform_is_refused(built: Transform, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(built.root, copy)
    (copy / "assets" / "company.txt").write_bytes(b"other\n")

    with pytest.raises(DataError, match=r"company\.txt must not have changed since it was written"):
        load_transform(copy)


def test_raw_string_label_becomes_the_place_of_its_class(
    dataset: Dataset, raw: Arrays, tmp_path: Path
) -> None:
    transform = build_transform(
        dataset, lambda inputs: {"x": inputs["tips"]}, tmp_path / "t", label="kind"
    )

    assert transform.output.classes == ("benign", "malignant", "other")
    assert transform.output.num_classes == 3
    np.testing.assert_array_equal(
        transform.apply_label(tensors(transform, raw)),
        [["benign", "malignant", "other"].index(kind.decode()) for kind in raw["kind"]],
    )
    assert transform.apply_label({"kind": tf.constant(["new", ""])}).numpy().tolist() == [-1, -1]


def test_label_of_an_unseen_class_is_named(dataset: Dataset, tmp_path: Path) -> None:
    table = make_table(30, 5, shift=0)
    kinds = pa.array(["benign"] * 20 + ["novel"] + ["other"] * 9)
    changed = table.set_column(table.column_names.index("kind"), "kind", kinds)
    other = write_dataset(tmp_path / "data", COLUMNS, {"train": [table], "eval": [changed]})
    transform = build_transform(
        other, lambda inputs: {"x": inputs["tips"]}, tmp_path / "t", label="kind"
    )

    require_known_labels(transform, other, "train")
    with pytest.raises(DataError, match=r"split 'eval'.*record 21.*novel"):
        require_known_labels(transform, other, "eval")


def test_without_a_function_columns_pass_as_they_are(
    dataset: Dataset, raw: Arrays, tmp_path: Path
) -> None:
    transform = build_transform(
        dataset, None, tmp_path / "t", label="target", roles=ColumnRoles(label_only=["tips"])
    )
    found = transform.apply_features(tensors(transform, raw))

    assert [f.name for f in transform.features] == [c.name for c in COLUMNS[:-2]]
    np.testing.assert_array_equal(found["mean radius"], raw["mean radius"])
    np.testing.assert_array_equal(found["company"], raw["company"])
    np.testing.assert_array_equal(transform.apply_label(tensors(transform, raw)), raw["target"])


def test_a_table_of_the_users_own_is_saved_with_the_graph(
    dataset: Dataset, raw: Arrays, tmp_path: Path
) -> None:
    def function(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        table = st.make_and_track_object(
            lambda: tf.lookup.StaticHashTable(
                tf.lookup.KeyValueTensorInitializer(["benign", "other"], [5, 7]), default_value=0
            )
        )
        looked_up = table.lookup(inputs["kind"])
        return {"kind": looked_up, "z": st.scale_to_z_score(looked_up)}

    transform = build_transform(dataset, function, tmp_path / "t", label=None)
    found = transform.apply_features(tensors(transform, raw))

    codes = {b"benign": 5, b"other": 7, b"malignant": 0}
    expected = np.array([codes[kind] for kind in raw["kind"]])
    np.testing.assert_array_equal(found["kind"], expected)
    np.testing.assert_allclose(found["z"], z_score(expected), atol=1e-5)


def test_exported_model_loads_in_the_session_loader(
    built: Transform, features: Arrays, raw: Arrays, tmp_path: Path
) -> None:
    names = {column.name: f"input_{i}" for i, column in enumerate(built.serving_columns)}
    specs = {
        c.name: tf.TensorSpec([None], tf.as_dtype(c.tensor_dtype), name=names[c.name])
        for c in built.serving_columns
    }
    archive = keras.export.ExportArchive()
    archive.track(built.module())
    archive.add_endpoint("serving_default", built.apply_features, input_signature=[specs])
    archive.write_out(str(tmp_path / "model"), verbose=False)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "model"))
        signature = loaded.signature_def["serving_default"]
        feeds = {signature.inputs[names[n]].name: raw[n] for n in names}
        outputs = {name: info.name for name, info in signature.outputs.items()}
        found = session.run(outputs, feeds)

    for name in ("z", "words", "words oov", "top", "buckets", "hash", "range"):
        np.testing.assert_array_equal(found[name], features[name], err_msg=name)


def test_empty_vocabulary_holds_one_term_that_nothing_is(dataset: Dataset, tmp_path: Path) -> None:
    def function(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        nothing = tf.strings.substr(inputs["company"], 0, 0)
        return {"v": st.compute_and_apply_vocabulary(nothing, num_oov_buckets=1)}

    transform = build_transform(dataset, function, tmp_path / "t", label=None)

    assert transform.output.vocabulary_size("v") == 1
    assert set(transform.apply_features({"company": tf.constant(["", "a"])})["v"].numpy()) == {1}


def test_moments_of_half_floats_and_infinities_are_of_the_finite_values(
    dataset: Dataset, raw: Arrays, tmp_path: Path
) -> None:
    def function(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        half = tf.cast(inputs["target"], tf.float16)
        endless = tf.where(inputs["target"] == 1, math.inf, inputs["tips"])
        return {
            "half": half - st.mean(half),
            "z": st.scale_to_z_score(endless),
            "01": st.scale_to_0_1(endless),
            "max": tf.minimum(endless, st.max(endless)),
        }

    transform = build_transform(dataset, function, tmp_path / "t", label=None)
    found = transform.apply_features(tensors(transform, raw))
    is_finite = raw["target"] == 0
    tips = raw["tips"][is_finite].astype(np.float64)

    assert found["half"].dtype == tf.float16
    np.testing.assert_allclose(
        found["z"].numpy()[is_finite], (tips - tips.mean()) / tips.std(), rtol=1e-4, atol=1e-5
    )
    assert found["01"].numpy()[is_finite].max() == pytest.approx(1.0)
    assert np.isinf(found["max"].numpy()[~is_finite]).all()


def test_progress_is_reported_for_every_pass(dataset: Dataset, tmp_path: Path) -> None:
    reported: list[tuple[int, int, str]] = []

    def function(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {"b": st.bucketize(st.scale_to_0_1(inputs["tips"]), 3)}

    build_transform(
        dataset,
        function,
        tmp_path / "t",
        label=None,
        progress=lambda done, rows, what: reported.append((done, rows, what)),
    )

    assert (ROWS, ROWS, "analysis, pass 1") in reported
    assert (ROWS, ROWS, "analysis, pass 2") in reported


LISTS = (
    Column(name="numbers", dtype="float32", length=VARYING),
    Column(name="words", dtype="string", length=VARYING),
    Column(name="whole", dtype="int64", length=VARYING),
)


def lists_table(numbers: list[Any], words: list[Any], whole: list[Any]) -> pa.Table:
    rows = zip(LISTS, (numbers, words, whole), strict=True)
    return pa.table({column.name: pa.array(each, column.arrow_type) for column, each in rows})


def every_function_of_lists(inputs: dict[str, Any]) -> dict[str, tf.Tensor]:
    numbers, words, whole = inputs["numbers"], inputs["words"], inputs["whole"]
    doubled = numbers * 2.0
    lists = {
        "z": st.scale_to_z_score(numbers),
        "z doubled": st.scale_to_z_score(doubled),
        "01": st.scale_to_0_1(whole),
        "range": st.scale_by_min_max(whole, -1.0, 1.0),
        "words": st.apply_vocabulary(words, st.vocabulary(words, vocab_filename="w")),
        "upper": st.compute_and_apply_vocabulary(tf.strings.upper(words), num_oov_buckets=1),
        "buckets": st.bucketize(numbers, 3),
        "given": st.apply_buckets(numbers, [[0.5]]),
        "hash": st.hash_strings(words, 7),
        "mean": numbers - st.mean(numbers),
        "var": numbers - st.var(doubled),
        "min": whole - st.min(whole),
        "max": whole - st.max(whole * 2),
        "quantile": numbers - st.quantiles(numbers, 2)[0, 0],
    }
    return {name: each.to_tensor(-9, shape=[None, 3]) for name, each in lists.items()}


def test_functions_of_lists_are_those_of_all_their_values(tmp_path: Path) -> None:
    numbers = [[1.0, 2.0], [], [None, 3.0], [0.5]] * 20
    words = [["a"], ["b", "a"], [], ["c", "", "b"]] * 20
    whole = [[1], [], [5, 7], [3]] * 20
    nothing: list[Any] = [[]] * 5  # a shard of its own: a batch without a value
    tables = [lists_table(numbers, words, whole), lists_table(nothing, nothing, nothing)]
    dataset = write_dataset(tmp_path, LISTS, {"train": tables})

    transform = build_transform(dataset, every_function_of_lists, tmp_path / "t", label=None)

    raw = {c.name: to_numpy(c, dataset.table("train").column(c.name)) for c in LISTS}
    found = transform.apply_features({name: tf.constant(raw[name]) for name in raw})
    flat = np.array([1.0, 2.0, 3.0, 0.5])

    def padded(function: Callable[[Any], Any], rows: list[Any]) -> Any:
        filled = [[np.nan if value is None else value for value in row] for row in rows[:4]]
        cells = [[*(function(value) for value in row), -9, -9, -9][:3] for row in filled]
        return np.array([*cells * 20, *[[-9] * 3] * 5])

    terms = {"a": 1, "b": 0, "c": 2, "": -1}
    wanted = {
        "z": padded(lambda x: (x - flat.mean()) / flat.std(), numbers),
        "z doubled": padded(lambda x: (x - flat.mean()) / flat.std(), numbers),
        "01": padded(lambda x: (x - 1) / 6, whole),
        "range": padded(lambda x: (x - 1) / 3 - 1, whole),
        "words": padded(lambda x: terms[x], words),
        "upper": padded(lambda x: terms[x] if x else 3, words),
        "buckets": padded(lambda x: 2 if np.isnan(x) else int(x >= 1.0) + int(x >= 2.0), numbers),
        "given": padded(lambda x: int(np.isnan(x) or x >= 0.5), numbers),
        "hash": padded(lambda x: int(tf.strings.to_hash_bucket_fast(x, 7)), words),
        "mean": padded(lambda x: x - flat.mean(), numbers),
        "var": padded(lambda x: x - 4 * flat.var(), numbers),
        "min": padded(lambda x: x - 1, whole),
        "max": padded(lambda x: x - 14, whole),
        "quantile": padded(lambda x: x - 2.0, numbers),
    }
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6, err_msg=name)
    assert transform.output.num_buckets("upper") == 4
    assert transform.output.num_buckets("hash") == 7
    assert transform.output.vocabulary_size("w") == 3
