from __future__ import annotations

import ast
import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stoker.app.experiment import Experiment, load_experiment
from stoker.core.config import dns_name, read_yaml
from stoker.core.errors import ConfigError, DataError, UserError
from stoker.core.user_code import load_function
from stoker.data.columns import VARYING, Column, Dtype, to_numpy
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.ingest import ColumnDescription, SourceDescription, ingest
from stoker.scaffold import Scaffolded, default_name, write_experiment
from stoker.scaffold.model import image_model, table_model
from stoker.scaffold.source_facts import Label
from stoker.scaffold.spelling import python_list, yaml_flow

HOSTILE = [
    *("mean radius", 'a "quoted" one', "it's", "größe", "class ", "def", "lambda", "a\\b", "{x}"),
    *(
        "$y",
        "%s",
        "'''",
        '"""',
        "# no",
        "x: y",
        "- z",
        "yes",
        "null",
        "1",
        "u\u2028v",
        "a'\"b",
        "😀",
    ),
]
"""Names that can end a string, a comment, a line or a YAML value by accident."""


def write_csv(path: Path, columns: dict[str, Sequence[Any]], *, delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def table(rows: int = 60, **label: Sequence[Any]) -> dict[str, Sequence[Any]]:
    rng = np.random.default_rng(0)
    return {
        "width": [round(value, 3) for value in rng.normal(size=rows).tolist()],
        "color": rng.choice(["red", "", "blue"], rows).tolist(),
        **{name: values[:rows] for name, values in label.items()},
    }


def cycled(*values: Any) -> list[Any]:
    return [*values] * 100


def write_images(root: Path, sizes: dict[str, list[tuple[int, int]]]) -> Path:
    rng = np.random.default_rng(0)
    for label, shapes in sizes.items():
        (root / label).mkdir(parents=True)
        for number, (height, width) in enumerate(shapes):
            pixels = rng.integers(0, 256, (height, width), dtype=np.uint8)
            cv2.imwrite(str(root / label / f"{number}.png"), pixels)
    return root


def scaffold(tmp_path: Path, columns: dict[str, Sequence[Any]], **options: Any) -> Scaffolded:
    source = write_csv(tmp_path / "data.csv", columns)
    return write_experiment(tmp_path / "made", source, **options)


def constants(code: str) -> dict[str, Any]:
    """The lists at the top of model.py."""
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(code).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def described(*names: str, dtype: Dtype = "float32", distinct: int = 9) -> SourceDescription:
    columns = tuple(
        ColumnDescription(column=Column(name=name, dtype=dtype), distinct=distinct, missing=0)
        for name in names
    )
    return SourceDescription(format="csv", columns=columns, rows=100, bad=0, classes={})


@pytest.mark.parametrize(
    ("values", "task", "form"),
    [
        (cycled("yes", "no"), "binary", "binary_crossentropy"),
        (cycled("cat", "dog", "cow"), "multiclass", "Dense(transform.num_classes"),
        (cycled(0, 1), "binary", "label 1"),
        (cycled("0.0", "1.0"), "binary", "label 1"),
        (cycled("true", "false"), "binary", "label 1"),
        (cycled(0, 1, 2), "multiclass", "Dense(3,"),
        (cycled(1, 2), "binary", "second class"),
        (cycled(3, 5, 9), "multiclass", "Dense(transform.num_classes"),
        (cycled(1, 2, ""), "binary", 'features["target"] = st.compute_and_apply_vocabulary'),
        (list(range(100)), "regression", 'loss="mse"'),
        ([number / 7 for number in range(100)], "regression", 'loss="mse"'),
        (cycled(0.5, 1.5), "regression", 'loss="mse"'),
    ],
)
def test_the_task_follows_from_the_labels_values(
    values: list[Any], task: str, form: str, tmp_path: Path
) -> None:
    made = scaffold(tmp_path, table(target=values))

    assert made.task == task
    assert form in (tmp_path / "made/model.py").read_text()


def test_numbers_that_name_classes_are_read_as_text(tmp_path: Path) -> None:
    scaffold(tmp_path, table(target=cycled(3, 5, 9)))

    assert load_experiment(tmp_path / "made").files.types == {"target": "string"}


def test_rows_without_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    made = scaffold(tmp_path, table(target=cycled("a", "b", "")))

    assert load_experiment(tmp_path / "made").files.max_bad_rows == 20
    assert "20 rows have no label" in made.note


def test_a_regression_answers_in_the_labels_own_unit(tmp_path: Path) -> None:
    scaffold(tmp_path, table(rows=100, price=[1000 + number for number in range(100)]))

    code = (tmp_path / "made/model.py").read_text()
    assert "Rescaling(scale=28.8661, offset=1049.5," in code


@pytest.mark.parametrize(
    ("names", "expected", "why"),
    [
        (["Species", "x"], "Species", "by its name"),
        (["x", "diagnosis", "z"], "diagnosis", "by its name"),
        (["label", "target", "z"], "label", "by its name"),
        (["x", "z"], "z", "as the last column"),
    ],
)
def test_the_label_is_guessed_from_names_else_the_last_column(
    names: list[str], expected: str, why: str, tmp_path: Path
) -> None:
    made = scaffold(tmp_path, {name: cycled(0, 1, 2)[:60] for name in names})

    assert made.label == expected
    assert f'"{expected}" ({why})' in made.note
    assert "--label COLUMN" in made.note


def test_a_text_that_is_different_everywhere_is_not_guessed_as_label(tmp_path: Path) -> None:
    made = scaffold(tmp_path, table(kind=cycled("a", "b"), comment=[f"c{n}" for n in range(60)]))

    assert made.label == "kind"
    assert "as the last column that can be one" in made.note


@pytest.mark.parametrize(
    ("other", "why"),
    [("z", "as the last column"), ("Target", "by its name")],
)
def test_a_column_with_the_name_of_a_label_that_cannot_be_one_is_named(
    other: str, why: str, tmp_path: Path
) -> None:
    columns = {
        "label": [["a"] * (row % 3) for row in range(60)],
        "labels": cycled("k")[:60],
        "x": [row / 7 for row in range(60)],
        other: cycled(0, 1)[:60],
        "price": [[0.5, 1.5]] * 60,
    }
    if other == "z":
        del columns["price"]  # where a surer name is found, this one is not mentioned
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")

    made = write_experiment(tmp_path / "made", tmp_path / "data.parquet")

    assert made.label == other
    said = (
        f'({why}; "label" is not taken: a column of lists of varying length; '
        '"labels" is not taken: 1 different values)'
    )
    assert said in made.note
    assert load_experiment(tmp_path / "made").label == other


def test_the_wanted_label_is_taken(tmp_path: Path) -> None:
    made = scaffold(tmp_path, table(target=cycled(0, 1)), label="color")

    assert (made.label, made.task) == ("color", "binary")


@pytest.mark.parametrize(
    ("label", "words"),
    [("colr", "Did you mean 'color'"), ("same", "1 different values")],
)
def test_a_label_that_cannot_be_one_is_refused(label: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        scaffold(tmp_path, table(same=cycled("k")), label=label)

    assert not (tmp_path / "made").exists()


def test_columns_are_fed_by_what_they_hold(tmp_path: Path) -> None:
    rows = 1200
    numbers = range(rows)
    columns = table(
        rows,
        passenger_id=list(numbers),
        name=[f"n{number}" for number in numbers],
        ticket=[f"t{number % 1100}" for number in numbers],
        city=[f"c{number % 300}" for number in numbers],
        house_price_index=[number / 8 for number in numbers],
        constant=["k"] * rows,
        empty=[""] * rows,
        target=[number % 2 for number in numbers],
    )

    scaffold(tmp_path, columns)

    code = (tmp_path / "made/model.py").read_text()
    found = constants(code)
    assert found["NUMBERS"] == ["width", "house_price_index"]
    assert found["WORDS"] == ["color"]
    assert found["HASHED"] == ["name", "ticket", "city"]
    assert '#   "passenger_id": its name suggests an ID of the row' in code
    assert '#   "constant": the same in every row' in code
    assert '#   "empty": the same in every row' in code


def test_a_text_that_is_different_in_every_row_is_left_out(tmp_path: Path) -> None:
    scaffold(tmp_path, table(who=[f"w{n}" for n in range(60)], target=cycled(0, 1)))

    assert '#   "who": a different text in every row' in (tmp_path / "made/model.py").read_text()


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="from which to predict 'target'"):
        scaffold(tmp_path, {"k": cycled("k"), "target": [0, 1] * 50})


def test_lists_of_one_value_are_left_out_only_if_they_have_one_length() -> None:
    lists = {"equal": 1, "vary": 2}
    seen = described("vary length", "y")
    ragged = tuple(
        ColumnDescription(
            column=Column(name=name, dtype="string", length=VARYING),
            distinct=1,
            missing=0,
            lengths=lengths,
        )
        for name, lengths in lists.items()
    )

    code = table_model(
        replace(seen, columns=seen.columns + ragged),
        Label(name="y", task="regression", why="", form="quantity"),
    )

    found = constants(code)
    assert (found["NUMBERS"], found["WORDS"], found["LISTS"]) == (
        ["vary length"],
        ["vary"],
        ["vary"],
    )
    assert found["LENGTH"] == " length_"  # a column has the other name
    assert '#   "equal": the same in every row' in code


@pytest.mark.parametrize("taken", ["stoker.yaml", "model.py"])
def test_nothing_is_overwritten(taken: str, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / taken).write_text("mine")

    with pytest.raises(UserError, match=re.escape(taken)):
        scaffold(tmp_path, table(target=cycled(0, 1)))

    assert [path.name for path in (tmp_path / "made").iterdir()] == [taken]
    assert (tmp_path / "made" / taken).read_text() == "mine"


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "made").write_text("mine")

    with pytest.raises(UserError, match="must be given a folder"):
        scaffold(tmp_path, table(target=cycled(0, 1)))


def test_a_source_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must exist"):
        write_experiment(tmp_path / "made", tmp_path / "no.csv")


def test_another_delimiter_is_found_and_written(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "wine.csv", table(quality=cycled(5, 6, 7)), delimiter=";")

    write_experiment(tmp_path / "made", source)

    assert load_experiment(tmp_path / "made").files.delimiter == ";"


def test_bad_rows_are_reported_and_not_allowed_automatically(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "data.csv", table(target=cycled(0, 1)))
    source.write_text(source.read_text() + "too,few\n")

    made = write_experiment(tmp_path / "made", source)

    assert "1 record cannot be read" in made.note
    assert "# max_bad_rows: 1" in (tmp_path / "made/stoker.yaml").read_text()
    assert load_experiment(tmp_path / "made").files.max_bad_rows == 0


def test_data_inside_the_folder_is_named_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "made/data").mkdir(parents=True)
    source = write_csv(tmp_path / "made/data/some.csv", table(target=cycled(0, 1)))

    write_experiment(tmp_path / "made", source)

    assert read_yaml(tmp_path / "made/stoker.yaml")["data"]["source"] == "data/some.csv"
    assert load_experiment(tmp_path / "made").files.source == str(source)


def test_the_only_gate_is_a_max_drop_of_the_main_metric(tmp_path: Path) -> None:
    scaffold(tmp_path, table(target=cycled(0, 1)))

    evaluate = load_experiment(tmp_path / "made").evaluate
    ((metric, gate),) = evaluate.gates.items()
    assert metric == evaluate.metrics[0] == "auc"
    assert gate.min is None
    assert gate.max is None
    assert gate.max_drop == 0.02


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Titanic Train.csv", "titanic-train"),
        ("grüße_2024.parquet", "grusse-2024"),
        ("2024.csv.gz", "model-2024"),
        ("*.csv", "folder"),
        ("日本.csv", "folder"),
        ("a" * 80 + ".csv", "a" * 63),
    ],
)
def test_an_experiment_is_named_after_its_data(name: str, expected: str) -> None:
    assert default_name(Path("/data/folder") / name) == expected


@given(st.text(max_size=100))
def test_every_name_becomes_fit_for_a_host(name: str) -> None:
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", dns_name(name))


@given(st.text())
def test_a_text_in_yaml_reads_back_as_itself_in_one_line(text: str) -> None:
    spelled = yaml_flow(text)

    assert "\n" not in spelled
    assert yaml.safe_load(f"a:\n  b: {spelled}\n") == {"a": {"b": text}}
    assert yaml.safe_load(f"a: {yaml_flow({text: 'string'})}") == {"a": {text: "string"}}


@given(st.lists(st.text(), max_size=30))
def test_a_list_in_python_reads_back_as_itself(texts: list[str]) -> None:
    assert ast.literal_eval(python_list(texts)) == texts


@given(st.lists(st.text(min_size=1), min_size=2, max_size=8, unique=True), st.booleans())
def test_any_names_give_valid_code(names: list[str], constant: bool) -> None:
    label = Label(name=names[0], task="multiclass", why="", form="by vocabulary", classes=3)
    seen = described(*names, distinct=9)
    if constant:
        useless = described(*[f"{name}!" for name in names], distinct=1)
        seen = SourceDescription(
            format="csv",
            columns=seen.columns + useless.columns,
            rows=100,
            bad=0,
            classes={},
        )

    code = table_model(seen, label)

    assert constants(code)["NUMBERS"] == names[1:]
    compile(code, "model.py", "exec")
    compile(image_model(names[1], label, preprocessing=True), "model.py", "exec")


def test_a_newline_in_a_name_stays_inside_its_string() -> None:
    label = Label(name="y", task="regression", why="", form="quantity")

    code = table_model(described("a\nb", "y"), label)

    assert constants(code)["NUMBERS"] == ["a\nb"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment on a table with every hostile name, numbers and texts in turn."""
    folder = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    rows = 120
    columns: dict[str, Any] = {}
    for index, name in enumerate(HOSTILE):
        texts = rng.choice(["p", "q", ""], rows).tolist()
        columns[name] = texts if index % 3 == 0 else rng.normal(size=rows).round(3).tolist()
    columns["mäny"] = [f"m{number % 110}" * (1 + number % 2) for number in range(rows)]
    columns["a z?"] = cycled(4, 7, 9)[:rows]
    source = write_csv(folder / 'it\'s "data" # 1: x.csv', columns)
    write_experiment(folder / "made", source, label="a z?")
    return folder / "made"


def test_a_hostile_header_gives_two_files_that_load(hostile: Path) -> None:
    experiment = load_experiment(hostile)

    assert experiment.label == "a z?"
    assert experiment.name == experiment.model_name == "it-s-data-1-x"
    found = constants((hostile / "model.py").read_text())
    fed = {*found["NUMBERS"], *found["WORDS"], *found["HASHED"]}
    assert fed == {*HOSTILE, "mäny"}


def make(folder: Path, work: Path) -> tuple[Experiment, Dataset, Transform, Any]:
    """Ingest, transform and build what was written, as `stoker run` does."""
    from stoker.train.setup.build_model import build_model

    experiment = load_experiment(folder)
    dataset = ingest(experiment.files, work / "data", label=experiment.label)
    function = None
    if experiment.preprocessing:
        function = load_function(folder, experiment.preprocessing, where="preprocessing")
    transform = build_transform(dataset, function, work / "transform", label=experiment.label)
    build = load_function(folder, experiment.model, where="model")
    return experiment, dataset, transform, build_model(build, transform, what="model:build").model


def test_the_files_for_a_hostile_header_run(hostile: Path, tmp_path: Path) -> None:
    _, dataset, transform, model = make(hostile, tmp_path)

    assert transform.output.classes == ("4", "7", "9")
    assert model.output_shape == (None, 3)
    assert len(transform.features) == len(HOSTILE) + 1
    assert dataset.rows("train") + dataset.rows("eval") == 120


@pytest.mark.parametrize(
    ("values", "outputs"),
    [(cycled(1, 2, ""), 1), (cycled(3, 5, 9, ""), 3), (list(range(300)), 1)],
    ids=["binary", "multiclass", "regression"],
)
def test_the_files_for_a_table_of_numbers_run(
    values: list[Any], outputs: int, tmp_path: Path
) -> None:
    scaffold(tmp_path, table(rows=200, target=values))

    _, _, transform, model = make(tmp_path / "made", tmp_path / "work")

    assert model.output_shape == (None, outputs)
    assert [feature.name for feature in transform.features] == ["width", "color"]


def test_the_lengths_of_lists_are_features_of_the_files_for_them(tmp_path: Path) -> None:
    flags = [["vip"] * (row % 2) for row in range(100)]
    many = [[0.5] * (row % 30) for row in range(100)]
    columns = {"flag": flags, "many": many, "label": cycled(0, 1)[:100]}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    write_experiment(tmp_path / "made", tmp_path / "data.parquet")

    _, dataset, transform, model = make(tmp_path / "made", tmp_path / "work")

    assert model.output_shape == (None, 1)
    shapes = {feature.name: feature.shape for feature in transform.features}
    lengths = {"flag length": (), "many length": ()}
    assert shapes == {"flag": (20,), "many": (20,)} | lengths
    table = dataset.table("train")
    raw = {
        column.name: to_numpy(column, table[column.name]) for column in transform.serving_columns
    }
    features = transform.apply_features(raw)
    for name in ("flag", "many"):
        counts = np.array([len(row) for row in table[name].to_pylist()])
        wanted = (counts - counts.mean()) / counts.std()
        np.testing.assert_allclose(features[f"{name} length"].numpy(), wanted, atol=1e-5)


def test_a_folder_of_equal_images_needs_no_size(tmp_path: Path) -> None:
    sizes = {"cat's": [(8, 10)] * 12, "dög": [(8, 10)] * 12, "cow": [(8, 10)] * 12}
    source = write_images(tmp_path / "pets", sizes)

    made = write_experiment(tmp_path / "made", source)

    experiment, _, _, model = make(tmp_path / "made", tmp_path / "work")
    assert (made.label, made.task) == ("label", "multiclass")
    assert experiment.files.images.size is None
    assert experiment.preprocessing is None
    assert model.output_shape == (None, 3)
    assert model.input_shape == (None, 8, 10, 1)


def test_images_of_several_sizes_are_brought_to_the_median(tmp_path: Path) -> None:
    sizes = {"a": [(10, 20), (30, 40)], "b": [(20, 30), (600, 500), (18, 28)]}
    source = write_images(tmp_path / "pets", sizes)

    made = write_experiment(tmp_path / "made", source)

    assert load_experiment(tmp_path / "made").files.images.size == (20, 30)
    assert made.task == "binary"


def test_large_images_are_shrunk(tmp_path: Path) -> None:
    source = write_images(tmp_path / "pets", {"a": [(448, 672)], "b": [(448, 672)]})

    write_experiment(tmp_path / "made", source)

    assert load_experiment(tmp_path / "made").files.images.size == (149, 224)


def test_images_of_one_class_are_refused(tmp_path: Path) -> None:
    source = write_images(tmp_path / "pets", {"a": [(8, 8)] * 3})

    with pytest.raises(ConfigError, match="at least two classes"):
        write_experiment(tmp_path / "made", source)


def test_the_label_of_an_image_folder_cannot_be_chosen(tmp_path: Path) -> None:
    source = write_images(tmp_path / "pets", {"a": [(8, 8)], "b": [(8, 8)]})

    with pytest.raises(ConfigError, match="name of the sub-folder"):
        write_experiment(tmp_path / "made", source, label="path")


def test_the_files_for_a_table_with_images_show_the_model_the_image_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [
        cv2.imencode(".png", rng.integers(0, 256, (6, 6), dtype=np.uint8))[1].tobytes()
        for _ in range(60)
    ]
    columns = {"photo": images, "age": list(range(60)), "grade": cycled(1, 3, 7)[:60]}
    pq.write_table(pa.table(columns), tmp_path / "shop.parquet")

    made = write_experiment(tmp_path / "made", tmp_path / "shop.parquet")

    _, _, transform, model = make(tmp_path / "made", tmp_path / "work")
    assert made.label == "grade"
    assert [feature.name for feature in transform.features] == ["photo"]
    assert model.output_shape == (None, 3)


def test_an_experiment_is_never_written_into_its_own_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_text("n,y\n" + "".join(f"{n},{n % 2}\n" for n in range(40)))

    with pytest.raises(UserError, match="must not be inside its data"):
        write_experiment(data, data)
    assert [path.name for path in data.iterdir()] == ["a.csv"]
