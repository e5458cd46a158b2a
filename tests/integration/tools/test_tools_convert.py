"""Conversions of real models answer as the model does; one that would not is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests.integration.app.conftest import MODEL_PY, STOKER_YAML, write_csv

from stoker.cli.main import invoke
from stoker.core.errors import CheckFailed, ConfigError, UserError
from stoker.export import conversion, tfjs
from stoker.export.conversion import FORMATS, Conversion, ConversionSource
from stoker.export.model_format import Arrays, UnsupportedOperationsError
from stoker.export.signatures import SERVING_DEFAULT, SERVING_TRANSFORMED, TRANSFORM_FEATURES

LITERT = ("litert", "litert-float16", "litert-int8")
X = {"x": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)}


TFJS_PYTHON = Path(__file__).parents[3] / ".tools" / "tfjs" / "bin" / "python"
"""Made by `make test`: tensorflowjs' own requirements name a TensorFlow of 2024."""


def need(form: str) -> None:
    """Skip where what writes a form is not installed; in CI it must be."""
    try:
        (tfjs.tfjs_format(TFJS_PYTHON) if form == "tfjs" else FORMATS[form]).require()
    except ConfigError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"must be there in CI: {error}")
        pytest.skip(str(error))


def convert(
    saved_model: Path,
    to: str,
    out: Path,
    *,
    rows: Arrays,
    representative: Arrays,
    tfjs_python: Path | None = TFJS_PYTHON,
    **options: Any,
) -> Conversion:
    source = ConversionSource(saved_model=saved_model, rows=rows, representative=representative)
    return conversion.convert(source, to, out, tfjs_python=tfjs_python, **options)


def export(folder: Path, endpoints: Mapping[str, Any], *tracked: Any) -> Path:
    archive = keras.export.ExportArchive()
    for one in tracked:
        archive.track(one)
    for name, (call, specs) in endpoints.items():
        archive.add_endpoint(name, tf.function(call), input_signature=specs)
    archive.write_out(str(folder), verbose=False)
    return folder


def numbers(*shape: int) -> list[tf.TensorSpec]:
    return [tf.TensorSpec([None, *shape], tf.float32, name="x")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A perceptron; one after a transform of text; operations that no format has; a table."""
    folder = tmp_path_factory.mktemp("models")
    keras.utils.set_random_seed(1)
    dense = keras.Sequential(
        [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3, activation="softmax")]
    )
    dense.build((None, 4))
    texts = [tf.TensorSpec([None], tf.string, name="text")]

    def transform(text: tf.Tensor) -> dict[str, tf.Tensor]:
        length = tf.cast(tf.strings.length(text), tf.float32)
        x = tf.stack([length, length / 2, length**0.5, -length], axis=1)
        ids = tf.cast(tf.strings.length(text), tf.int64) % 4
        return {"x": x, "offset": length[:, None], "ids": ids}

    def behind(x: tf.Tensor, offset: tf.Tensor, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        # Constants of 64 bits, which TensorFlow.js writes as 32.
        place = tf.where(ids < tf.constant(0, tf.int64), ids + tf.constant(4, tf.int64), ids)
        return {
            "p": dense(x) - offset + tf.gather(tf.constant([[0.5], [1.0], [2.0], [4.0]]), place)
        }

    table: Any = tf.Module()
    keys = tf.lookup.KeyValueTensorInitializer([1, 2], [3.0, 4.0], tf.int64, tf.float32)
    table.table = tf.lookup.StaticHashTable(keys, -1.0)
    return {
        "dense": export(
            folder / "dense", {SERVING_DEFAULT: (lambda x: {"p": dense(x)}, numbers(4))}, dense
        ),
        "text": export(
            folder / "text",
            {
                SERVING_DEFAULT: (lambda text: behind(**transform(text)), texts),
                TRANSFORM_FEATURES: (transform, texts),
                SERVING_TRANSFORMED: (
                    behind,
                    [
                        *numbers(4),
                        tf.TensorSpec([None, 1], tf.float32, name="offset"),
                        tf.TensorSpec([None], tf.int64, name="ids"),
                    ],
                ),
            },
            dense,
        ),
        "betainc": export(
            folder / "betainc",
            {SERVING_DEFAULT: (lambda x: {"y": tf.math.betainc(x, x, x)}, numbers(4))},
        ),
        "sin": export(folder / "sin", {SERVING_DEFAULT: (lambda x: {"y": tf.sin(x)}, numbers(4))}),
        "log": export(
            folder / "log", {SERVING_DEFAULT: (lambda x: {"y": tf.math.log(x)}, numbers(4))}
        ),
        "table": export(
            folder / "table",
            {
                SERVING_DEFAULT: (
                    lambda key: {"y": table.table.lookup(key)},
                    [tf.TensorSpec([None], tf.int64, name="key")],
                )
            },
            table,
        ),
    }


# Each form of another package takes a process that imports TensorFlow: few, and each says much.


@pytest.mark.parametrize("form", [*LITERT, "onnx", "tfjs"])
def test_a_converted_model_answers_as_the_savedmodel(
    models: dict[str, Path], tmp_path: Path, form: str
) -> None:
    need(form)
    made = convert(models["dense"], form, tmp_path / "out", rows=X, representative=X)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    found = FORMATS[form].run(tmp_path / "out", SERVING_DEFAULT, X)

    assert made.signature == SERVING_DEFAULT
    assert made.why == ""
    assert made.rows == 64
    assert made.tolerance > 0
    assert made.differences["p"] <= made.tolerance
    assert made.same_choice["p"] > 0.9
    assert report["differences"] == made.differences
    # What is in the folder is what was compared.
    loaded = tf.saved_model.load(str(models["dense"]))
    expected = loaded.signatures[SERVING_DEFAULT](x=tf.constant(X["x"]))["p"].numpy()
    np.testing.assert_allclose(found["p"], expected, rtol=2 * made.tolerance, atol=made.tolerance)


@pytest.mark.parametrize("form", ["litert", pytest.param("tfjs", marks=pytest.mark.soak)])
def test_text_is_left_to_the_transform(models: dict[str, Path], tmp_path: Path, form: str) -> None:
    need(form)
    rows = {"text": np.array([b"a" * n for n in range(32)], dtype=object)}
    made = convert(models["text"], form, tmp_path / "out", rows=rows, representative=rows)

    assert made.signature == SERVING_TRANSFORMED
    assert "text (in text)" in made.why
    assert made.inputs == {
        "x": "float32 of shape [-1,4]",
        "offset": "float32 of shape [-1,1]",
        "ids": "int64 of shape [-1]",
    }
    assert set(json.loads((tmp_path / "out" / "inputs.json").read_text())) == set(made.inputs)
    with pytest.raises(UnsupportedOperationsError, match=r"text \(in text\)"):
        convert(
            models["text"], form, tmp_path / "no", rows=rows, representative=rows,
            signature=SERVING_DEFAULT,
        )  # fmt: skip
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("model", "form", "named"),
    [
        ("betainc", "litert-int8", "Betainc"),
        ("betainc", "onnx", "Betainc"),
        ("table", "litert", "HashTableV2"),
        pytest.param("table", "tfjs", "HashTableV2", marks=pytest.mark.soak),
    ],
)
def test_what_a_form_has_no_word_for_is_named(
    models: dict[str, Path], tmp_path: Path, model: str, form: str, named: str
) -> None:
    need(form)
    rows = X if model == "betainc" else {"key": np.array([1, 2, 3])}

    with pytest.raises(UnsupportedOperationsError, match=named):
        convert(models[model], form, tmp_path / "out", rows=rows, representative=rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("form", "shape", "value"),
    [
        *((form, [], np.float32(3.0)) for form in LITERT),  # a model without rows
        # As in TensorFlow Serving's own example, the request has no last axis.
        ("litert", [None, 1], np.array([1, 2], np.float32)),
        pytest.param("onnx", [], np.float32(3.0), marks=pytest.mark.soak),
        pytest.param("onnx", [None, 1], np.array([1, 2], np.float32), marks=pytest.mark.soak),
    ],
)
def test_what_the_savedmodel_takes_its_form_takes(
    tmp_path: Path, form: str, shape: list[int | None], value: Any
) -> None:
    need(form)
    specs = [tf.TensorSpec(shape, tf.float32, name="x")]
    half = export(tmp_path / "half", {SERVING_DEFAULT: (lambda x: {"y": x * 0.5 + 2.0}, specs)})
    rows = {"x": np.asarray(value)}
    made = convert(half, form, tmp_path / "out", rows=rows, representative=rows)

    assert made.rows == value.size
    assert made.differences["y"] <= made.tolerance


def test_int8_leaves_nothing_in_floats_silently(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperationsError) as error:
        convert(models["sin"], "litert-int8", tmp_path / "out", rows=X, representative=X)

    assert error.value.operations == ("SIN",)
    assert convert(models["sin"], "litert", tmp_path / "out", rows=X, representative=X).rows == 64


def test_nan_and_infinity_are_answers_like_others(models: dict[str, Path], tmp_path: Path) -> None:
    rows = {"x": np.array([[1.0, 0.0, -1.0, np.nan]], np.float32)}
    made = convert(models["log"], "litert", tmp_path / "out", rows=rows, representative=rows)

    assert made.differences["y"] < 1e-6


def test_int8_is_only_as_good_as_the_rows_that_measured_its_ranges(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Ranges of a thousandth cut the real rows off: the check sees it, and nothing is left."""
    small = {"x": X["x"] / 1000}

    with pytest.raises(CheckFailed, match="for output 'p'"):
        convert(
            models["dense"], "litert-int8", tmp_path / "out", rows=X, representative=small,
            tolerance=0.02,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("expected", "found", "off"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 4.0], 0.25),
        ([0.0], [0.5], 0.5),
        ([np.nan, np.inf], [np.nan, np.inf], 0.0),
        ([np.nan], [1.0], np.inf),
        ([1.0], [np.nan], np.inf),
        ([np.inf], [1.0], np.inf),
        ([-np.inf], [np.inf], np.inf),
        ([1.0, 2.0], [1.0], np.inf),
        ([True, False], [True, True], np.inf),
        ([2**60], [2**60 + 2**55], 2**55 / (1 + 2**60)),
    ],
)
def test_how_far_an_answer_is_off(expected: list[Any], found: list[Any], off: float) -> None:
    assert conversion._difference(np.array(expected), np.array(found)) == pytest.approx(off)


def test_packages_that_are_missing_are_named_with_the_command(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for form, said in (("onnx", r"stoker\[convert\]"), ("tfjs", "--no-deps tensorflowjs==4.22.0")):
        with pytest.raises(ConfigError, match=said):
            convert(
                models["dense"], form, tmp_path / "o", rows=X, representative=X, tfjs_python=None
            )


def test_the_python_of_tensorflow_js_is_looked_at_before_anything_is_done(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text("[[1, 2, 3, 4]]")
    venv.create(tmp_path / "empty")
    empty = tmp_path / "empty" / "bin" / "python"
    said = {
        empty: "Received: no tensorflow, tensorflowjs, tf_keras, six. Run `"
        f"{empty} -m pip install --no-deps tensorflowjs==4.22.0 tf-keras==2.21.0 six==1.17.0`, "
        f"after `{empty} -m pip install tensorflow=={tf.__version__}`.",
        tmp_path / "none": "must be a Python interpreter that runs. Received: No such file",
        Path("/bin/false"): "must be a Python interpreter that runs. Received: exit code 1",
    }
    command = ["convert", str(models["dense"]), "--to", "tfjs", "--data", str(rows)]
    command += ["--out", str(tmp_path / "out")]
    for python, reason in said.items():
        monkeypatch.setenv("STOKER_TFJS_PYTHON", str(python))
        assert invoke(command, debug=False) == 2
        assert reason in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_versions_of_the_command_are_those_that_are_tested() -> None:
    lock = (TFJS_PYTHON.parents[3] / "requirements-tfjs.lock").read_text()

    assert {line.split()[0] for line in lock.splitlines() if "==" in line} == set(tfjs.PINNED)
    assert tfjs.PINNED[1].rpartition("=")[2] == tf.__version__


def test_an_experiment_is_converted_with_its_own_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Words through a vocabulary, missing numbers: the model after the transform is converted."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "stoker.yaml").write_text(STOKER_YAML)
    # A feature whose name is none that a graph's argument can have.
    (folder / "model.py").write_text(MODEL_PY.replace('"city":', '"home city":').replace(
        'features["city"]', 'features["home city"]').replace(
        'num_buckets("city")', 'num_buckets("home city")'))  # fmt: skip
    write_csv(folder / "data.csv")
    for form in ("litert", "litert-int8"):
        out = tmp_path / form
        flags = ["--to", form, "--out", str(out), "--tolerance", "0.3", "--json"]
        assert invoke(["convert", str(folder), *flags], debug=False) == 0, capfd.readouterr().err
        facts = json.loads(capfd.readouterr().out)
        assert facts["signature"] == SERVING_TRANSFORMED
        assert set(facts["inputs"]) == {"age", "home city"}
        assert facts["rows"] > 100
        assert max(facts["differences"].values()) <= (0.3 if form == "litert-int8" else 1e-4)
        assert set(json.loads((out / "inputs.json").read_text())) == {"age", "home city"}

    saved_model = Path(facts["saved_model"])
    rows = tmp_path / "rows.json"
    rows.write_text('[{"age": NaN, "city": "Oslo"}, {"age": 50.5, "city": "elsewhere"}]')
    arguments = ["--to", "litert", "--data", str(rows), "--out"]
    assert invoke(["convert", str(saved_model), *arguments, str(tmp_path / "a")], debug=False) == 0
    assert "transform_features" in capfd.readouterr().out
    strict = [*arguments, str(tmp_path / "b"), "--tolerance", "0"]
    shutil.copytree(saved_model, tmp_path / "versions" / "1")
    versions = str(tmp_path / "versions")
    code = invoke(["convert", versions, *strict, "--signature", SERVING_DEFAULT], debug=False)
    assert code == 2
    assert "text (in city)" in capfd.readouterr().err
    refused = [
        (["convert", str(saved_model), "--to", "litert", "--out", str(tmp_path / "c")], "--data"),
        (["convert", str(folder), *arguments, str(tmp_path / "c")], "its own rows"),
        (["convert", versions, *arguments, str(tmp_path / "a")], "does not exist yet"),
        (["convert", str(tmp_path), *arguments, str(tmp_path / "c")], "whole SavedModel"),
        (
            ["convert", versions, *arguments, str(tmp_path / "c"), "--tolerance", "-1"],
            "must be 0 or more",
        ),
    ]
    for command, reason in refused:
        assert invoke(command, debug=False) == 2, command
        assert reason in capfd.readouterr().err
    rows.write_text('[{"age": 1.0, "city": 3}]')
    assert invoke(["convert", versions, *arguments, str(tmp_path / "c")], debug=False) == 2
    assert "'city' must hold strings" in capfd.readouterr().err


LISTS_YAML = """\
name: lists
data: {source: data.jsonl}
model: model:build
preprocessing: model:preprocessing_fn
label: liked
train: {epochs: 1, batch_size: 32, deterministic: true}
"""

LISTS_PY = """\
import keras
import tensorflow as tf
from keras import layers


def preprocessing_fn(inputs):
    prices = inputs["prices"].to_tensor(0.0, shape=[None, 4])
    return {"prices": prices, "spent": tf.reduce_sum(inputs["prices"], axis=1)}


def build(features, transform):
    parts = [features["prices"], layers.Reshape((1,))(features["spent"])]
    outputs = layers.Dense(1, activation="sigmoid")(layers.Concatenate()(parts))
    model = keras.Model(features, outputs)
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model
"""


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained experiment whose feature is a list of varying length."""
    folder = tmp_path_factory.mktemp("lists") / "lists"
    folder.mkdir()
    (folder / "stoker.yaml").write_text(LISTS_YAML)
    (folder / "model.py").write_text(LISTS_PY)
    rng = np.random.default_rng(2)
    rows = [
        {"prices": rng.gamma(2.0, size=size).round(3).tolist(), "liked": int(size > 2)}
        for size in rng.integers(0, 7, 300).tolist()
    ]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=[pytest.mark.soak] * (form != "litert")) for form in FORMATS],
)
def test_rows_with_lists_of_different_lengths_are_compared(
    lists: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], form: str
) -> None:
    need(form)
    arguments = ["--to", form, "--tfjs-python", str(TFJS_PYTHON), "--tolerance", "0.3", "--json"]
    command = ["convert", str(lists), *arguments, "--out", str(tmp_path / "own")]
    assert invoke(command, debug=False) == 0, capfd.readouterr().err
    own = json.loads(capfd.readouterr().out)
    rows = tmp_path / "rows.json"
    rows.write_text('[{"prices": [1.5]}, {"prices": [2.0, 0.5, 9.0, 1.0, 3.5]}, {"prices": []}]')

    saved_model = own["saved_model"]
    command = ["convert", saved_model, *arguments, "--data", str(rows)]
    assert invoke([*command, "--out", str(tmp_path / "out")], debug=False) == 0, capfd.readouterr()
    found = json.loads(capfd.readouterr().out)

    assert found["rows"] == 3
    # ONNX has the operations that cut the padding off.
    usual = SERVING_DEFAULT if form == "onnx" else SERVING_TRANSFORMED
    assert (own["signature"], found["signature"]) == (usual, usual)
    if form in ("onnx", "litert"):  # the others would do once more what they did without the option
        raw = ["--signature", "serving_transformed", "--out", str(tmp_path / "raw")]
        assert invoke([*command, *raw], debug=False) == 0, capfd.readouterr()
        transformed = json.loads(capfd.readouterr().out)
        assert (transformed["rows"], transformed["signature"]) == (3, SERVING_TRANSFORMED)
    assert max(found["differences"].values()) <= (0.3 if form == "litert-int8" else 1e-2)


def test_lists_of_different_lengths_that_the_model_does_not_pad_are_refused(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text("[[1, 2, 3, 4], [1, 2]]")
    command = ["convert", str(models["dense"]), "--to", "litert", "--data", str(rows)]

    assert invoke([*command, "--out", str(tmp_path / "out")], debug=False) == 2
    assert "input 'x' must have rows of the same length" in capfd.readouterr().err


def test_a_foreign_error_of_a_converter_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="whole SavedModel"):
        convert(tmp_path, "litert", tmp_path / "out", rows=X, representative=X)
