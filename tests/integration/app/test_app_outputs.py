"""A model of several outputs through all stages: from one table to both answers over REST."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from stoker.app.chain import ChainResult, run_chain
from stoker.app.dry_run import dry_run
from stoker.app.evaluation import predict_eval_split
from stoker.app.experiment import load_experiment
from stoker.app.smoke_test import smoke_test
from stoker.app.stage_outputs import open_dataset, open_transform
from stoker.cli.summary import print_summary
from stoker.core.errors import CheckFailed, ConfigError, DataError
from stoker.core.files import read_json
from stoker.data.features.analysis.statistics import TRAIN, load_statistics
from stoker.registry.training_statistics import read_training_statistics

from .conftest import Recorder

STOKER_YAML = """\
name: two
data: {source: data.csv}
model: model:build
preprocessing: model:preprocessing_fn
label: {width: wide, species: kind}
label_only: [noted]
train: {epochs: 8, batch_size: 32, deterministic: true, monitor: val_species_accuracy}
evaluate:
  slices: [city]
  gates: {species_accuracy: {min: 0.8}, width_rmse: {max: 1.0}}
  slice_gates: {width_mae: {slices: [city], max: 2.0, min_rows: 10}}
"""

MODEL_PY = """\
import keras
import tensorflow as tf
from keras import layers


def preprocessing_fn(inputs):
    numbers = tf.stack([inputs["a"], inputs["b"]], axis=1)
    return {"numbers": numbers, "wide": inputs["width_mm"] / 10.0}


def build(features, transform):
    x = layers.Dense(16, activation="relu")(features["numbers"])
    # Not in the order of the alphabet.
    outputs = {
        "width": layers.Dense(1, name="last")(x),
        "species": layers.Dense(transform.num_classes["species"], name="first")(x),
    }
    model = keras.Model(features, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(0.03),
        loss={
            "species": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "width": "mse",
        },
        metrics={"species": ["accuracy"]},
    )
    return model
"""


def write(path: Path, *, missing: str = "") -> Path:
    """Three kinds by `a`, and a width by `b`; `missing` is a line that is added."""
    rng = np.random.default_rng(0)
    lines = ["a,b,kind,width_mm,city,noted"]
    for _ in range(500):
        a, b = rng.normal(size=2)
        kind = "rose" if a > 0.5 else "iris" if a < -0.5 else "lily"
        width = 10 * b + rng.normal()
        lines.append(f"{a:.4f},{b:.4f},{kind},{width:.3f},{rng.choice(['Rome', 'Oslo'])},x")
    path.mkdir()
    (path / "data.csv").write_text("\n".join([*lines, missing]))
    (path / "stoker.yaml").write_text(STOKER_YAML)
    (path / "model.py").write_text(MODEL_PY)
    return path


def run(path: Path, *overrides: str, until: str = "push") -> ChainResult:
    return run_chain(load_experiment(path, overrides=overrides), Recorder(), until=until)


@pytest.fixture(scope="module")
def finished_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ChainResult]:
    path = write(tmp_path_factory.mktemp("outputs") / "two")
    return path, run(path)


@pytest.fixture
def two(finished_two: tuple[Path, ChainResult], tmp_path: Path) -> Path:
    shutil.copytree(finished_two[0], tmp_path / "two")
    return tmp_path / "two"


def test_both_outputs_are_trained_gated_and_served_over_rest_and_grpc(
    finished_two: tuple[Path, ChainResult],
) -> None:
    path, chain = finished_two

    proof = smoke_test(load_experiment(path), chain)

    assert chain.results["train"]["metrics"].keys() >= {
        "val_loss",
        "val_species_loss",
        "val_species_accuracy",
        "val_width_loss",
    }
    [warning] = chain.results["train"]["warnings"]
    assert warning.startswith("column 'a' of train: it alone decides the label 'kind' in every row")
    assert "data.columns: {exclude: ['a']}" in warning
    summary = io.StringIO()
    print_summary(Console(file=summary, width=200), load_experiment(path), path, chain, proof)
    assert re.search(r"^warnings +1, kept in .*/stages *$", summary.getvalue(), re.MULTILINE)
    passed = {v["key"]: v["passed"] for v in chain.results["evaluate"]["verdicts"]}
    assert passed.keys() >= {"evaluate.gates.species_accuracy.min", "evaluate.gates.width_rmse.max"}
    assert all(passed.values())
    assert proof.rest_row.keys() == {"a", "b"}
    for answer in proof.answers:
        # The kind that the data has, and a width near the true one.
        (_, width, _, kind), (_, near, _, said, _) = answer.truth.split(" "), answer.rest.split(" ")
        assert kind == said
        assert float(near[:-1]) == pytest.approx(float(width[:-1]), abs=1.0)


def test_what_is_evaluated_are_the_named_answers_of_the_exported_model(
    finished_two: tuple[Path, ChainResult],
) -> None:
    path, chain = finished_two
    experiment = load_experiment(path)
    transform = open_transform(experiment, chain.output("transform"))
    dataset = open_dataset(experiment, chain.output("ingest"), analysis=chain.results["analyze"])

    predicted = predict_eval_split(
        chain.output("export"), dataset, transform, inputs=transform.serving_columns, slices=()
    )

    right = float(
        (predicted.predictions["species"].argmax(1) == predicted.labels["species"]).mean()
    )
    away = float(
        np.square(predicted.predictions["width"][:, 0] - predicted.labels["width"]).mean() ** 0.5
    )
    metrics = chain.results["evaluate"]["metrics"]
    assert metrics["species_accuracy"] == pytest.approx(right)
    assert metrics["width_rmse"] == pytest.approx(away, rel=1e-5)
    # What training measured of the best weights is what the exported model answers.
    trained = chain.results["train"]["metrics"]
    assert trained["val_species_accuracy"] == pytest.approx(right, abs=1e-6)
    assert trained["val_width_loss"] == pytest.approx(away**2, rel=1e-3)
    assert chain.results["evaluate"]["main_metric"] == "width_rmse"
    lineage = read_json(chain.output("export") / "lineage.json")
    assert lineage["classes"] == {"species": ["iris", "lily", "rose"], "width": None}
    assert lineage["from_logits"] == {"species": True, "width": False}
    carried = read_training_statistics(chain.output("export"))
    analyzed = load_statistics(chain.output("analyze") / "statistics.json").splits[TRAIN]
    assert carried == {each.name: each for each in analyzed if each.name in lineage["inputs"]}
    assert set(carried) == set(lineage["inputs"])
    report = (chain.output("evaluate") / "report.html").read_text()
    assert "Confusion of species" in report
    assert "Calibration of width" in report


def test_a_gate_of_one_output_keeps_the_model_back_and_a_baseline_is_compared_by_output(
    two: Path,
) -> None:
    gates = "evaluate.gates={species_accuracy: {max_drop: 0.2}, width_rmse: {max: 0.01}}"

    with pytest.raises(CheckFailed, match=r"width_rmse must be at most 0\.01"):
        run(two, gates, "train.seed=1")

    written = (two / "runs").glob("*/*/evaluation/evaluation.json")
    evaluation = json.loads(max(written, key=lambda file: file.stat().st_mtime_ns).read_text())
    failed = [verdict["key"] for verdict in evaluation["verdicts"] if not verdict["passed"]]
    assert failed == ["evaluate.gates.width_rmse.max"]
    assert evaluation["baseline"]["version"] == "version 1"
    assert evaluation["baseline"]["metrics"].keys() >= {"species_accuracy", "width_rmse"}
    assert evaluation["outputs"]["species"]["task"]["classes"] == 3
    assert [each.name for each in (two / "models/two").iterdir() if each.is_dir()] == ["1"]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("{widht: wide, species: kind}", r"each of the model's outputs.*Did you mean 'width'"),
        ("kind", r"each of the model's outputs.*one label without an output's name"),
    ],
)
def test_a_label_of_no_output_ends_before_training(two: Path, label: str, message: str) -> None:
    settings, _ = STOKER_YAML.split("train:")
    text = settings.replace("{width: wide, species: kind}", label)
    (two / "stoker.yaml").write_text(text)
    if label == "kind":
        model = MODEL_PY.replace('num_classes["species"]', "num_classes")
        (two / "model.py").write_text(model)

    with pytest.raises(ConfigError, match=message):
        run(two, until="train")
    with pytest.raises(ConfigError, match=message):
        dry_run(load_experiment(two), Recorder())


def test_a_mapping_that_cannot_be_meant_is_refused_when_it_is_read(two: Path) -> None:
    (two / "stoker.yaml").write_text(STOKER_YAML.replace("{width: wide, ", "{"))
    with pytest.raises(ConfigError, match="Write `label: kind`"):
        load_experiment(two)
    (two / "stoker.yaml").write_text(STOKER_YAML)
    for setting, message in {
        "evaluate.gates={spceies_accuracy: {min: 0.5}}": "species_accuracy",
        "evaluate.metrics=[accuracy]": "OUTPUT_METRIC",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_experiment(two, overrides=[setting])
    with pytest.raises(ConfigError, match=r"column of the data.*'knid'. Did you mean 'kind'"):
        run(two, "label={species: knid, width: width_mm}", "preprocessing=null", until="ingest")


def test_a_record_without_one_of_its_labels_is_a_bad_one(tmp_path: Path) -> None:
    path = write(tmp_path / "gap", missing="0.1,0.2,,3.0,Rome,x\n")

    with pytest.raises(DataError, match="column 'kind': the label is missing"):
        run(path, "label={species: kind, width: width_mm}", until="ingest")


def test_a_rehearsal_of_two_outputs_serves_both(two: Path) -> None:
    rehearsal = dry_run(load_experiment(two), Recorder())

    assert sorted(rehearsal.served.outputs) == ["species", "width"]


OWN_PY = """

def dataset(split):
    import numpy as np

    rng = np.random.default_rng(len(split))
    x = rng.normal(size=(200, 2)).astype(np.float32)
    labels = {"width": x[:, :1] * 2.0, "species": (x[:, 1] > 0).astype(np.int64)}
    # Several at once; every row of eval has exactly one.
    labels["signs"] = (x > 0).astype(np.int64)
    if split == "eval":
        labels["signs"][:, 1] = 1 - labels["signs"][:, 0]
    return tf.data.Dataset.from_tensor_slices(({"numbers": x}, labels)).batch(20)
"""


def test_a_dict_of_labels_in_a_dataset_of_ones_own_is_trained_evaluated_and_pushed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own"
    path.mkdir()
    model = MODEL_PY.replace('transform.num_classes["species"]', "2")
    model = model.replace(
        "    model = keras.Model(",
        '    outputs["signs"] = layers.Dense(2, activation="sigmoid")(x)\n    model = keras.Model(',
    ).replace('"width": "mse",', '"width": "mse", "signs": "binary_crossentropy",')
    (path / "model.py").write_text(model + OWN_PY)
    (path / "stoker.yaml").write_text(
        "name: own\ndata: model:dataset\nmodel: model:build\ntrain: {epochs: 10}\n"
        "evaluate: {gates: {species_auc: {min: 0.9}, width_rmse: {max: 1.0}, "
        "signs_label_0_auc: {min: 0.9}}}\n"
    )

    chain = run(path)

    assert chain.results["push"]["version"] == 1
    evaluated = chain.results["evaluate"]
    assert evaluated["main_metric"] == "signs_macro_auc"
    # The training split has rows of no label and of two, so those of eval are not classes.
    assert evaluated["metrics"].keys() >= {"signs_subset_accuracy", "signs_label_1_recall"}
    with pytest.raises(ConfigError, match=r"'signs_label_2_auc'. Did you mean 'signs_label_"):
        run(path, "evaluate.metrics=[signs_label_2_auc]")
    with pytest.raises(ConfigError, match=r"gates.*'wide_rmse'. Did you mean 'width_"):
        run(path, "evaluate.gates={wide_rmse: {max: 1.0}}")
