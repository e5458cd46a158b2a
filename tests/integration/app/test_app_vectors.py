"""Vectors from a Parquet file to a served answer, the same over each interface."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import stoker
from stoker.app.experiment import load_experiment
from stoker.app.smoke_test import smoke_test
from stoker.cli.main import invoke
from stoker.client.grpc_client import GrpcClient
from stoker.client.rest_client import RestClient
from stoker.client.rows import Request, json_instances
from stoker.core.errors import ConfigError, UserError
from stoker.core.multi_output import ONLY
from stoker.data.columns import VARYING, Column, to_numpy
from stoker.data.dataset import load_dataset
from stoker.data.features.preprocessing.transform import load_transform
from stoker.data.feed.pipeline import Feed
from stoker.export.signatures import (
    EXAMPLES_INPUT,
    SERVING_DEFAULT,
    SERVING_EXAMPLES,
    make_examples,
)
from stoker.registry.exported_model import load_model
from stoker.scaffold import write_experiment
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server
from stoker.train.config import TrainConfig
from stoker.train.setup.feeds import open_feeds

from .conftest import Trained

STOKER_YAML = """\
name: vectors
data: {source: data.parquet}
model: model:build
preprocessing: model:preprocessing_fn
label: liked
train: {epochs: 2, batch_size: 32, deterministic: true}
evaluate: {metrics: [auc], slices: [age]}
"""

MODEL_PY = """\
import keras
import tensorflow as tf
from keras import layers

import stoker.transform as st


def preprocessing_fn(inputs):
    image = st.scale_to_z_score(inputs["image floats"])
    return {
        "image": tf.where(tf.math.is_nan(image), 0.0, image),
        "level": st.bucketize(inputs["image floats"], 4),
        "counts": st.scale_to_0_1(inputs["counts"]),
        "largest": tf.fill(tf.shape(inputs["age"]), st.max(inputs["counts"])),
        "tags": st.compute_and_apply_vocabulary(inputs["tags"], num_oov_buckets=1),
        "words": st.compute_and_apply_vocabulary(
            inputs["words"], num_oov_buckets=1
        ).to_tensor(0, shape=[None, 4]),
        "hashed": st.hash_strings(inputs["words"], 50).to_tensor(0, shape=[None, 2]),
        "many words": tf.cast(inputs["words"].row_lengths(), tf.float32),
        "spent": tf.reduce_sum(st.scale_to_0_1(inputs["prices"]), axis=1),
        "dearest": tf.fill([inputs["prices"].nrows()], st.max(inputs["prices"])),
    }


def build(features, transform):
    tags = layers.Embedding(transform.num_buckets("tags"), 4)(features["tags"])
    words = layers.Embedding(transform.num_buckets("words"), 4)(features["words"])
    parts = [features["image"], features["counts"], layers.Flatten()(tags), layers.Flatten()(words)]
    parts += [layers.Reshape((1,))(features[name]) for name in ("many words", "spent")]
    x = layers.Concatenate()(parts)
    x = layers.Dense(8, activation="relu")(x)
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model
"""


def write_parquet(path: Path, *, rows: int = 400) -> None:
    """Bright images with the tag `cat` are liked; some pixels and some tags are missing."""
    rng = np.random.default_rng(0)
    image = rng.normal(size=(rows, 16)).astype(np.float32)
    tags = rng.choice(["cat", "dog", "tree", ""], (rows, 3))
    liked = image.mean(axis=1) + (tags == "cat").any(axis=1) > 0.5
    image[rng.random(image.shape) < 0.02] = np.nan
    words = [rng.choice(["red", "blue", ""], size).tolist() for size in rng.integers(0, 6, rows)]
    prices = [rng.gamma(2.0, size=size).tolist() for size in rng.integers(0, 5, rows)]
    table = {
        "image floats": pa.array(image.tolist(), pa.list_(pa.float32(), 16)),
        "counts": pa.array(rng.integers(0, 50, (rows, 5)).tolist(), pa.list_(pa.int64())),
        "tags": pa.array(tags.tolist(), pa.list_(pa.string())),
        "words": pa.array(words, pa.list_(pa.string())),
        "prices": pa.array(prices, pa.list_(pa.float32())),
        "age": pa.array(rng.integers(18, 21, rows)),
        "liked": pa.array(liked.astype(np.int64)),
    }
    pq.write_table(pa.table(table), path)


def write_folder(path: Path) -> Path:
    path.mkdir()
    (path / "stoker.yaml").write_text(STOKER_YAML)
    (path / "model.py").write_text(MODEL_PY)
    write_parquet(path / "data.parquet")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(write_folder(tmp_path_factory.mktemp("vectors") / "vectors"))


def test_vectors_reach_the_signature_with_their_length(trained: Trained) -> None:
    loaded = load_model(trained.chain.output("export"))
    shapes = {name: str(spec) for name, spec in loaded.signatures[SERVING_DEFAULT].inputs.items()}
    loaded.close()

    assert shapes == {
        "image floats": "float32 of shape [-1,16]",
        "counts": "int64 of shape [-1,5]",
        "tags": "string of shape [-1,3]",
        "words": "string of shape [-1,-1]",
        "prices": "float32 of shape [-1,-1]",
        "age": "int64 of shape [-1]",
    }


def test_analyzers_reduce_over_all_values_of_all_vectors(trained: Trained) -> None:
    """As TensorFlow Transform does without `elementwise`; NumPy is the judge."""
    raw = trained.rows("train")
    features = {n: t.numpy() for n, t in trained.transform.apply_features(as_tensors(raw)).items()}

    image = raw["image floats"].astype(np.float64)
    scaled = (image - np.nanmean(image)) / np.nanstd(image)
    np.testing.assert_allclose(features["image"], np.nan_to_num(scaled), atol=1e-5)
    values = np.sort(image[~np.isnan(image)])
    bounds = values[[len(values) * part // 4 for part in (1, 2, 3)]]
    np.testing.assert_array_equal(features["level"], np.searchsorted(bounds, image, side="right"))
    counts = raw["counts"]
    wide = (counts - counts.min()) / (counts.max() - counts.min())
    np.testing.assert_allclose(features["counts"], wide, atol=1e-6)
    assert set(features["largest"].tolist()) == {counts.max()}
    found, times = np.unique(raw["tags"][raw["tags"] != b""].astype(bytes), return_counts=True)
    terms = [term for _, term in sorted(zip(times, found, strict=True), reverse=True)]
    ids = [[terms.index(t) if t else len(terms) for t in row] for row in raw["tags"].tolist()]
    np.testing.assert_array_equal(features["tags"], ids)


def test_lists_of_varying_length_are_ragged_and_made_dense_by_the_function(
    trained: Trained,
) -> None:
    raw = trained.rows("train")
    features = {n: t.numpy() for n, t in trained.transform.apply_features(as_tensors(raw)).items()}
    table = trained.dataset.table("train", columns=["words", "prices"])
    words, prices = table.column("words").to_pylist(), table.column("prices").to_pylist()

    assert {len(row) for row in words} == {0, 1, 2, 3, 4, 5}
    flat = [word for row in words for word in row]
    terms = sorted({"red", "blue"}, key=flat.count, reverse=True)
    ids = [[terms.index(word) if word else 2 for word in row] for row in words]
    np.testing.assert_array_equal(features["words"], [(row + [0] * 4)[:4] for row in ids])
    np.testing.assert_array_equal(features["many words"], [len(row) for row in words])
    all_prices = [price for row in prices for price in row]
    low, high = min(all_prices), max(all_prices)
    spent = [sum((price - low) / (high - low) for price in row) for row in prices]
    np.testing.assert_allclose(features["spent"], spent, atol=1e-5)
    assert set(features["dearest"].tolist()) == {np.float32(high)}
    specs = {each.name: each.shape for each in trained.transform.features}
    assert (specs["words"], specs["hashed"], specs["spent"]) == ((4,), (2,), ())
    learned = [call for call in trained.transform.spec.analyzers if call["of"] == "words"]
    assert [call["is_raw_column"] for call in learned] == [
        True
    ]  # DuckDB computes it from the shards


def test_padding_after_the_longest_list_changes_nothing(trained: Trained) -> None:
    raw = trained.rows("eval")
    nothing = {"words": np.full((len(raw["words"]), 3), b"", object)}
    nothing["prices"] = np.full((len(raw["words"]), 70), np.nan, np.float32)
    wider = raw | {name: np.hstack([raw[name], more]) for name, more in nothing.items()}

    features = trained.transform.apply_features(as_tensors(raw))
    for name, values in trained.transform.apply_features(as_tensors(wider)).items():
        np.testing.assert_array_equal(values, features[name])
    empty = {"words": raw["words"][:, :0], "prices": raw["prices"][:, :0]}
    without = trained.transform.apply_features(as_tensors(raw | empty))
    assert not without["many words"].numpy().any()


def as_tensors(raw: dict[str, Any]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(values) for name, values in raw.items()}


@pytest.mark.parametrize("memory_bytes", [0, 1 << 34])
def test_the_training_feed_and_the_transform_give_the_same_features(
    trained: Trained, memory_bytes: int
) -> None:
    feed, _ = open_feeds(
        trained.dataset, trained.transform, config=TrainConfig(), memory_bytes=memory_bytes
    )
    assert isinstance(feed, Feed)
    assert feed.keeps_features == (memory_bytes > 0)

    with feed.in_order(batch_size=feed.rows) as batches:
        fed, _ = feed.load(next(iter(batches)))

    expected = trained.transform.apply_features(as_tensors(trained.rows("train")))
    for name, values in fed.items():
        assert values.shape[1:] == expected[name].shape[1:]
        np.testing.assert_array_equal(values, expected[name])


def test_both_signatures_answer_alike_where_values_are_missing_too(trained: Trained) -> None:
    rows = trained.rows("eval")
    loaded = load_model(trained.chain.output("export"))
    (plain,) = loaded.call(SERVING_DEFAULT, rows).values()
    examples = make_examples(trained.transform.serving_columns, rows)
    (parsed,) = loaded.call(SERVING_EXAMPLES, {EXAMPLES_INPUT: examples}).values()
    loaded.close()

    assert np.isnan(rows["image floats"]).any()
    np.testing.assert_array_equal(plain, parsed)


def test_an_example_without_a_vector_that_may_be_missing_is_answered(trained: Trained) -> None:
    rows = {name: values[:1].copy() for name, values in trained.rows("eval").items()}
    rows["image floats"][:] = np.nan
    (example,) = make_examples(trained.transform.serving_columns, rows)
    assert "image floats" not in tf.train.Example.FromString(example).features.feature

    loaded = load_model(trained.chain.output("export"))
    (plain,) = loaded.call(SERVING_DEFAULT, rows).values()
    (parsed,) = loaded.call(
        SERVING_EXAMPLES, {EXAMPLES_INPUT: np.array([example], object)}
    ).values()
    loaded.close()

    np.testing.assert_allclose(plain, parsed, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def served(trained: Trained) -> Iterator[tuple[str, str]]:
    """URL of the REST server and address of the gRPC server."""
    root = trained.experiment.models_root
    server = Server(ServeConfig(root=root, rest_port=0, grpc_port=0, lame_duck_s=0.0, drain_s=5))
    server.start()
    try:
        assert server.wait_until_ready(60)
        yield f"http://127.0.0.1:{server.rest_port}", f"127.0.0.1:{server.grpc_port}"
    finally:
        server.stop()


def test_rows_columns_and_tensors_are_answered_alike(
    trained: Trained, served: tuple[str, str]
) -> None:
    url, address = served
    rows = {name: values[:7] for name, values in trained.rows("eval").items()}
    instances = json_instances(rows, binary=())
    assert len(instances[0]["image floats"]) == 16
    columns = {name: [row[name] for row in instances] for name in rows}

    with RestClient(url) as rest, GrpcClient(address) as over_grpc:
        by_rows = rest.predict("vectors", instances).outputs[ONLY]
        answers = over_grpc.predict("vectors", rows)
    by_columns = post(f"{url}/v1/models/vectors:predict", {"inputs": columns})["outputs"]

    assert answers.version == 1
    (by_tensors,) = answers.outputs.values()
    np.testing.assert_allclose(by_rows, by_tensors, rtol=1e-6)
    np.testing.assert_allclose(by_columns, by_tensors, rtol=1e-6)


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_examples_with_lists_are_answered_as_evaluate_answers_them(
    trained: Trained, served: tuple[str, str]
) -> None:
    rows = trained.rows("eval")
    loaded = load_model(trained.chain.output("export"))
    (evaluated,) = loaded.call(SERVING_DEFAULT, rows).values()
    loaded.close()
    examples = make_examples(trained.transform.serving_columns, rows)
    held = [tf.train.Example.FromString(each).features.feature["words"] for each in examples]
    assert {len(words.bytes_list.value) for words in held} == {0, 1, 2, 3, 4, 5}

    instances = [{"b64": base64.b64encode(example).decode()} for example in examples]
    body = {"signature_name": SERVING_EXAMPLES, "instances": instances}
    answers = post(f"{served[0]}/v1/models/vectors:predict", body)["predictions"]

    np.testing.assert_array_equal(np.array(answers, np.float32), evaluated)


def test_lists_of_different_lengths_by_name_are_refused_with_the_input(
    trained: Trained, served: tuple[str, str]
) -> None:
    rows = {column: values[:2] for column, values in trained.rows("eval").items()}
    first, second = json_instances(rows, binary=())
    instances = [first | {"words": ["red"]}, second | {"words": []}]

    assert "key: words" in refusal_of(served[0], {"instances": instances})


@pytest.mark.parametrize("client", [RestClient, GrpcClient])
def test_the_client_pads_lists_of_different_lengths(
    trained: Trained, served: tuple[str, str], client: type[RestClient | GrpcClient]
) -> None:
    table = trained.dataset.table("eval", columns=["words", "prices"]).slice(0, 9)
    lists = table.to_pylist()
    assert len({len(each["words"]) for each in lists}) > 2
    raw = {name: values[:9] for name, values in trained.rows("eval").items()}
    rows = [r | each for r, each in zip(json_instances(raw, binary=()), lists, strict=True)]
    columns = {name: [row[name] for row in rows] for name in raw}

    with client(served[client is GrpcClient]) as asking:
        together = asking.ask("vectors", Request(rows=rows)).outputs
        by_columns = asking.ask("vectors", Request(columns=columns)).outputs
        alone = [asking.ask("vectors", Request(rows=[row])).outputs for row in rows]

    (answers,) = together.values()
    assert len(np.unique(answers)) > 2
    for name in together:
        np.testing.assert_allclose(answers, np.concatenate([one[name] for one in alone]), rtol=1e-5)
    np.testing.assert_array_equal(next(iter(by_columns.values())), answers)


def test_call_and_bench_pad_lists_of_different_lengths(
    trained: Trained, served: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (row,) = json_instances({n: v[:1] for n, v in trained.rows("eval").items()}, binary=())
    data, (url, address) = tmp_path / "rows.json", served
    lists = [["blue"], ["red"], [], ["red"]]  # bench's first request needs no padding
    data.write_text(json.dumps([row | {"words": words} for words in lists]))
    options = ["vectors", "--data", str(data), "--json"]
    load = ["bench", url, "--model", *options, "--batch", "2", "--closed", "--seconds", "0.2"]

    assert invoke(["call", *options, "--url", url], debug=False) == 0
    by_rest = json.loads(capfd.readouterr().out)["predictions"]
    assert invoke(["call", *options, "--url", address, "--grpc"], debug=False) == 0
    by_grpc = json.loads(capfd.readouterr().out)["predictions"]
    assert invoke(load, debug=False) == 0
    loaded = json.loads(capfd.readouterr().out)

    np.testing.assert_allclose(by_rest, by_grpc, rtol=1e-5)
    assert len({tuple(np.ravel(answer).round(5)) for answer in by_rest}) == 3
    assert loaded["answered"] > 1
    assert not loaded["errors"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "words",
            b"red",
            "input 'words' must be string of shape [-1,-1]. Received: string of shape [1].",
        ),
        ("words", [[b"red"]], "Received: string of shape [1,1,1]."),
        (
            "prices",
            1.5,
            "input 'prices' must be float32 of shape [-1,-1]. Received: float32 of shape [1].",
        ),
    ],
)
def test_a_list_of_another_rank_is_refused_by_name_and_shape(
    trained: Trained, served: tuple[str, str], name: str, value: Any, said: str
) -> None:
    rows = {column: values[:1] for column, values in trained.rows("eval").items()}
    rows[name] = np.array([value], object if name == "words" else np.float32)
    columns = {column: [row[column] for row in json_instances(rows, binary=())] for column in rows}

    with (
        GrpcClient(served[1]) as client,
        pytest.raises(UserError, match="INVALID_ARGUMENT") as over_grpc,
    ):
        client.predict("vectors", rows)
    refusals = [
        refusal_of(served[0], {"instances": json_instances(rows, binary=())}),
        refusal_of(served[0], {"inputs": columns}),
        over_grpc.value.line(),
    ]

    for text in refusals:
        assert said in text
        assert "function_node" not in text


def refusal_of(url: str, body: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{url}/v1/models/vectors:predict", body)
    assert caught.value.code == 400
    error: str = json.load(caught.value)["error"]
    return error


def test_metadata_tells_the_length(served: tuple[str, str]) -> None:
    with urllib.request.urlopen(f"{served[0]}/v1/models/vectors/metadata") as response:
        signatures = json.load(response)["metadata"]["signature_def"]["signature_def"]

    shape = signatures["serving_default"]["inputs"]["image floats"]["tensor_shape"]
    assert [dim["size"] for dim in shape["dim"]] == ["-1", "16"]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("image floats", lambda old: old[:-1], r"Matrix size-incompatible.*'image floats' must be"),
        ("image floats", lambda old: old[0], r"Ranks of all input tensors should match"),
        ("counts", lambda old: [*old[:-1], 1.5], "key: counts .*not of expected type: int64"),
        ("tags", lambda old: [*old[:-1], None], "key: tags .*not of expected type: string"),
    ],
)
def test_a_vector_that_does_not_fit_is_refused_by_name(
    trained: Trained,
    served: tuple[str, str],
    name: str,
    change: Callable[[Any], Any],
    said: str,
) -> None:
    rows = {column: values[:1] for column, values in trained.rows("eval").items()}
    (row,) = json_instances(rows, binary=())

    with (
        RestClient(served[0]) as client,
        pytest.raises(UserError, match=f"HTTP 400.*{said}"),
    ):
        client.predict("vectors", [row | {name: change(row[name])}])


def test_a_run_is_proved_on_vectors_too(trained: Trained) -> None:
    proof = smoke_test(trained.experiment, trained.chain)

    assert len(proof.answers) == 5
    assert all(answer.rest == answer.grpc for answer in proof.answers)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("label: liked", "label: counts", "must hold one value per record.*vectors of length 5"),
        (
            "label: liked",
            "label: prices",
            "must hold one value per record.*lists of varying length",
        ),
        ("slices: [age]", "slices: [tags]", "hold one value per record.*'tags'.*length 3"),
        (
            "slices: [age]",
            "slices: [words]",
            "hold one value per record.*'words'.*lists of varying length",
        ),
        (
            "preprocessing: model:preprocessing_fn\n",
            "",
            r"lists of varying length \(column 'words'\).*exclude: \['words'\].*to_tensor\(0, shape",
        ),
    ],
)
def test_a_vector_as_label_or_slice_is_one_clear_error(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    folder = write_folder(tmp_path / "vectors")
    code = (folder / "model.py").read_text().replace('"counts": st', '"shares": st')
    (folder / "model.py").write_text(code)
    (folder / "stoker.yaml").write_text(STOKER_YAML.replace(old, new))

    with pytest.raises(ConfigError, match=said):
        stoker.run(load_experiment(folder), until="transform")


def test_a_label_of_vectors_of_length_1_is_their_one_value(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "vectors")
    table = pq.read_table(folder / "data.parquet")
    lists = pa.FixedSizeListArray.from_arrays(table["liked"].combine_chunks(), 1)
    place = table.schema.get_field_index("liked")
    pq.write_table(table.set_column(place, "liked", lists), folder / "data.parquet")

    chain = stoker.run(load_experiment(folder), until="transform")

    transform = load_transform(chain.output("transform"))
    dataset = load_dataset(chain.output("ingest"))
    raw = to_numpy(dataset.column("liked"), dataset.table("train").column("liked"))
    assert raw.shape[1:] == (1,)
    np.testing.assert_array_equal(transform.apply_label({"liked": tf.constant(raw)}), raw[:, 0])


@pytest.mark.soak
def test_what_init_writes_for_vectors_runs_as_it_is(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data.parquet", rows=200)

    written = write_experiment(tmp_path / "new", tmp_path / "data.parquet")
    experiment = load_experiment(
        tmp_path / "new", overrides=["train.epochs=1", "evaluate.gates={}"]
    )
    chain = stoker.run(experiment)

    assert written.label == "liked"
    assert chain.results["push"]["version"] == 1
    columns = load_dataset(chain.output("ingest")).columns
    assert Column(name="tags", dtype="string", length=3) in columns
    assert Column(name="words", dtype="string", length=VARYING) in columns
    code = (tmp_path / "new" / "model.py").read_text()
    assert 'LISTS = ["words", "prices"]' in code
    widths = {f.name: f.shape for f in load_transform(chain.output("transform")).features}
    assert (widths["words"], widths["prices"]) == ((20,), (20,))


def test_without_a_function_vectors_pass_as_they_are(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "vectors")
    table = pq.read_table(folder / "data.parquet")
    pq.write_table(table.drop_columns(["words", "prices"]), folder / "data.parquet")
    (folder / "stoker.yaml").write_text(
        STOKER_YAML.replace("preprocessing: model:preprocessing_fn\n", "")
    )

    chain = stoker.run(load_experiment(folder), until="transform")

    features = load_transform(chain.output("transform")).features
    assert {(f.name, f.dtype, f.shape) for f in features} == {
        ("image floats", "float32", (16,)),
        ("counts", "int64", (5,)),
        ("tags", "string", (3,)),
        ("age", "int64", ()),
    }
