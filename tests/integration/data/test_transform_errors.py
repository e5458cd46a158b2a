"""What a user can do wrong in `preprocessing_fn`: one line each, with the line of the user's file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from tests.datasets import write_dataset

import stoker.transform as st
from stoker.core.errors import ConfigError, DataError, UserError
from stoker.data.columns import PADDING, Column
from stoker.data.dataset import Dataset
from stoker.data.features.analysis.labels import require_known_labels
from stoker.data.features.preprocessing.build import ColumnRoles, build_transform
from stoker.data.ingest import IngestConfig, ingest

COLUMNS = (
    Column(name="fare", dtype="float32"),
    Column(name="tips", dtype="float32"),
    Column(name="company", dtype="string"),
    Column(name="empty", dtype="float32"),
)

Inputs = dict[str, Any]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("data")
    table = pa.table(
        {
            "fare": pa.array([1.0, 2.0, None, 4.0] * 10, pa.float32()),
            "tips": pa.array([0.0, 1.0, 2.0, 3.0] * 10, pa.float32()),
            "company": ["a", "b", "", "a"] * 10,
            "empty": pa.array([None] * 40, pa.float32()),
        }
    )
    return write_dataset(root, COLUMNS, {"train": [table]})


def unknown_column(inputs: Inputs) -> Inputs:
    return {"x": inputs["fair"]}  # line of: unknown column


def raises(inputs: Inputs) -> Inputs:
    return {"x": tf.reshape(inputs["fare"], [2, "three"])}  # line of: raises


def branches(inputs: Inputs) -> Inputs:
    return {"x": inputs["fare"] if inputs["tips"][0] > 0 else inputs["tips"]}  # line of: branches


def calls_deeper(inputs: Inputs) -> Inputs:
    def helper(x: Any) -> Any:
        return st.scale_to_z_score(x)  # line of: scaler

    return {"x": helper(inputs["company"])}


def in_a_loop(inputs: Inputs) -> Inputs:
    return {"x": tf.map_fn(lambda one: one - st.mean(one), inputs["fare"])}


def bad_name(inputs: Inputs) -> Inputs:
    return {"v": st.compute_and_apply_vocabulary(inputs["company"], vocab_filename="../v")}


def same_name(inputs: Inputs) -> Inputs:
    return {
        "v": st.compute_and_apply_vocabulary(inputs["company"], vocab_filename="v"),
        "w": st.compute_and_apply_vocabulary(inputs["company"], vocab_filename="v", top_k=1),
    }


def own_table(inputs: Inputs) -> Inputs:
    with tf.init_scope():
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a"], [1]), default_value=0
        )
    return {"v": table.lookup(inputs["company"])}


calls = 0

EAGER = tf.constant([1.0])

WRONG: Any = [1.0, 2.0]


def changes_its_mind(inputs: Inputs) -> Inputs:
    global calls
    calls += 1
    return {"x": st.bucketize(inputs["fare"], 2 + calls)}


def fails_when_it_runs(inputs: Inputs) -> Inputs:
    return {"x": tf.strings.to_number(inputs["company"])}


FUNCTIONS: dict[str, tuple[Callable[[Inputs], Any], str]] = {
    "unknown column": (
        unknown_column,
        r"columns that the data has \(.*, line @unknown column@\)\. Received: 'fair'\. Did .* 'fare'",
    ),
    "raises": (raises, r"failed \(test_transform_errors\.py, line @raises@, in raises\)"),
    "branches on a tensor": (
        branches,
        r"failed \(test_transform_errors\.py, line @branches@, in branches\)",
    ),
    "string to a scaler": (
        calls_deeper,
        r"must be given a dense tensor of numbers \(.*errors\.py, line @scaler@\)\. Received: string",
    ),
    "analyzer in a loop": (in_a_loop, r"mean must be called at the top level of preprocessing_fn"),
    "bad vocabulary name": (bad_name, r"plain file name .*Received: '\.\./v'"),
    "same vocabulary name": (same_name, r"vocab_filename must be unique"),
    "own table": (own_table, r"make_and_track_object"),
    "another question each time": (changes_its_mind, r"must call the same analyzers"),
    "no dict": (lambda inputs: inputs["fare"], r"must return a dict of tensors.*Received: Symb"),
    "no tensor": (lambda inputs: {"x": 3}, r"return dense tensors.*'x': int"),
    "eager tensor": (lambda inputs: {"x": EAGER}, r"'x': .*not depend on the inputs"),
    "ragged": (
        lambda inputs: {"x": tf.strings.split(inputs["company"])},
        r"'x': RaggedTensor",
    ),
    "name is not a string": (lambda inputs: {1: inputs["fare"]}, r"1: a name that is not a string"),
    "scalar": (lambda inputs: {"x": st.mean(inputs["fare"])}, r"'x': shape \(\), whose first"),
    "fixed batch": (lambda inputs: {"x": tf.zeros([4]) + st.mean(inputs["fare"])}, r"shape \(4,\)"),
    "fewer rows": (
        lambda inputs: {"x": tf.unique(inputs["company"]).y},
        r"output 'x' of preprocessing_fn must have one row per record.*3 rows for 17 records",
    ),
    "fails when it runs": (fails_when_it_runs, r"must work on every row of the training split"),
    "no feature": (lambda inputs: {}, r"at least one feature"),
    "label-only column": (
        lambda inputs: {"share": inputs["tips"] / inputs["fare"]},
        r"feature 'share' must not depend on 'tips'",
    ),
    "boundaries of a wrong shape": (
        lambda inputs: {"x": st.apply_buckets(inputs["fare"], WRONG)},
        r"must have the shape \[1, boundaries\]",
    ),
    "no buckets": (
        lambda inputs: {"x": st.bucketize(inputs["fare"], 0)},
        r"num_buckets must be a whole number of at least 1.*Received: 0",
    ),
    "range upside down": (
        lambda inputs: {"x": st.scale_by_min_max(inputs["fare"], 1.0, 0.0)},
        r"output_min .* must be below output_max",
    ),
    "float vocabulary": (
        lambda inputs: {"x": st.compute_and_apply_vocabulary(inputs["fare"])},
        r"must be given strings or integers.*Received: float32",
    ),
    "hash of numbers": (
        lambda inputs: {"x": st.hash_strings(inputs["fare"], 3)},
        r"tensor of strings.*float32",
    ),
    "vocabulary of another kind": (
        lambda inputs: {"x": st.apply_vocabulary(inputs["company"], WRONG)},
        r"the result of vocabulary\(\)",
    ),
    "boundaries of nothing": (
        lambda inputs: {"x": st.bucketize(inputs["empty"], 3)},
        r"must hold a number in the training split",
    ),
}


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# line of: {mark}"))


@pytest.mark.parametrize("fault", FUNCTIONS)
def test_fault_is_one_line_of_the_users(fault: str, dataset: Dataset, tmp_path: Path) -> None:
    function, expected = FUNCTIONS[fault]
    expected = re.sub("@(.+)@", lambda found: str(line_of(found[1])), expected)

    with pytest.raises(UserError, match=expected) as caught:
        build_transform(
            dataset, function, tmp_path / "t", label=None, roles=ColumnRoles(label_only=["tips"])
        )

    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Records of two columns of lists: words of 0 to 2, numbers of 1 to 3."""
    folder = tmp_path_factory.mktemp("lists")
    rows = [{"words": ["a", "b"][: n % 3], "numbers": [0.5] * (n % 3 + 1)} for n in range(60)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ingest(IngestConfig(source=str(folder / "d.jsonl")), folder / "data")


@pytest.mark.parametrize(
    ("function", "label", "expected"),
    [
        (
            lambda inputs: {"x": inputs["words"]},
            None,
            r"'x': RaggedTensor, computed from 'words'\. Make it dense: `st\.hash_strings\(x, 1000\)\.to_tensor\(",
        ),
        (
            lambda inputs: {"x": st.scale_to_0_1(inputs["numbers"])},
            None,
            r"'x': RaggedTensor, computed from 'numbers'\. Make it dense: `x\.to_tensor\(0, shape=\[None, 20\]\)`",
        ),
        (
            None,
            None,
            r"lists of varying length .column 'words'. must be made dense.*exclude: \['words'\].*hash_strings\(inputs\[\"words\"\]",
        ),
        (
            lambda inputs: {"x": inputs["numbers"].to_tensor() * 2.0},
            None,
            r"'x' .* must have the same shape in every batch.*longest list of 'numbers'.*shape=\[None, 20",
        ),
        (
            lambda inputs: {"x": tf.reduce_sum(inputs["numbers"], axis=1)},
            "numbers",
            r"label must hold one value per record.*'numbers', which holds lists of varying length",
        ),
    ],
)
def test_lists_that_a_model_cannot_take_are_named_with_what_makes_them_dense(
    lists: Dataset,
    tmp_path: Path,
    function: Callable[[Inputs], Inputs] | None,
    label: str | None,
    expected: str,
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        build_transform(lists, function, tmp_path / "t", label=label)

    assert "\n" not in str(caught.value)


def test_a_list_of_places_and_one_of_values_are_a_sparse_vector(
    lists: Dataset, tmp_path: Path
) -> None:
    """What docs/how-to/sources.md says of `tf.io.SparseFeature`."""

    def function(inputs: Inputs) -> Inputs:
        at, values = inputs["at"], inputs["value"]
        places = tf.stack([at.value_rowids(), at.flat_values], axis=1)
        return {"x": tf.scatter_nd(places, values.flat_values, [at.nrows(), 4])}

    rows = [{"at": [3, 0][: n % 3], "value": [0.5, 1.5][: n % 3]} for n in range(60)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = ingest(IngestConfig(source=str(tmp_path / "d.jsonl")), tmp_path / "data")

    transform = build_transform(dataset, function, tmp_path / "t", label=None)

    raw = {
        "at": tf.constant([[2, 1], [PADDING["int64"]] * 2]),
        "value": tf.constant([[5.0, 7.0], [float("nan")] * 2]),
    }
    found = transform.apply_features(raw)["x"].numpy()
    assert found.tolist() == [[0.0, 7.0, 5.0, 0.0], [0.0] * 4]


def test_label_that_is_nothing_is_named(dataset: Dataset, tmp_path: Path) -> None:
    expected = r"label must be a raw column or an output.*Received: 'tip'\. Did you mean 'tips'"

    with pytest.raises(ConfigError, match=expected):
        build_transform(dataset, None, tmp_path / "t", label="tip")


def test_feature_made_of_the_label_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    def leaks(inputs: Inputs) -> Inputs:
        return {"double": inputs["fare"] * 2}

    with pytest.raises(ConfigError, match=r"'double' must not depend on 'fare', which serving"):
        build_transform(dataset, leaks, tmp_path / "t", label="fare")


def test_unknown_label_only_column_is_named(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"label_only must name raw columns.*'tip'.*'tips'"):
        build_transform(
            dataset, None, tmp_path / "t", label=None, roles=ColumnRoles(label_only=["tip"])
        )


@pytest.mark.parametrize(
    "call",
    [
        st.scale_to_z_score,
        st.scale_to_0_1,
        lambda x: st.bucketize(x, 3),
        lambda x: st.compute_and_apply_vocabulary(tf.strings.as_string(x)),
        st.mean,
        st.max,
        lambda x: st.quantiles(x, 3),
        lambda x: st.make_and_track_object(lambda: x),
    ],
)
def test_analyzer_outside_of_a_transform_is_refused(call: Callable[[tf.Tensor], Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be called inside preprocessing_fn"):
        call(tf.constant([1.0]))


def test_functions_that_ask_nothing_of_the_data_work_anywhere() -> None:
    x = tf.constant([[4.0, float("nan"), 1.0], [float("-inf"), 7.5, 10.0]])

    # The example in the documentation of tft.apply_buckets.
    assert st.apply_buckets(x, [[2.0, 5.0, 10.0]]).numpy().tolist() == [[1, 3, 0], [0, 2, 3]]
    assert 0 <= int(st.hash_strings(tf.constant(["a"]), 5)[0]) < 5


def test_damaged_shard_is_found_before_it_is_read(dataset: Dataset, tmp_path: Path) -> None:
    root = tmp_path / "data"
    path = root / "train" / "shard-00000.parquet"
    path.parent.mkdir(parents=True)
    content = bytearray((dataset.root / "train" / "shard-00000.parquet").read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    damaged = Dataset(
        root=root,
        columns=dataset.columns,
        splits=dataset.splits,
        column_hashes=dataset.column_hashes,
    )

    def function(inputs: Inputs) -> Inputs:
        return {"x": st.scale_to_z_score(inputs["fare"])}

    with pytest.raises(DataError, match="must have the hash in its manifest"):
        build_transform(damaged, function, tmp_path / "t", label=None)


def test_folder_that_holds_something_is_not_overwritten(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "kept").write_text("mine")

    with pytest.raises(FileExistsError):
        build_transform(dataset, None, tmp_path / "t", label=None)
    assert (tmp_path / "t" / "kept").read_text() == "mine"


def write_source(path: Path) -> Path:
    rows = "".join(f"{n},{n % 7},{n % 2}\n" for n in range(200))
    path.write_text("a,b,label\n" + rows)
    return path


@pytest.mark.parametrize("function", [None, lambda inputs: {"x": inputs["a"] * 2}])
def test_without_an_analyzer_no_shard_is_opened(
    function: Callable[[Inputs], Inputs] | None, tmp_path: Path
) -> None:
    source = write_source(tmp_path / "rows.csv")
    data = ingest(IngestConfig(source=str(source)), tmp_path / "data", label="label")
    for split in data.splits:
        shutil.rmtree(data.root / split)

    transform = build_transform(data, function, tmp_path / "t", label="label")

    assert [f.name for f in transform.features] == (["a", "b"] if function is None else ["x"])
    assert [label.dtype for label in transform.labels.values()] == ["int64"]


def test_of_a_label_only_its_own_pages_are_read(tmp_path: Path) -> None:
    source = write_source(tmp_path / "rows.csv")
    source.write_text(source.read_text().replace(",1\n", ",yes\n").replace(",0\n", ",no\n"))
    data = ingest(IngestConfig(source=str(source)), tmp_path / "data", label="label")
    for path in (path for split in data.splits for path in data.paths(split)):
        start = pq.read_metadata(path).row_group(0).column(0).dictionary_page_offset
        raw = bytearray(path.read_bytes())
        raw[start : start + 20] = bytes(20)
        path.write_bytes(raw)

    transform = build_transform(data, None, tmp_path / "t", label="label")
    for split in data.splits:
        require_known_labels(transform, data, split)

    assert [label.classes for label in transform.labels.values()] == [("no", "yes")]
    with pytest.raises(DataError, match="must be an undamaged Parquet file"):
        list(data.batches("train", columns=["a"], whole=False))
    with pytest.raises(DataError, match="must have the hash in its manifest"):
        list(data.batches("train", columns=["label"]))


def test_a_function_is_still_tried_on_rows_where_there_is_a_sample(tmp_path: Path) -> None:
    source = write_source(tmp_path / "rows.csv")
    data = ingest(IngestConfig(source=str(source)), tmp_path / "data")

    with pytest.raises(ConfigError, match=r"must have one row per record.*7 rows for 17 records"):
        build_transform(
            data, lambda inputs: {"x": tf.unique(inputs["b"]).y}, tmp_path / "t", label=None
        )


def test_a_changed_sample_is_found(tmp_path: Path) -> None:
    source = write_source(tmp_path / "rows.csv")
    data = ingest(IngestConfig(source=str(source)), tmp_path / "data")
    sample = data.root / "sample.parquet"
    raw = bytearray(sample.read_bytes())
    raw[40] ^= 1
    sample.write_bytes(raw)

    with pytest.raises(DataError, match=r"sample\.parquet must have the hash in its manifest"):
        build_transform(data, None, tmp_path / "t", label=None)
