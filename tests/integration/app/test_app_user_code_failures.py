"""Errors from the user's model, loss, metric or optimizer are shown with the user's own line."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli.main import invoke

HEAD = "import keras\nimport tensorflow as tf\n"

BUILD = """
def build(features):
    x = keras.ops.expand_dims(features["a"], -1)
    {layer}
    model = {model}
    model.compile({compile})
    return model
"""

LOSS_READS_VALUES = """
def my_loss(y, p):
    y.numpy()  # here
    return tf.reduce_mean((y - p) ** 2)
"""
METRIC_BRANCHES = """
def my_metric(y, p):
    if tf.reduce_sum(p) > 0:  # here
        return 1.0
    return 0.0
"""
LAYER_FAILS_IN_TRAINING = """
class Mine(keras.layers.Layer):
    def call(self, x, training=False):
        if training:
            raise ValueError("mine is broken")  # here
        return x
"""
MODEL_READS_VALUES = """
class Mine(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        x["a"].numpy()  # here
        return self.dense(x["a"][:, None])
"""
INNER_LAYER_FAILS = """
class Inner(keras.layers.Layer):
    def call(self, x):
        return x + undefined  # here
class Mine(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.dense = keras.layers.Dense(1)
    def build(self, shapes):
        self.dense.build((None, 1))
    def call(self, x):
        return self.dense(self.inner(x["a"][:, None]))
"""
SCHEDULE = """
class Mine(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return {}["no"]  # here
    def get_config(self):
        return {}
"""
OPTIMIZER = """
class Mine(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        raise RuntimeError("no update")  # here
"""
CONSTRAINT = """
class Mine(keras.constraints.Constraint):
    def __call__(self, w):
        return w.numpy() * 0  # here
    def get_config(self):
        return {}
"""
GRADIENT = """
@tf.custom_gradient
def f(x):
    def grad(dy):
        raise ValueError("no gradient")  # here
    return x, grad
class Mine(keras.layers.Layer):
    def call(self, x):
        return f(x)
"""
CONVERTED = """
@tf.function
def my_loss(y, p):
    for _ in tf.range(2):
        y = y + undefined  # here
    return tf.reduce_mean((y - p) ** 2)
"""
PY_FUNCTION = """
def f(x):
    raise ValueError("no value")  # here
class Mine(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.py_function(f, [x], tf.float32), [None, 1])
    def compute_output_shape(self, shape):
        return shape
"""

DENSE = "keras.Model(features, keras.layers.Dense(1)(x))"
PLAIN = 'optimizer="adam", loss="mse"'
LAYER = "x = Mine()(keras.layers.Dense(1)(x))"

CASES = {
    "loss_reads_values": (LOSS_READS_VALUES, "", DENSE, 'optimizer="adam", loss=my_loss'),
    "metric_branches": (METRIC_BRANCHES, "", DENSE, PLAIN + ", metrics=[my_metric]"),
    "layer_fails_in_training": (LAYER_FAILS_IN_TRAINING, LAYER, DENSE, PLAIN),
    "model_reads_values": (MODEL_READS_VALUES, "", "Mine()", PLAIN),
    "run_eagerly": (LOSS_READS_VALUES, "", DENSE, "loss=my_loss, run_eagerly=True"),
    "inner_layer_fails": (INNER_LAYER_FAILS, "", "Mine()", PLAIN),
    "schedule": (SCHEDULE, "", DENSE, 'optimizer=keras.optimizers.Adam(Mine()), loss="mse"'),
    "optimizer": (OPTIMIZER, "", DENSE, 'optimizer=Mine(), loss="mse"'),
    "constraint": (
        CONSTRAINT,
        "x = keras.layers.Dense(1, kernel_constraint=Mine())(x)",
        DENSE,
        PLAIN,
    ),
    "gradient": (GRADIENT, LAYER, DENSE, PLAIN),
    "converted_by_autograph": (CONVERTED, "", DENSE, 'optimizer="adam", loss=my_loss'),
    "py_function": (PY_FUNCTION, LAYER, DENSE, PLAIN),
}

SENTENCES = {
    "loss_reads_values": "'SymbolicTensor' object has no attribute 'numpy'",
    "metric_branches": "as a Python `bool` is not allowed",
    "layer_fails_in_training": "mine is broken (Exception encountered when calling Mine.call())",
    "model_reads_values": "Exception encountered when calling Mine.call()",
    "run_eagerly": "use TensorFlow or keras.ops, or wrap the Python code in tf.py_function",
    "inner_layer_fails": "name 'undefined' is not defined",
    "schedule": "KeyError: 'no'",
    "optimizer": "RuntimeError: no update",
    "constraint": "numpy() is only available",
    "gradient": "ValueError: no gradient",
    "converted_by_autograph": "undefined",
    "py_function": "no value",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One table for all: the stages before training are run once."""
    folder = tmp_path_factory.mktemp("failing")
    rows = "".join(f"{row},{row / 40},{row % 3}\n" for row in range(40))
    (folder / "data.csv").write_text("key,a,y\n" + rows)
    (folder / "stoker.yaml").write_text(
        "name: failing\ndata: {source: data.csv, splits: {train: 0.6, eval: 0.4}}\n"
        "model: model:build\nlabel: y\ntrain: {epochs: 1, batch_size: 16}\n"
    )
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_failure_of_the_users_code_exits_with_2_and_shows_the_users_line(
    case: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    top, layer, model, compiled = CASES[case]
    source = HEAD + top + BUILD.format(layer=layer or "pass", model=model, compile=compiled)
    (folder / "model.py").write_text(source)
    line = 1 + next(n for n, text in enumerate(source.splitlines()) if text.endswith("# here"))

    code = invoke(["train", str(folder)], debug=False)

    said = capfd.readouterr().err
    assert code == 2, said
    assert f"failed (model.py, line {line}, in " in said
    assert SENTENCES[case] in said
    assert "bug in Stoker" not in said
