"""A small model's variables become constants where it was asked for, and only where the bits stay the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.export import ExportArchive
from tests.integration.serve.conftest import export, half_plus

from stoker.export.callpath import LoadedModel
from stoker.serve import frozen
from stoker.serve.loading import load_checked
from stoker.serve.safety import check_model
from stoker.serve.servable import LoadOptions, Servable

SPEC = [tf.TensorSpec([None, 1], tf.float32, name="x")]


def variable(value: Any) -> Any:
    return tf.Variable(value)


def variables(model: LoadedModel) -> int:
    """Variables that are still in the graph that its signatures are called in."""
    session: Any = model._session
    return sum(op.type == "VarHandleOp" for op in session.graph.get_operations())


def loaded(path: Path, *, freeze: bool) -> LoadedModel:
    return load_checked(path, check_model(path), freeze=freeze)


def perceptron(path: Path) -> Path:
    keras.utils.set_random_seed(0)
    inputs = keras.Input([1], name="x")
    hidden = keras.layers.Dense(16, activation="relu")(inputs)
    keras.Model({"x": inputs}, {"y": keras.layers.Dense(2)(hidden)}).export(path, verbose=False)
    return path


def weighed(path: Path, rows: Any) -> Path:
    """A table, and a weight for each of its words."""
    module: Any = tf.Module()
    module.table = tf.lookup.StaticHashTable(rows, 2)
    module.weights = variable([0.5, 0.25, -1.0])
    spec = [tf.TensorSpec([None], tf.string, name="word")]

    def weigh(word: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": tf.gather(module.weights.read_value(), module.table.lookup(word))}

    return export(path, weigh, spec, module)


def of_words(path: Path) -> Path:
    rows = tf.lookup.KeyValueTensorInitializer(["7", "3"], [0, 1], tf.string, tf.int64)
    return weighed(path, rows)


def of_a_file(path: Path) -> Path:
    """Its path is a text in a variable, which TensorFlow cannot make a constant of."""
    words = path.parent / "words.txt"
    words.write_text("7\n3\n")
    whole, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    rows = tf.lookup.TextFileInitializer(str(words), tf.string, whole, tf.int64, number)
    return weighed(path, rows)


@pytest.mark.parametrize(
    ("write", "values"),
    [
        (lambda path: half_plus(path, addend=2.0), {"x": np.array([[1], [-3]], np.float32)}),
        (perceptron, {"x": np.array([[1.5], [-3]], np.float32)}),
        (of_words, {"word": np.array([b"7", b"3", b"else"], object)}),
    ],
    ids=["variable", "perceptron", "table"],
)
def test_a_frozen_model_has_no_variable_and_answers_the_same_bits(
    tmp_path: Path, write: Callable[[Path], Path], values: dict[str, Any]
) -> None:
    path = write(tmp_path / "1")
    plain, constant = (loaded(path, freeze=freeze) for freeze in (False, True))

    assert variables(plain) > 0
    assert variables(constant) == 0
    assert constant.signatures == plain.signatures
    first, second = (model.call("serving_default", values)["y"] for model in (plain, constant))
    assert first.tobytes() == second.tobytes()
    plain.close()
    constant.close()


def divided(path: Path) -> Path:
    """By a constant TensorFlow multiplies with its inverse: other bits."""
    module: Any = tf.Module()
    module.by = variable(3.0)
    return export(path, lambda x: {"y": x / module.by}, SPEC, module)


def counting(path: Path) -> Path:
    """A variable that a signature changes."""
    module: Any = tf.Module()
    module.seen = variable(0.0)
    return export(path, lambda x: {"y": x + module.seen.assign_add(1.0)}, SPEC, module)


@pytest.mark.parametrize("write", [divided, counting, of_a_file])
def test_what_would_answer_other_bits_keeps_its_variables(
    tmp_path: Path, write: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stoker")

    model = loaded(write(tmp_path / "1"), freeze=True)

    assert variables(model) > 0
    assert any("variables" in said or "no signature" in said for said in caplog.messages)
    model.close()


def test_a_model_of_nothing_but_large_variables_or_of_none_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stoker")
    none = export(tmp_path / "none", lambda x: {"y": x + 1.0}, SPEC)
    monkeypatch.setattr(frozen, "MOST_BYTES", 3)

    large = loaded(half_plus(tmp_path / "large", addend=2.0), freeze=True)
    without = loaded(none, freeze=True)

    assert (variables(large), variables(without)) == (1, 0)
    assert not any("frozen" in said for said in caplog.messages)
    large.close()
    without.close()


def test_each_signature_is_proved_for_itself(tmp_path: Path) -> None:
    """Of the one that no drawn text can be read by, nothing is known: it stays as it was."""
    module: Any = tf.Module()
    module.scale = variable(2.0)
    archive = ExportArchive()
    archive.track(module)
    archive.add_endpoint("scaled", lambda x: {"y": x * module.scale}, SPEC)
    image = [tf.TensorSpec([], tf.string, name="png")]
    archive.add_endpoint(
        "decoded",
        lambda png: {"y": tf.cast(tf.io.decode_png(png), tf.float32) * module.scale},
        image,
    )
    path = tmp_path / "1"
    archive.write_out(str(path), verbose=False)

    model = loaded(path, freeze=True)

    (other,) = model._others
    assert (variables(model), variables(other)) == (1, 0)
    assert model._bound["scaled"] is other._bound["scaled"]
    assert model._bound["decoded"] is not other._bound["decoded"]
    assert model.call("scaled", {"x": np.array([[3]], np.float32)})["y"].tolist() == [[6]]
    png = tf.io.encode_png(np.array([[[4]]], np.uint8)).numpy()
    decoded = model.call("decoded", {"png": np.array(png, object)})["y"]
    assert decoded.tolist() == [[[8]]]
    model.close()


@pytest.mark.parametrize("freeze", [False, True])
def test_a_version_is_frozen_where_the_server_was_asked_to(tmp_path: Path, freeze: bool) -> None:
    version = Servable(1, half_plus(tmp_path / "1", addend=2.0), LoadOptions(freeze=freeze))

    assert version.load()

    with version.use() as batcher:
        assert batcher is not None
        assert variables(batcher._model) == (0 if freeze else 1)
    version.unload()


def test_what_may_not_end_is_not_called_to_be_frozen(tmp_path: Path) -> None:
    module: Any = tf.Module()
    module.step = variable(1.0)

    def count(x: tf.Tensor) -> dict[str, tf.Tensor]:
        def goes_on(y: tf.Tensor) -> tf.Tensor:
            return tf.reduce_any(y < 3.0)

        (found,) = tf.while_loop(goes_on, lambda y: (y + module.step,), [x])
        return {"y": found}

    version = Servable(1, export(tmp_path / "1", count, SPEC, module), LoadOptions(freeze=True))

    assert version.load()

    with version.use() as batcher:
        assert batcher is not None
        assert variables(batcher._model) == 1
    version.unload()
