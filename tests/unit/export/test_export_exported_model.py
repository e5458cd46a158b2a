"""How an exported model is called, on real SavedModels."""

from __future__ import annotations

import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras.export import ExportArchive

from stoker.core.errors import UserError
from stoker.registry.exported_model import LoadedModel, TensorSpec, first_line, load_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two signatures: words through a lookup table and numbers; a matrix product."""
    module: Any = tf.Module()
    rows = tf.lookup.KeyValueTensorInitializer(["cash", "card"], [1, 2], tf.string, tf.int64)
    module.table = tf.lookup.StaticHashTable(rows, -1)
    module.weights = tf.Variable(tf.reshape(tf.constant([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), [3, 2]))

    @tf.function
    def ride(word: tf.Tensor, fare: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"id": module.table.lookup(word), "upper": tf.strings.upper(word), "twice": fare * 2}

    @tf.function
    def product(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, module.weights)

    archive = ExportArchive()
    archive.track(module)
    words = [tf.TensorSpec([None], tf.string, name="word")]
    words += [tf.TensorSpec([None, 1], tf.float32, name="fare")]
    archive.add_endpoint("serving_default", ride, input_signature=words)
    any_rank: Any = None
    open_rank = tf.TensorSpec(any_rank, tf.float32, name="x")
    archive.add_endpoint("product", product, input_signature=[open_rank])
    path = tmp_path_factory.mktemp("saved") / "model"
    archive.write_out(str(path), verbose=False)
    return path


@pytest.fixture(scope="module")
def model(saved: Path) -> Any:
    loaded = load_model(saved)
    yield loaded
    loaded.close()


FARE = np.array([[1.5], [2.0]], np.float32)
WORD = np.array(["cash", "zzz"], dtype=object)


def test_a_signature_says_what_goes_in_and_comes_out(model: LoadedModel) -> None:
    signature = model.signatures["serving_default"]

    assert signature.inputs == {
        "fare": TensorSpec(dtype="float32", shape=(None, 1)),
        "word": TensorSpec(dtype="string", shape=(None,)),
    }
    assert {name: spec.dtype for name, spec in signature.outputs.items()} == {
        "id": "int64",
        "twice": "float32",
        "upper": "string",
    }
    assert signature.method == "tensorflow/serving/predict"
    assert model.signatures["product"].inputs["x"].shape is None
    assert sorted(model.signatures) == ["product", "serving_default"]


def test_a_call_gives_named_arrays(model: LoadedModel) -> None:
    outputs = model.call("serving_default", {"fare": FARE, "word": WORD})

    assert {name: array.tolist() for name, array in outputs.items()} == {
        "id": [1, -1],
        "twice": [[3.0], [4.0]],
        "upper": [b"CASH", b"ZZZ"],
    }


@pytest.mark.parametrize(
    "word",
    [
        np.array(["cash", "zzz"]),
        np.array([b"cash", b"zzz"]),
        np.array([b"cash", "zzz"], dtype=object),
    ],
)
def test_strings_may_be_text_or_bytes(model: LoadedModel, word: np.ndarray[Any, Any]) -> None:
    assert model.call("serving_default", {"fare": FARE, "word": word})["id"].tolist() == [1, -1]


def test_a_batch_of_no_rows_gives_no_rows(model: LoadedModel) -> None:
    outputs = model.call("serving_default", {"fare": FARE[:0], "word": WORD[:0]})

    assert {name: array.shape[0] for name, array in outputs.items()} == {
        "id": 0,
        "twice": 0,
        "upper": 0,
    }


def test_trailing_axes_of_one_may_be_left_out(model: LoadedModel) -> None:
    outputs = model.call("serving_default", {"fare": FARE[:, 0], "word": WORD})

    assert outputs["twice"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"fare": FARE}, "input 'word' is missing"),
        ({"fare": FARE, "word": WORD, "tip": FARE}, "input 'tip' is not one of them"),
        ({"fare": FARE.astype("float64"), "word": WORD}, "'fare' must be float32 of shape [-1,1]"),
        ({"fare": FARE.astype("int64"), "word": WORD}, "Received: int64 of shape [2,1]"),
        ({"fare": np.zeros((2, 3), "float32"), "word": WORD}, "Received: float32 of shape [2,3]"),
        ({"fare": np.zeros((), "float32"), "word": WORD}, "Received: float32 of shape []"),
        ({"fare": np.zeros((2, 1, 1), "float32"), "word": WORD}, "of shape [2,1,1]"),
        ({"fare": FARE, "word": FARE[:, 0]}, "'word' must be string of shape [-1]"),
        ({"fare": WORD, "word": WORD}, "'fare' must be float32"),
        ({"fare": FARE, "word": np.array(["a", None])}, "'word' must hold strings only"),
    ],
)
def test_a_wrong_input_is_named(model: LoadedModel, inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        model.call("serving_default", inputs)

    assert said in caught.value.line()


def test_an_unknown_signature_lists_the_known(model: LoadedModel) -> None:
    with pytest.raises(UserError, match=r"product, serving_default\. Received: 'nope'"):
        model.call("nope", {})


def test_values_that_the_graph_refuses_are_the_callers_fault(model: LoadedModel) -> None:
    with pytest.raises(UserError, match=r"'x' \(float32 of shape \[\?\], fed \[2,5\]\)") as caught:
        model.call("product", {"x": np.zeros((2, 5), "float32")})

    assert "Matrix size-incompatible" in caught.value.line()


def test_many_threads_get_each_their_own_answer(model: LoadedModel) -> None:
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(200):
            answer = model.call("product", {"x": np.full((1, 3), number, "float32")})["output_0"]
            if answer.tolist() != [[6.0 * number, 9.0 * number]]:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


@pytest.mark.parametrize("victim", ["saved_model.pb", "variables.data-00000-of-00001"])
@pytest.mark.parametrize("damage", ["empty", "half", "missing"])
def test_a_damaged_savedmodel_is_refused_in_one_line(
    saved: Path, tmp_path: Path, victim: str, damage: str
) -> None:
    copied = Path(shutil.copytree(saved, tmp_path / "copy"))
    (path,) = copied.rglob(victim)
    raw = path.read_bytes()
    path.write_bytes(b"" if damage == "empty" else raw[: len(raw) // 2])
    if damage == "missing":
        path.unlink()

    with pytest.raises(UserError) as caught:
        load_model(copied)

    assert str(copied) in caught.value.line()
    assert "\n" not in caught.value.line()


def test_any_flip_in_the_graph_file_loads_or_is_refused(saved: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(saved, tmp_path / "copy"))
    path = copied / "saved_model.pb"
    raw = path.read_bytes()
    refused = []
    for place in np.linspace(0, len(raw) - 1, 11, dtype=int).tolist():
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x11]) + raw[place + 1 :])
        try:
            load_model(copied).close()
        except UserError as error:
            refused.append(error.line())

    assert refused
    assert all(str(copied) in line and "\n" not in line for line in refused)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_model(tmp_path / "nope")


def test_the_reason_is_one_line_without_tensorflows_heading() -> None:
    error = tf.errors.DataLossError(None, None, "Graph execution error:\n\nBad sum.\n\t [[{{x}}]]")

    assert first_line(error) == "Bad sum"
    assert first_line(ValueError()) == "ValueError"


def test_closing_gives_the_memory_back(tmp_path: Path) -> None:
    module: Any = tf.Module()
    module.weights = tf.Variable(tf.ones([4, 1_000_000]))  # 16 MB
    archive = ExportArchive()
    archive.track(module)
    spec = [tf.TensorSpec([None, 4], tf.float32, name="x")]
    product = tf.function(lambda x: tf.reduce_sum(tf.matmul(x, module.weights), axis=1))
    archive.add_endpoint("serving_default", product, input_signature=spec)
    archive.write_out(str(tmp_path / "model"), verbose=False)

    def load_and_close() -> int:
        model = load_model(tmp_path / "model")
        model.call("serving_default", {"x": np.ones((1, 4), "float32")})
        model.close()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    used = [load_and_close() for _ in range(10)]

    assert max(used[2:]) - used[1] < 3 * 16_000_000  # eight loads that stayed would be 128 MB
