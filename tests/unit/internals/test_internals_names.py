"""The private names of TensorFlow and Keras that Stoker uses exist in the installed versions."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from tensorflow.python.eager import context  # type: ignore[attr-defined]  # not in the stubs
from tensorflow.python.ops import script_ops  # type: ignore[attr-defined]  # not in the stubs

import stoker
from stoker.internals import keras_internals, missing_names, tensorflow_internals

SOURCES = Path(stoker.__file__).parent
PRIVATE_IMPORT = re.compile(r"^\s*(from|import) (keras\.src|tensorflow\.python)", re.MULTILINE)


def keras_objects() -> dict[str, object]:
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    history = outputs._keras_history
    return {
        "Model": model,
        "CompileMetrics": model._compile_metrics,
        "Layer": model.layers[-1],
        "Node": history.operation._inbound_nodes[history.node_index],
        "KerasTensor": outputs,
        "KerasHistory": history,
        "Adam": model.optimizer,
        "MeanMetricWrapper": keras.metrics.MeanAbsoluteError(),
        "SeedGenerator": keras.random.SeedGenerator(1),
        **keras_internals.MODULES,
    }


def tensorflow_objects() -> dict[str, object]:
    traced = tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([]))
    prefetched = tf.data.Dataset.range(2).prefetch(1)
    modules = {each.__name__.rpartition(".")[2]: each for each in tensorflow_internals.MODULES}
    return {
        "ConcreteFunction": traced,
        "FuncGraph": traced.graph,
        "Session": tf.compat.v1.Session(graph=tf.Graph()),
        "_PrefetchDataset": prefetched,
        "_OptionsDataset": prefetched.with_options(tf.data.Options()),
        "Context": context.context(),
        "FuncRegistry": script_ops._py_funcs,
        **modules,
    }


def test_the_installed_keras_has_every_name_that_is_used() -> None:
    found = keras_objects()
    missing = missing_names(keras_internals.USED_NAMES, found)
    assert missing == [], f"Keras {keras.__version__} has no {', '.join(missing)}"


def test_the_installed_tensorflow_has_every_name_that_is_used() -> None:
    found = tensorflow_objects()
    for name in ("_PrefetchDataset", "_OptionsDataset"):
        assert type(found[name]).__name__ == name
    missing = missing_names(tensorflow_internals.USED_NAMES, found)
    assert missing == [], f"TensorFlow {tf.__version__} has no {', '.join(missing)}"


def test_a_missing_name_is_reported_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tensorflow_internals.ops, "uid")

    used = {"ops": tensorflow_internals.USED_NAMES["ops"]}
    assert missing_names(used, {"ops": tensorflow_internals.ops}) == ["ops.uid"]


def test_only_the_two_modules_use_private_names() -> None:
    importers = [
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if PRIVATE_IMPORT.search(path.read_text())
    ]
    reaching_in = [
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if "noqa: SLF001" in path.read_text() and path.relative_to(SOURCES).parts[0] != "core"
    ]

    assert sorted(importers) == [
        "internals/keras_internals.py",
        "internals/tensorflow_internals.py",
    ]
    assert reaching_in == []
