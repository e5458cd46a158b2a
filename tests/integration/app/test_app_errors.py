"""What the user gets wrong: one line, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import invoke

HEADER = "id,age,city,spent,note\n"


def stoker(*arguments: str) -> int:
    return invoke(list(arguments), debug=False)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("stoker.yaml", "label:", "lable:", "lable is not a setting. Did you mean 'label'?"),
        ("stoker.yaml", "epochs: 2", "epochs: two", "train.epochs must be a whole number"),
        ("stoker.yaml", "epochs: 2", "epochs: 0", "train.epochs must be at least 1"),
        ("stoker.yaml", "epochs: 2", "epoch: 2", "Did you mean 'epochs'?"),
        ("stoker.yaml", "data.csv", "gone.csv", "gone.csv"),
        ("stoker.yaml", "model:build", "model:bild", "Did you mean 'build'?"),
        ("stoker.yaml", "model:build", "modell:build", "model names a module of"),
        ("stoker.yaml", "model:build", "build", "model must be MODULE:FUNCTION"),
        ("stoker.yaml", "label: bought", "label: bougt", "bougt"),
        ("stoker.yaml", "metrics: [auc", "metrics: [auk", "evaluate.metrics"),
        ("stoker.yaml", "slices: [city]", "slices: [town]", "town"),
        ("stoker.yaml", "split_by: id", "split_by: key", "key"),
        ("stoker.yaml", "label_only: [spent]", "label_only: [spent, age]", "'age'"),
        ("stoker.yaml", "name: small", "name: ../small", "name must be a plain name"),
        ("model.py", "return model", "return 3", "must return a compiled keras.Model"),
        ("model.py", "    model.compile(", "    dict(", "compiled with an optimizer"),
        ("model.py", "UNITS = 8", "UNITS = None + 1", "importing model.py failed (model.py"),
        ("model.py", "layers.Dense(UNITS", "layers.Dens(UNITS", "model:build failed"),
        ("model.py", 'inputs["age"]', 'inputs["aged"]', "aged"),
        ("model.py", "import keras\n", "import keras as (\n", "model.py must be Python (line"),
        ("model.py", "    return model", "    import sys; sys.exit(0)", "SystemExit"),
        ("model.py", 'loss="binary_crossentropy"', "", "compiled with a loss"),
        (
            "model.py",
            'transform.num_buckets("city")',
            "1",
            "has rows for the ids from 0 to 0",
        ),
        (
            "model.py",
            'layers.Dense(1, activation="sigmoid")(x)',
            "layers.Reshape((2, 2))(layers.Dense(4)(x))",
            "first batch",
        ),
        (
            "model.py",
            "st.scale_to_z_score(",
            "tf.random.uniform([]) + st.scale_to_z_score(",
            "random",
        ),
        (
            "model.py",
            'tf.cast(inputs["spent"] > 10.0, tf.int64)',
            'tf.ensure_shape(tf.numpy_function(lambda x: x, [inputs["spent"]], tf.float32), [None])',
            "a Python function",
        ),
        (
            "model.py",
            "return {\n",
            'return {"odd": inputs["age"] - tf.reduce_max(inputs["age"]),\n',
            "must depend only on the same row of the input",
        ),
        ("stoker.yaml", "epochs: 2", "epochs: 99999999999", "train.epochs must be at most"),
        ("stoker.yaml", "name: small", "name: small\nruns: data.csv", "runs folder"),
    ],
)
def test_a_wrong_file_is_one_line_with_exit_code_2(
    folder: Any,
    capfd: pytest.CaptureFixture[str],
    file: str,
    old: str,
    new: str,
    said: str,
) -> None:
    folder.edit(file, old, new)

    assert stoker("evaluate", str(folder.path)) == 2

    error = capfd.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert [line for line in error.splitlines() if line.startswith("stoker: ")] == [
        error.strip().splitlines()[-1]
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("900,33.0,Rome", ["data.csv", "12,000", "fields"]),
        ("900,old,Rome,3.0,n", ["data.csv", "12,000", "age", "old"]),
    ],
)
def test_bad_data_is_named_by_file_row_and_column_and_nothing_is_trained(
    folder: Any, capfd: pytest.CaptureFixture[str], row: str, said: list[str]
) -> None:
    good = [f"{n},{20 + n % 50}.5,Oslo,{n % 23}.0,n{n}" for n in range(11_999)]
    (folder.path / "data.csv").write_text(HEADER + "\n".join([*good, row, good[0]]) + "\n")

    assert stoker("train", str(folder.path)) == 2

    error = capfd.readouterr().err
    assert all(part in error.replace("12000", "12,000") for part in said), error
    assert "Traceback" not in error
    newest = max((folder.path / "runs" / "small").iterdir())
    assert not (newest / "data").exists()
    assert not (newest / "train").exists()

    assert stoker("ingest", str(folder.path), "--set", "data.max_bad_rows=1", "--json") == 0
    assert '"bad_rows": 1' in capfd.readouterr().out


def test_an_empty_split_is_refused(folder: Any, capfd: pytest.CaptureFixture[str]) -> None:
    (folder.path / "data.csv").write_text(HEADER + "1,33.0,Rome,3.0,n\n")

    assert stoker("ingest", str(folder.path)) == 2
    assert "split" in capfd.readouterr().err


def test_a_label_that_is_not_a_number_is_refused(
    folder: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.edit("stoker.yaml", "preprocessing: model:preprocessing_fn\n", "")
    folder.edit("stoker.yaml", "label: bought", "label: age")

    assert stoker("ingest", str(folder.path)) == 2
    assert "label" in capfd.readouterr().err


def test_a_missing_value_that_only_the_label_needs_does_not_become_class_0(
    folder: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    data = folder.path / "data.csv"
    lines = data.read_text().splitlines()
    fields = lines[40].split(",")
    lines[40] = ",".join([*fields[:3], "", *fields[4:]])
    data.write_text("\n".join(lines) + "\n")

    assert stoker("transform", str(folder.path)) == 2
    assert "column 'spent', which only the label 'bought' needs" in capfd.readouterr().err

    folder.edit(
        "model.py",
        'tf.cast(inputs["spent"] > 10.0, tf.int64)',
        'tf.cast(tf.where(tf.math.is_nan(inputs["spent"]), 0.0, inputs["spent"]) > 10.0, tf.int64)',
    )
    assert stoker("transform", str(folder.path)) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "/nowhere"], "must be a folder with a stoker.yaml"),
        (["run", ".", "--set", "x"], "must be a folder with a stoker.yaml"),
        (["rum"], "No such command"),
        (["init"], "--from"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    arguments: list[str],
    said: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert stoker(*arguments) == 2
    assert said in capfd.readouterr().err


def test_a_bug_of_ours_keeps_its_traceback(
    folder: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("stoker.app.chain.run_chain", broken)

    assert stoker("train", str(folder.path)) == 1
    error = capfd.readouterr().err
    assert "Traceback" in error
    assert "RuntimeError: ours" in error
