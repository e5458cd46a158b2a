"""The command line as a new user meets it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from stoker.cli.main import invoke

DESIGN_YAML = """\
name: taxi-tips
data: {source: data/taxi.csv, splits: {train: 0.8, eval: 0.2}}
model: model:build
preprocessing: model:preprocessing_fn
label: big_tip
label_only: [tips]
train: {epochs: 3, batch_size: auto, precision: auto, xla: auto, strategy: auto}
evaluate: {metrics: [auc], slices: [payment_type], gates: {auc: {min: 0.6, max_drop: 0.005}}}
serve: {model_name: taxi}
resources: {accelerators: "H100:4", nodes: 1, spot: true, budget_usd: 50}
"""

DESIGN_MODEL = """\
import keras
import tensorflow as tf

import stoker.transform as st


def preprocessing_fn(inputs):
    return {"fare": st.scale_to_z_score(inputs["fare"]),
            "company": st.compute_and_apply_vocabulary(inputs["company"], top_k=100,
                                                       num_oov_buckets=1),
            "payment": st.hash_strings(inputs["payment_type"], 16),
            "big_tip": tf.cast(inputs["tips"] > 0.2 * inputs["fare"], tf.int64)}


def build(features: dict[str, keras.KerasTensor], transform: st.TransformOutput) -> keras.Model:
    size = transform.vocabulary_size("company")
    company = keras.layers.Embedding(size + 1, 4)(features["company"])
    payment = keras.layers.Embedding(16, 4)(features["payment"])
    fare = keras.ops.expand_dims(features["fare"], -1)
    x = keras.layers.Concatenate()([fare, company, payment])
    x = keras.layers.Dense(16, activation="relu")(x)
    model = keras.Model(features, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["AUC"])
    return model
"""


OTHER_KINDS = ("images", "penguins")
"""What `init` reads in `make soak` alone."""


def stoker(*arguments: str) -> int:
    return invoke(list(arguments), debug=False)


def test_the_designs_own_two_files_lead_to_a_served_model(
    sample_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command with its server and both protocols."""
    (tmp_path / "stoker.yaml").write_text(DESIGN_YAML)
    (tmp_path / "model.py").write_text(DESIGN_MODEL)
    (tmp_path / "data").mkdir()
    shutil.copy(sample_data / "taxi.csv", tmp_path / "data")

    assert stoker("run", str(tmp_path)) == 0

    said = capfd.readouterr()
    assert (
        "This run uses this machine; the section `resources` applies to jobs on a cluster only."
        in said.err
    )
    for part in (
        "utilization",
        "waiting for input",
        "auc",
        "gate",
        "true label",
        "version 1",
    ):
        assert part in said.out
    # Three epochs take a tenth of a second: next to other work U may be noise, and is reported as noise.
    (stage,) = tmp_path.glob("runs/*/*/stages/train.json")
    busy = json.loads(stage.read_text())["result"]["busy_fraction"]
    expected = (
        f"{min(busy, 1.0):.0%} busy"
        if busy <= 1.05
        else f"not measurable ({busy:.2f}: other programs disturbed it)"
    )
    assert f"U {expected}" in " ".join(said.out.split())
    commands = said.out[said.out.index("next") :].strip().splitlines()[1:]
    assert len(commands) == 3
    assert '# then: curl -d \'{"instances": [{' in commands[0]

    # `run --json`, with the answers of another server, test_app_own_dataset has.
    assert stoker("evaluate", str(tmp_path), "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["skipped"]
    assert facts["metrics"]["auc"] >= 0.6


def test_an_address_of_another_machine_for_the_metrics_is_refused_before_any_stage(
    make_folder: Callable[[], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder().path
    before = sorted(folder.iterdir())
    metrics = ("--set", "train.metrics_port=0", "--set")

    for address, said in {"192.0.2.1": "Cannot assign", "lo": "an IPv4 address"}.items():
        assert stoker("run", str(folder), *metrics, f"train.metrics_host={address}") == 2
        (line,) = capfd.readouterr().err.strip().splitlines()
        assert "train.metrics_host must be an" in line
        assert said in line
    assert sorted(folder.iterdir()) == before


def write_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for label, level in (("dark", 40), ("light", 200)):
        for number in range(60):
            image = np.clip(rng.normal(level, 20, (12, 10, 3)), 0, 255).astype(np.uint8)
            path = folder / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), image)


def write_table(path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["Kundennr;höhe in cm;def;class"]
    for row in range(400):
        height = rng.normal(170, 10)
        lines.append(f"K{row};{height:.1f};{rng.choice(['a', 'b', ''])};{int(height > 170)}")
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "kind", ["table", *(pytest.param(kind, marks=pytest.mark.soak) for kind in OTHER_KINDS)]
)
def test_init_writes_two_files_that_run_as_they_are(
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / ("pictures" if kind == "images" else "kunden.csv")
    if kind == "images":
        write_images(source)
    elif kind == "table":
        write_table(source)
    else:
        source = request.getfixturevalue("sample_data") / "penguins.csv"
    folder = tmp_path / "mine"
    label = ["--label", "species"] if kind == "penguins" else []

    assert stoker("init", str(folder), "--from", str(source), *label) == 0
    assert {path.name for path in folder.iterdir()} == {"stoker.yaml", "model.py"}
    assert stoker("push", str(folder), "--set", "train.epochs=3", "--json") == 0, capfd.readouterr()
    assert '"version": 1' in capfd.readouterr().out

    assert stoker("init", str(folder), "--from", str(source), *label) == 2
    assert "does not overwrite files" in capfd.readouterr().err


def test_help_loads_neither_tensorflow_nor_pandas() -> None:
    code = (
        "import sys\nfrom stoker.cli.main import invoke\n"
        "invoke(['--help'], debug=False); invoke(['run', '--help'], debug=False)\n"
        "heavy = {'tensorflow', 'keras', 'pandas', 'pyarrow', 'cv2', 'ibis'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    for verb in ("init", "run", "ingest", "analyze", "train", "export", "evaluate", "push"):
        assert verb in done.stdout


def test_the_exit_code_of_the_process_is_that_of_the_gate(folder: Any) -> None:
    folder.edit("stoker.yaml", "min: 0.5", "min: 1.1")
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "evaluate", str(folder.path)],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 3
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("stoker: every check of stage evaluate must pass")
    assert "Traceback" not in done.stderr


def test_the_python_api_is_the_same_chain_and_writes_to_the_given_folders(
    make_folder: Callable[[], Any], tmp_path: Path
) -> None:
    import stoker

    folder = make_folder()
    experiment = stoker.Experiment(
        name="small",
        data=stoker.Data(source=str(folder.path / "data.csv"), split_by="id"),
        model="model:build",
        preprocessing="model:preprocessing_fn",
        label="bought",
        label_only=("spent",),
        train=stoker.Train(epochs=1),
        folder=folder.path,
        runs=tmp_path / "R",
        models=tmp_path / "M",
    )

    result = stoker.run(experiment)

    assert result.results["push"]["version"] == 1
    assert result.run.parent == tmp_path / "R" / "small"
    assert (tmp_path / "M" / "small" / "1" / "saved_model.pb").is_file()
    written = {path.name for path in result.run.iterdir() if not path.name.startswith(".")}
    assert written == {
        *("analysis", "data", "evaluation", "folder.json", "lock", "model", "push", "run.json"),
        *("stages", "train", "transform"),
    }
    assert not any((folder.path / name).exists() for name in ("runs", "models"))


SUBCLASSED = """
import keras
from keras import layers


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="relu")
        self.drop = layers.Dropout(0.2)
        self.out = layers.Dense(1)

    def call(self, features, training=False):
        x = keras.ops.expand_dims(features["age"], -1)
        return self.out(self.drop(self.dense(x), training=training))


def build(features):
    model = Net()
    loss = [keras.losses.BinaryCrossentropy(from_logits=True)]
    model.compile(optimizer="adam", loss=loss)
    return model


def preprocessing_fn(inputs):
    return {"age": tf.where(tf.math.is_nan(inputs["age"]), 0.0, inputs["age"]) / 80.0,
            "bought": tf.cast(inputs["spent"] > 10.0, tf.int64)}
"""


def test_a_subclassed_model_that_answers_logits_is_trained_evaluated_and_pushed(
    folder: Any,
) -> None:
    (folder.path / "model.py").write_text("import tensorflow as tf\n" + SUBCLASSED)
    folder.edit("stoker.yaml", "metrics: [auc, accuracy]", "metrics: [auc, accuracy, log_loss]")

    result, _ = folder.run()

    metrics = result.results["evaluate"]["metrics"]
    assert all(isinstance(value, float) for value in metrics.values()), metrics
    assert result.results["push"]["version"] == 2


def test_a_new_column_reaches_a_function_that_takes_them_all(
    make_folder: Callable[[], Any],
) -> None:
    folder = make_folder()
    folder.edit("model.py", '"city": st.', '**extras(inputs), "city": st.')
    folder.edit(
        "model.py",
        "UNITS = 8",
        "UNITS = 8\n\n\ndef extras(inputs):\n"
        "    return {n: inputs[n] for n in inputs if n.startswith('extra')}\n",
    )
    before, _ = folder.run(until="transform")
    data = folder.path / "data.csv"
    header, *rows = data.read_text().splitlines()
    data.write_text("\n".join([f"{header},extra", *(f"{row},1.5" for row in rows)]) + "\n")

    after, seen = folder.run(until="transform")

    assert "extra" not in before.results["transform"]["features"]
    assert "extra" in after.results["transform"]["features"]
    assert seen.worked == ["ingest", "analyze", "transform"]


def test_a_float_label_of_zeros_and_ones_is_still_a_regression(folder: Any) -> None:
    folder.edit("model.py", "> 10.0, tf.int64", "> 10.0, tf.float32")
    folder.edit("model.py", 'loss="binary_crossentropy"', 'loss="mse"')
    folder.edit("stoker.yaml", "metrics: [auc, accuracy]", "metrics: [rmse]")
    folder.edit("stoker.yaml", "gates: {auc: {min: 0.5}}", "gates: {rmse: {max: 0.6}}")

    result, _ = folder.run(until="evaluate")

    assert result.results["evaluate"]["metrics"]["rmse"] < 0.6
