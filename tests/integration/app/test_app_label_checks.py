"""Labels against the model, through the commands: ordinary tables pass, wrong labels exit with 2."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.app.chain import run_chain
from stoker.app.experiment import load_experiment
from stoker.app.stage_outputs import open_transform
from stoker.cli.main import invoke
from stoker.core.user_code import load_function
from stoker.data.features.analysis.input_checks import input_findings
from stoker.data.features.analysis.label_summary import labels_from_facts
from stoker.scaffold import write_experiment
from stoker.train.setup.build_model import build_model
from stoker.train.setup.label_checks import findings

from .conftest import Recorder

ROWS = 200


def write_csv(path: Path, columns: dict[str, Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def ordinary_labels() -> dict[str, Sequence[Any]]:
    rng = np.random.default_rng(1)
    return {
        "yes_no": rng.choice(["yes", "no"], ROWS).tolist(),
        "true_false": rng.choice(["true", "false"], ROWS).tolist(),
        "zero_one": rng.integers(0, 2, ROWS).tolist(),
        "zero_one_floats": rng.choice(["0.0", "1.0"], ROWS).tolist(),
        "one_two": rng.integers(1, 3, ROWS).tolist(),
        "minus_plus": rng.choice([-1, 1], ROWS).tolist(),
        "five_stars": rng.integers(1, 6, ROWS).tolist(),
        "ten_from_zero": rng.integers(0, 10, ROWS).tolist(),
        "gaps": rng.choice([3, 5, 9], ROWS).tolist(),
        "three_texts": rng.choice(["cat", "dog", "cow"], ROWS).tolist(),
        "rare": ["rare" if row % 20 == 0 else "often" for row in range(ROWS)],
        "price": rng.lognormal(3, 1, ROWS).round(2).tolist(),
        "temperature": rng.normal(-5, 10, ROWS).round(1).tolist(),
        "count": rng.poisson(30, ROWS).tolist(),
        "share": rng.uniform(0, 1, ROWS).round(4).tolist(),
        "half_steps": (rng.integers(0, 60, ROWS) / 2).tolist(),
        "year": rng.integers(1950, 2026, ROWS).tolist(),
        "large": (rng.integers(0, 10**6, ROWS) * 1000).tolist(),
        "some_missing": ["" if row % 9 == 0 else str(row % 2) for row in range(ROWS)],
        "texts_with_spaces": rng.choice(["very good", "not so good"], ROWS).tolist(),
    }


TELLING = {"zero_one", "minus_plus", "three_texts", "rare", "price", "some_missing"}
"""Labels of `make test`, with each of the extra columns; `make soak` has all."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.soak] * (name not in TELLING))
        for name in ordinary_labels()
    ],
)
def test_the_generated_model_of_an_ordinary_table_gets_no_finding(
    name: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    label = ordinary_labels()[name]
    extras: dict[str, Sequence[Any]] = {
        "country": ["DE" if row % 50 else "AT" for row in range(ROWS)],
        "cabin": [f"C{row}" if row % 6 == 0 else "" for row in range(ROWS)],
        "currency": ["EUR"] * ROWS,
        "fax": [""] * ROWS,
        "before": [*label[1:], label[0]],
    }
    extra = list(extras)[list(ordinary_labels()).index(name) % len(extras)]
    columns = {
        "key": list(range(ROWS)),
        "width": rng.normal(size=ROWS).round(3).tolist(),
        "color": rng.choice(["red", "", "blue"], ROWS).tolist(),
        extra: extras[extra],
        name: label,
    }
    write_experiment(tmp_path / "made", write_csv(tmp_path / "data.csv", columns), label=name)
    experiment = load_experiment(tmp_path / "made")

    chain = run_chain(experiment, Recorder(), until="transform")

    transform = open_transform(experiment, chain.output("transform"))
    built = build_model(
        load_function(experiment.folder, experiment.model, where="model"),
        transform,
        what=experiment.model,
    )
    labels = labels_from_facts(chain.results["transform"]["labels"])
    assert set(labels) == {"train", "eval"}
    assert list(findings(built, labels, monitor=experiment.train.monitor)) == []
    found_here = input_findings(
        anomalies=chain.results["analyze"]["of_columns"] + chain.results["transform"]["of_columns"],
        losses=chain.results["transform"]["vocabulary_losses"],
        served={column.name: column.shape for column in transform.serving_columns},
        labels=transform.labels,
        label_columns=[column.name for column in transform.label_columns],
        own=False,
    )
    assert list(found_here) == []


def test_columns_that_decide_a_label_of_preprocessing_fn_are_found(tmp_path: Path) -> None:
    price = np.random.default_rng(2).lognormal(3, 1, ROWS).round(2)
    columns = {
        "price": price.tolist(),
        "grade": np.where(price > 20, "A", "B").tolist(),
        "paid": np.where(price > 20, "yes", "").tolist(),
        "width": np.random.default_rng(3).normal(size=ROWS).round(3).tolist(),
    }
    write_csv(tmp_path / "data.csv", columns)
    (tmp_path / "stoker.yaml").write_text(
        "name: made\ndata: {source: data.csv}\nlabel: price\nlabel_only: [price]\n"
        "model: model:build\npreprocessing: model:preprocessing_fn\n"
    )
    # The label has the name of a raw column, of many numbers, and is text of two classes.
    (tmp_path / "model.py").write_text(
        "import tensorflow as tf\n\n\ndef preprocessing_fn(inputs):\n"
        "    price = inputs.get('price')\n"
        "    outputs = {name: inputs[name] for name in ('grade', 'paid', 'width')}\n"
        "    return outputs | {'price': tf.where(price > 20.0, 'high', 'low')}\n"
    )

    chain = run_chain(load_experiment(tmp_path), Recorder(), until="transform")

    assert chain.results["analyze"]["of_columns"] == []
    found = chain.results["transform"]["of_columns"]
    assert [each["column"] for each in found] == ["grade", "paid"]
    assert sorted(path.name for path in chain.output("transform").iterdir() if path.is_dir()) == [
        "assets",
        "variables",
    ]


def test_warnings_of_the_data_are_shown_once_and_kept_in_every_later_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    people = [f"{1 + row % 9},{row:03d},{row:03d}" for row in range(60)]
    index, label = [f"{row}" for row in range(60)], [row % 2 for row in range(60)]
    write_csv(tmp_path / "data.csv", {"": index, "people": people, "y": label})
    settings = "name: kept\ndata: {source: data.csv}\nlabel: LABEL\nmodel: model:build\n"
    (tmp_path / "stoker.yaml").write_text(settings.replace("LABEL", "Unnamed"))
    assert invoke(["ingest", str(tmp_path)], debug=False) == 2
    assert "the first column has no name" in caplog.messages[0]
    (tmp_path / "stoker.yaml").write_text(settings.replace("LABEL", "y"))
    capfd.readouterr()
    shown = []
    for verb in ("ingest", "analyze", "analyze"):
        caplog.clear()
        assert invoke([verb, str(tmp_path), "--json"], debug=False) == 0
        shown.append(caplog.messages)
        facts = json.loads(capfd.readouterr().out)
        unnamed, written = facts["warnings"]
        assert "the first column has no name" in unnamed
        assert "column 'people' is read as text, but looks like numbers" in written
    assert shown == [[unnamed, written], [], []]
    assert facts["skipped"]


MODEL = """
import keras
import tensorflow as tf

def build(features):
    x = keras.ops.expand_dims(features["a"], -1)
    model = keras.Model(features, keras.layers.Dense({units}, activation={activation!r})(x))
    model.compile(optimizer="adam", loss={loss!r}, metrics=["accuracy"])
    return model

def dataset(split):
    a = tf.range({rows}, dtype=tf.float32) / {rows}.0
    y = tf.range({rows}) % 2 + 1
    return tf.data.Dataset.from_tensor_slices(({{"a": a}}, y)).batch(16)
"""


@pytest.mark.parametrize(
    ("data", "label", "loss", "activation", "units", "said"),
    [
        ("{source: data.csv}", "label: y", "binary_crossentropy", "sigmoid", 1, "Map 1 to 0"),
        (
            "{source: data.csv}",
            "label: y",
            "sparse_categorical_crossentropy",
            "softmax",
            2,
            "Subtract 1",
        ),
        ("model:dataset", "", "binary_crossentropy", "sigmoid", 1, "Map 1 to 0"),
    ],
)
def test_labels_that_the_loss_cannot_learn_end_before_the_first_step(
    data: str,
    label: str,
    loss: str,
    activation: str,
    units: int,
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows = "".join(f"{row},{row / 60},{row % 2 + 1}\n" for row in range(60))
    (tmp_path / "data.csv").write_text("key,a,y\n" + rows)
    (tmp_path / "model.py").write_text(
        MODEL.format(units=units, activation=activation, loss=loss, rows=60)
    )
    (tmp_path / "stoker.yaml").write_text(
        f"name: labels\ndata: {data}\nmodel: model:build\n{label}\ntrain: {{epochs: 1}}\n"
    )

    code = invoke(["train", str(tmp_path)], debug=False)

    error = capfd.readouterr().err
    assert code == 2, error
    assert said in error
    assert "goes from 1 to 2" in error
    assert not list(tmp_path.glob("runs/*/*/train/checkpoints/*"))


EMBEDDED = """
import keras
import stoker.transform as st
import tensorflow as tf

def preprocessing_fn(inputs):
    city = st.compute_and_apply_vocabulary(inputs["city"], top_k=4, num_oov_buckets={buckets})
    return {{"city": city, "size": inputs["size"], "y": inputs["y"]}}

def build(features):
    city = keras.layers.Embedding({rows}, 2, name="cities")(features["city"] + {shift})
    x = keras.ops.concatenate([city, keras.ops.expand_dims(features["size"], -1)], -1)
    model = keras.Model(features, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model
"""


@pytest.mark.parametrize(
    ("buckets", "rows", "shift", "code"),
    [(0, 4, 0, 2), (1, 5, 0, 0), pytest.param(0, 5, 1, 0, marks=pytest.mark.soak)],
)
def test_a_value_out_of_vocabulary_without_a_row_in_an_embedding_ends_before_the_first_step(
    buckets: int,
    rows: int,
    shift: int,
    code: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # Only row 500 of 600 has a city that the vocabulary leaves out: not in the first batch.
    cities = [*(list("ABCD") * 150)]
    cities[500] = "unseen"
    table: dict[str, Sequence[Any]] = {
        "city": cities,
        "size": [row / 600 for row in range(600)],
        "y": [0, 0, 1, 1] * 150,
    }
    write_csv(tmp_path / "data.csv", table)
    (tmp_path / "model.py").write_text(EMBEDDED.format(buckets=buckets, rows=rows, shift=shift))
    (tmp_path / "stoker.yaml").write_text(
        "name: ids\ndata: {source: data.csv}\nlabel: y\n"
        "model: model:build\npreprocessing: model:preprocessing_fn\ntrain: {epochs: 1}\n"
    )

    assert invoke(["train", str(tmp_path)], debug=False) == code

    error = capfd.readouterr().err
    if code:
        assert "% of the values of 'city' in" in error
        assert "are not in its vocabulary" in error
        assert "layer 'cities', an Embedding, has rows for the ids from 0 to 3" in error
        assert "num_oov_buckets=1" in error
        assert not list(tmp_path.glob("runs/*/*/train/checkpoints/*"))


LOOKUP = """
import keras
import tensorflow as tf

def build(features):
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot", name="kinds")
    kind = lookup(features["kind"])
    model = keras.Model(features, keras.layers.Dense(1, activation="sigmoid")(kind))
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model

def dataset(split):
    kind = tf.gather(["A", "B"], tf.range(64) % 2)
    return tf.data.Dataset.from_tensor_slices(({"kind": kind}, tf.range(64) % 2)).batch(16)
"""


@pytest.mark.parametrize("own", [False, True])
def test_a_lookup_layer_that_matches_nothing_is_one_warning(
    own: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "".join(f"{row},{'AB'[row % 2]},{row % 2}\n" for row in range(128))
    (tmp_path / "data.csv").write_text("key,kind,y\n" + rows)
    (tmp_path / "model.py").write_text(LOOKUP)
    data = "data: model:dataset" if own else "data: {source: data.csv}\nlabel: y"
    (tmp_path / "stoker.yaml").write_text(
        f"name: lookup\n{data}\nmodel: model:build\ntrain: {{epochs: 1}}\n"
    )

    assert invoke(["train", str(tmp_path)], debug=False) == 0

    found = [each for each in caplog.messages if "not in the vocabulary of layer 'kinds'" in each]
    assert len(found) == 1
    assert found[0].startswith("100% of the values of 'kind' in the first batch")
