"""`data: model:dataset`: a dataset of the user's own, from element_spec to a served answer."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.app.stage_results import undeclared

from stoker.app.chain import ChainResult, run_chain
from stoker.app.experiment import Experiment, load_experiment
from stoker.app.run_folder import Resume, Run
from stoker.app.smoke_test import smoke_test
from stoker.cli.main import invoke
from stoker.core.errors import CheckFailed, ConfigError
from stoker.data.features.analysis.statistics import load_statistics
from stoker.data.ingest import IngestConfig
from stoker.registry.exported_model import load_model
from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.state import Phase
from stoker.train.checkpoints.store import newest_good

from .conftest import Recorder

ALL = ["ingest", "analyze", "transform", "train", "export", "evaluate", "push"]

STOKER_YAML = """\
name: mine
data: model:dataset
model: model:build
train: {epochs: 3, deterministic: true}
evaluate: {metrics: [auc, accuracy], slices: [city], gates: {auc: {min: 0.8}}}
"""

MODEL_PY = """\
import keras
import numpy as np
import tensorflow as tf
from keras import layers

UNITS = 8
ROWS = {"train": 480, "eval": 150}


def dataset(split):
    rng = np.random.default_rng(len(split))
    rows = ROWS[split]
    numbers = rng.normal(size=(rows, 4)).astype(np.float32)
    city = rng.integers(0, 3, rows).astype(np.int32)
    label = (numbers[:, 0] + (city == 1) > 0.3).astype(np.int64)
    made = tf.data.Dataset.from_tensor_slices(({"numbers": numbers, "city": city}, label))
    if split == "train":
        made = made.shuffle(rows, seed=1)
    return made.batch(32)


def build(features):
    city = layers.Flatten()(layers.Embedding(3, 2)(keras.ops.expand_dims(features["city"], -1)))
    x = layers.Concatenate()([features["numbers"], city])
    x = layers.Dense(UNITS, activation="relu")(x)
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model
"""


@dataclass
class Own:
    """An experiment's folder, and what can be done with it."""

    path: Path
    worked: list[str] = field(default_factory=list)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.path / name).read_text()
        assert old in text
        (self.path / name).write_text(text.replace(old, new))

    def run(self, *, until: str = "push", again: bool = False) -> ChainResult:
        recorder, resume = Recorder(), Resume(again=again)
        try:
            return run_chain(load_experiment(self.path), recorder, until=until, resume=resume)
        finally:
            self.worked = recorder.worked


def write(path: Path, *, model: str = MODEL_PY, settings: str = STOKER_YAML) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "stoker.yaml").write_text(settings)
    (path / "model.py").write_text(model)
    return path


@pytest.fixture(scope="module")
def finished_own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write(tmp_path_factory.mktemp("own") / "mine")
    assert invoke(["push", str(path)], debug=False) == 0
    return path


@pytest.fixture
def own(finished_own: Path, tmp_path: Path) -> Own:
    shutil.copytree(finished_own, tmp_path / "mine")
    return Own(tmp_path / "mine")


def stage_facts(folder: Path, stage: str) -> dict[str, Any]:
    (run,) = folder.glob("runs/*/*/stages")
    record = Run(run.parent).record(stage)
    assert record is not None
    return dict(record.result)


def test_nothing_is_ingested_and_what_the_dataset_is_is_recorded(finished_own: Path) -> None:
    (data,) = finished_own.glob("runs/mine/*/data")
    assert [path.name for path in data.iterdir()] == ["dataset.json"]
    described = json.loads((data / "dataset.json").read_text())
    assert described["features"] == [
        {"name": "numbers", "dtype": "float32", "shape": [4]},
        {"name": "city", "dtype": "int32", "shape": []},
    ]
    assert described["labels"] == {"": {"name": "label", "dtype": "int64", "shape": []}}


def test_the_analysis_counts_and_measures_every_record(finished_own: Path) -> None:
    counts = stage_facts(finished_own, "analyze")["counts"]
    assert counts["train"] == {"batches": 15, "rows": 480, "batch_size": 32}
    assert counts["eval"] == {"batches": 5, "rows": 150, "batch_size": 32}
    (path,) = finished_own.glob("runs/mine/*/analysis/statistics.json")
    city = load_statistics(path).column("eval", "city")
    assert city.count == 150
    assert sorted(top.value for top in city.top) == ["0", "1", "2"]
    assert sum(top.count for top in city.top) == 150


def test_each_result_has_the_keys_that_its_type_declares(finished_own: Path) -> None:
    assert undeclared({stage: stage_facts(finished_own, stage) for stage in ALL}) == {}


def test_training_reads_the_batches_as_they_are(finished_own: Path) -> None:
    facts = stage_facts(finished_own, "train")
    assert facts["steps"] == 3 * 15
    assert facts["resolved"]["batch_size"] == 32


def test_the_signature_is_the_element_spec_without_the_label(finished_own: Path) -> None:
    loaded = load_model(finished_own / "models" / "mine" / "1")
    inputs = loaded.signatures["serving_default"].inputs
    loaded.close()
    assert {name: (spec.dtype, spec.shape) for name, spec in inputs.items()} == {
        "numbers": ("float32", (None, 4)),
        "city": ("int32", (None,)),
    }


def test_evaluation_slices_by_a_feature(finished_own: Path) -> None:
    (path,) = finished_own.glob("runs/mine/*/evaluation/evaluation.json")
    written = json.loads(path.read_text())
    assert written["rows"] == 150
    assert {part["value"] for part in written["slices"]} == {"0", "1", "2"}
    assert written["metrics"]["auc"] > 0.9


def test_a_run_serves_what_it_pushed_over_both_protocols_and_starts_its_rollout(
    own: Own, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (own.path / "stoker.yaml").read_text()
    settings = "push: {rollout: canary, settings: {stages: '10,100'}}"
    (own.path / "stoker.yaml").write_text(f"{text}\n{settings}\n")
    own.edit("model.py", "UNITS = 8", "UNITS = 9")

    # Its server calls version 2 only, whichever version has the traffic.
    assert invoke(["run", str(own.path), "--json"], debug=False) == 0

    facts = json.loads(capfd.readouterr().out)
    assert [stage["stage"] for stage in facts["stages"]][-2:] == ["push", "serve"]
    assert len(facts["answers"]) == 5
    assert all(answer["rest"] == answer["grpc"] for answer in facts["answers"])
    models = own.path / "models"
    state = ModelRollouts(models, "mine").status().state
    assert (state.baseline, state.candidate, state.phase) == (1, 2, Phase.MEASURING)
    assert state.settings.stages == "10,100"
    assert Repository(models).aliases("mine") == {"champion": 1, "candidate": 2}


@pytest.mark.parametrize(
    ("file", "old", "new", "worked"),
    [
        ("model.py", "UNITS = 8", "UNITS = 8  # eight", []),
        ("model.py", "> 0.3", "> 0.4", ALL),
        ("model.py", "UNITS = 8", "UNITS = 9", ["train", "export", "evaluate", "push"]),
        ("stoker.yaml", "min: 0.8", "min: 0.79", ["evaluate"]),
    ],
)
def test_a_change_runs_what_depends_on_it(
    own: Own, file: str, old: str, new: str, worked: list[str]
) -> None:
    own.edit(file, old, new)
    own.run()
    assert own.worked == worked


def test_data_from_outside_that_python_opens_is_seen_by_itself(tmp_path: Path) -> None:
    outside = tmp_path / "scale.npy"
    np.save(outside, np.float32(1.0))
    model = MODEL_PY.replace("def dataset(split):", "def dataset(split, path):").replace(
        "made.batch(32)",
        'made.batch(32).map(lambda x, y: ({**x, "numbers": x["numbers"] * '
        "float(np.load(path))}, y))",
    )
    settings = STOKER_YAML.replace(
        "data: model:dataset", f"data: {{dataset: 'model:dataset', options: {{path: {outside}}}}}"
    )
    own = Own(write(tmp_path / "mine", model=model, settings=settings))
    own.run(until="transform")
    np.save(outside, np.float32(2.0))
    own.run(until="transform")
    assert own.worked == ["ingest", "analyze", "transform"]
    own.run(until="analyze", again=True)
    assert own.worked == ["analyze"]
    own.run(until="transform")
    assert own.worked == []


def test_a_gate_that_says_no_pushes_nothing(own: Own) -> None:
    own.edit("stoker.yaml", "min: 0.8", "min: 1.1")
    with pytest.raises(CheckFailed, match=r"evaluate\.gates\.auc\.min"):
        own.run()


IMAGES_PY = """\
import keras
import numpy as np
import tensorflow as tf
from keras import layers


def dataset(*, rows):
    return {"train": images(rows, 0), "eval": images(rows // 4, 1)}


def images(rows, seed):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, rows)
    pixels = rng.integers(0, 40, (rows, 6, 5, 1))
    pixels[np.arange(rows), 2 * label] += 150
    # Half of the labels are wrong, and weigh nothing.
    wrong = np.arange(rows) % 2 == 1
    told = np.where(wrong, (label + 1) % 3, label) if seed == 0 else label

    def generate():
        place = 0
        for size in [7, 20, 5] * rows:
            part = slice(place, place + size)
            if place >= rows:
                return
            yield pixels[part], np.eye(3)[told[part]], np.where(wrong, 0.0, 1.0)[part]
            place += size

    spec = (
        tf.TensorSpec([None, 6, 5, 1], tf.uint8),
        tf.TensorSpec([None, 3], tf.float32),
        tf.TensorSpec([None], tf.float32),
    )
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


def build(features):
    (pixels,) = features.values()
    x = layers.Flatten()(layers.Rescaling(1 / 255)(pixels))
    model = keras.Model(features, layers.Dense(3, activation="softmax")(x))
    model.compile(
        optimizer=keras.optimizers.Adam(0.05),
        loss="categorical_crossentropy",
        weighted_metrics=["accuracy"],
    )
    return model
"""

IMAGES_YAML = """\
name: pictures
data: {dataset: "model:dataset", options: {rows: 320}}
model: model:build
train: {epochs: 8, monitor: val_accuracy}
evaluate: {metrics: [accuracy], gates: {accuracy: {min: 0.95}}}
"""


def test_weighted_images_of_a_generator_with_batches_of_any_size_are_served(tmp_path: Path) -> None:
    own = Own(write(tmp_path / "mine", model=IMAGES_PY, settings=IMAGES_YAML))

    result = own.run()

    # Learned from the half that weighs something: the gate holds it.
    assert result.results["evaluate"]["rows"] == 80
    assert result.results["analyze"]["counts"]["train"]["batches"] == 30
    assert result.results["train"]["steps"] == 8 * 30
    assert result.results["train"]["metrics"]["accuracy"] > 0.9
    # An Example has no uint8.
    assert result.results["export"]["signatures"] == ["serving_default"]
    pixels = load_statistics(result.output("analyze") / "statistics.json").column("train", "inputs")
    assert pixels.dtype == "uint8 tensor [6, 5, 1]"
    assert pixels.numbers is not None
    assert (pixels.count, pixels.numbers.max) == (320 * 30, 189.0)
    proof = smoke_test(load_experiment(own.path), result)
    assert len(proof.answers) == 5
    assert all(answer.rest.split()[0] == answer.truth for answer in proof.answers)


ODD_PY = """\
import keras
import numpy as np
import tensorflow as tf
from keras import layers


def dataset(split):
    rng = np.random.default_rng(len(split))
    rows = 100
    wide = rng.normal(size=(rows, 80)).astype(np.float64)
    wide[3, 3] = np.nan
    features = {
        "flag": rng.integers(0, 2, rows).astype(bool),
        "kind": np.array([b"a\\xff", b"b"], object)[rng.integers(0, 2, rows)],
        "half": rng.normal(size=rows).astype(np.float16),
        "big": rng.integers(0, 2**63, rows).astype(np.uint64) * np.uint64(2),
        "small": rng.integers(-5, 5, (rows, 1)).astype(np.int8),
        "wide": wide,
    }
    made = tf.data.Dataset.from_tensor_slices((features, rng.normal(size=(rows, 1)).astype(np.float32)))
    made = made.batch(16, drop_remainder=split == "train")
    # Sequences of a length that differs from batch to batch.
    def grow(x, y):
        length = tf.cast(tf.abs(x["small"][0, 0]), tf.int32) + 1
        return {**x, "steps": tf.ones([tf.shape(y)[0], length], tf.int32)}, y
    return made.map(grow)


def build(features):
    flat = [
        keras.ops.cast(features["flag"], "float32"),
        keras.ops.cast(features["half"], "float32"),
        keras.ops.cast(features["big"], "float32") / 1e19,
        keras.ops.cast(keras.ops.sum(features["steps"], axis=1), "float32"),
    ]
    wide = keras.ops.cast(features["wide"], "float32")
    parts = [keras.ops.expand_dims(x, -1) for x in flat]
    parts += [keras.ops.cast(features["small"], "float32"), keras.ops.where(keras.ops.isnan(wide), 0.0, wide)]
    model = keras.Model(features, layers.Dense(1)(layers.Concatenate()(parts)))
    model.compile(optimizer="adam", loss="mse")
    return model
"""

ODD_YAML = """\
name: odd
data: model:dataset
model: model:build
train: {epochs: 1}
evaluate: {metrics: [rmse], slices: [flag, kind]}
"""


@pytest.mark.soak
def test_tensors_of_every_type_and_of_open_sizes_are_measured_and_served(tmp_path: Path) -> None:
    own = Own(write(tmp_path / "odd", model=ODD_PY, settings=ODD_YAML))

    result = own.run()

    statistics = load_statistics(result.output("analyze") / "statistics.json")
    assert {c.name: c.dtype for c in statistics.splits["train"]} == {
        "flag": "int64",
        "kind": "bytes",
        "half": "float32",
        "big": "uint64",
        "small": "int64",
        "wide": "float64 tensor [80]",
        "steps": "int32 tensor [any]",
        "label": "float32",
    }
    wide = statistics.column("train", "wide")
    assert (wide.count, wide.missing) == (96 * 80 - 1, 1)
    assert result.results["evaluate"]["rows"] == 100
    assert len(smoke_test(load_experiment(own.path), result).answers) == 5


def refused(path: Path, capfd: pytest.CaptureFixture[str], verb: str = "transform") -> str:
    capfd.readouterr()
    assert invoke([verb, str(path)], debug=False) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


PLAIN = "return made.batch(32)"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (PLAIN, PLAIN + ".map(lambda x, y: x)", "must return (features, label) or"),
        (PLAIN, PLAIN + ".map(lambda x, y: (x, y, y, y))", "Received: 4 parts"),
        (PLAIN, "return made", "must return batches"),
        (PLAIN, PLAIN + ".map(lambda x, y: (x, tf.as_string(y)))", "must return numeric labels"),
        (PLAIN, PLAIN + ".map(lambda x, y: ({'a': x}, y))", "a flat dict of tensors"),
        (PLAIN, PLAIN + ".map(lambda x, y: ((x['city'], x['city']), y))", "a flat dict of tensors"),
        (
            PLAIN,
            PLAIN + ".map(lambda x, y: (tf.RaggedTensor.from_tensor(x['numbers']), y))",
            "Received: a ragged tensor. Use to_tensor()",
        ),
        (
            PLAIN,
            PLAIN + ".map(lambda x, y: (tf.sparse.from_dense(x['numbers']), y))",
            "Received: a sparse tensor. Use to_tensor() or tf.sparse.to_dense",
        ),
        (
            PLAIN,
            PLAIN + ".map(lambda x, y: (tf.numpy_function(lambda a: a, [x['city']], tf.int32), y))",
            "must return 'inputs' with a known number of dimensions",
        ),
        (PLAIN, PLAIN + ".map(lambda x, y: (tf.complex(x['numbers'], 1.0), y))", "complex64"),
        (PLAIN, PLAIN + ".map(lambda x, y: (x, y, x['numbers']))", "one float per record"),
        (PLAIN, PLAIN + ".map(lambda x, y: (x, y[:3]))", "batch 1 of 'train'"),
        (PLAIN, PLAIN + ".repeat()", "must end, because an epoch is one pass"),
        (PLAIN, PLAIN + ".take(len(split) - 4)", "split 'eval', must hold at least one record"),
        (
            PLAIN,
            PLAIN + ".filter(lambda x, y: split == 'train')",
            "split 'eval', must hold at least one record",
        ),
        (
            PLAIN,
            PLAIN + ".map(lambda x, y: ({**x, split: y}, y))",
            "'train': int64 [] in train, missing in eval",
        ),
        (
            PLAIN,
            PLAIN + ".map(lambda x, y: (x, tf.ensure_shape(y, [31])))",
            "must return all batches of 'train'",
        ),
        (
            PLAIN,
            PLAIN + ".map(lambda x, y: (x, y + tf.constant('a')))",
            "failed (model.py, line 19). Received: TypeError: Input 'y'",
        ),
        (PLAIN, "return list(made)", "a tf.data.Dataset for the split 'train'. Received: list"),
        ("rows = ROWS[split]", "rows = ROWS[split + 's']", "failed (model.py, line 12"),
        ("def dataset(split):", "def dataset(split='train'):\n    return\n", "Received: NoneType"),
        (
            "def dataset(split):",
            "def dataset():\n    split = 'eval'",
            "without a parameter `split`",
        ),
    ],
)
def test_what_no_chain_can_use_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    assert old in MODEL_PY
    path = write(tmp_path / "mine", model=MODEL_PY.replace(old, new))
    assert said in refused(path, capfd)


GENERATED = """\
    if split == "eval":
        return made.batch(32)
    elements = list(made.batch(32))

    def generate():
        for number, element in enumerate(elements):
            # Once training has got somewhere.
            saved = pathlib.Path(__file__).parent.glob("runs/*/*/train/checkpoints/step-*[1-9]*")
            if number == 7 and any(saved):
                WRONG
            yield element

    return tf.data.Dataset.from_generator(generate, output_signature=made.batch(32).element_spec)
"""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "raise OSError('the disk is gone')",
            r"\(model.py, line \d+, in generate\).*OSError: the disk is gone",
        ),
        (
            "return",
            "expected to contain 15 elements but contained only 7.*as many batches in every",
        ),
    ],
)
def test_a_generator_that_fails_in_a_later_pass_is_named_and_nothing_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], wrong: str, said: str
) -> None:
    model = MODEL_PY.replace("    return made.batch(32)\n", GENERATED.replace("WRONG", wrong))
    often = "epochs: 3, steps_per_call: 5, checkpoint: {every_steps: 5}"
    settings = STOKER_YAML.replace("epochs: 3", often)
    path = write(tmp_path / "mine", model=f"import pathlib\n{model}", settings=settings)
    line = refused(path, capfd, "train")

    assert re.search(said, line)
    (folder,) = path.glob("runs/*/*/train/checkpoints")
    found = newest_good(folder)
    assert found is not None
    assert 0 < found.facts["position"]["step"] < 45


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("model:dataset", "data.csv", "Write `data: {source: 'data.csv'}` for files"),
        ("model:dataset", "model:datasett", "Did you mean 'dataset'?"),
        ("model:dataset", "{dataset: data}", "data.dataset must be MODULE:FUNCTION"),
        ("model:dataset", "{dataset: 'model:dataset', optoins: {}}", "Did you mean 'options'?"),
        ("model:dataset", "{dataset: 'model:dataset', options: {a: 2026-01-01}}", "as a string"),
        ("model:dataset", "{dataset: 'model:dataset', options: {a: 1}}", "unexpected keyword"),
        (
            "model:dataset",
            "{dataset: 'model:dataset', service: {address: 'a:1'}}",
            "data.service must be left out",
        ),
        ("name: mine", "name: mine\nlabel: label", "label must be left out"),
        ("name: mine", "name: mine\npreprocessing: model:f", "preprocessing must be left out"),
        ("name: mine", "name: mine\nlabel_only: [city]", "label_only must be left out"),
        ("epochs: 3", "epochs: 3, batch_size: 8", "train.batch_size must be left out"),
        ("epochs: 3", "epochs: 3, augment: {}", "train.augment must be left out"),
        ("slices: [city]", "slices: [numbers]", "vectors of length 4"),
        ("slices: [city]", "slices: [town]", "town"),
    ],
)
def test_settings_that_do_not_go_with_it_are_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    path = write(tmp_path / "mine", settings=STOKER_YAML.replace(old, new))
    assert said in refused(path, capfd)


def test_the_python_api_takes_the_same_word(tmp_path: Path) -> None:
    write(tmp_path)
    made = Experiment(name="mine", data="model:dataset", model="model:build", folder=tmp_path)
    assert made.data == load_experiment(tmp_path).data
    with pytest.raises(ConfigError, match="label must be given"):
        Experiment(name="mine", data=IngestConfig(source="a.csv"), model="model:build")


GAN_PY = """\
import keras
import tensorflow as tf
from keras import layers


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(8)])
        self.d_measured = keras.metrics.Mean(name="d_loss")

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self):
        return [self.d_measured]

    def made(self, real):
        return self.generator(tf.random.normal((tf.shape(real)[0], 2)))

    def losses_of(self, real):
        true, false = (tf.reduce_mean(self.discriminator(x)) for x in (real, self.made(real)))
        return false - true, -false

    def train_step(self, data):
        real = data[0]["inputs"]
        for number, (part, optimizer) in enumerate(
            ((self.discriminator, self.d_optimizer), (self.generator, self.g_optimizer))
        ):
            with tf.GradientTape() as tape:
                loss = self.losses_of(real)[number]
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables))
        self.d_measured.update_state(self.losses_of(real)[0])
        return {"d_loss": self.d_measured.result()}  # logs
# test_step
# call


def build(features):
    model = Gan()
    model.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
    # build
    return model


def dataset(split):
    made = tf.data.Dataset.from_tensor_slices(tf.random.stateless_normal((64, 8), (1, 2)))
    return made.batch(16)  # labels
"""

GAN_BUILT = (
    "model.d_optimizer.build(model.discriminator.trainable_variables); "
    "model.g_optimizer.build(model.generator.trainable_variables)"
)
GAN_EDITS = [
    (".map(lambda x: (x, x))", "  # labels", ".map(lambda x: (x, x))"),
    (
        "Add to the class: def test_step(self, data)",
        "# test_step",
        """
    def test_step(self, data):
        self.d_measured.update_state(self.losses_of(data[0]["inputs"])[0])
        return {"d_loss": self.d_measured.result(), "loss": self.d_measured.result()}
""",
    ),
    (
        "Add to the class: def call(self, inputs)",
        "# call",
        """
    def call(self, inputs):
        return self.discriminator(inputs["inputs"])
""",
    ),
    (
        GAN_BUILT,
        "# build",
        GAN_BUILT,
    ),
    (
        "Add to it: 'loss', the sum of d_loss.",
        "}  # logs",
        ', "loss": self.d_measured.result()}',
    ),
]
"""What a message says, and the edit that it asks for: its place in the file, and the code."""


def test_a_gan_of_keras_guide_trains_after_the_edits_that_the_messages_give(tmp_path: Path) -> None:
    settings = "name: gan\ndata: model:dataset\nmodel: model:build\ntrain: {epochs: 1}\n"
    own = Own(write(tmp_path / "gan", model=GAN_PY, settings=settings))

    for said, place, code in GAN_EDITS:
        with pytest.raises(ConfigError) as refused:
            own.run(until="train")
        assert said in refused.value.line()
        own.edit("model.py", place, code)
        if "test_step" in code:
            assert "train.monitor: val_d_loss" in refused.value.line()
            own.edit("stoker.yaml", "epochs: 1", "epochs: 1, monitor: val_d_loss")

    assert own.run(until="train").results["train"]["epochs"] == 1
