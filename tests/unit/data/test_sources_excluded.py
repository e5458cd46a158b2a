"""Columns that nothing can be made of, in files that are otherwise fine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from stoker.app.experiment import load_experiment
from stoker.core.errors import ConfigError
from stoker.core.user_code import advice_for
from stoker.data.sources.columns.table import UnusableColumn
from stoker.data.sources.config import ColumnsConfig, IngestConfig
from stoker.data.sources.records import silent
from stoker.data.sources.source import open_source
from stoker.scaffold import write_experiment

ROWS = 40
COLUMNS: dict[str, list[Any]] = {
    "a": [float(row) for row in range(ROWS)],
    "ragged": [[1.0] * (row % 5) for row in range(ROWS)],
    "nested": [{"x": row} for row in range(ROWS)],
    "lists": [[[1], [2]] for _ in range(ROWS)],
    "mixed": [row if row % 2 else str(row) for row in range(ROWS)],
    "raw": [bytes([row]) for row in range(ROWS)],
    "y": [row % 2 for row in range(ROWS)],
}
UNUSABLE = {
    "d.jsonl": ["nested", "lists", "mixed"],
    "d.parquet": ["nested", "lists", "raw"],
}


def write(folder: Path, name: str) -> Path:
    if name == "d.parquet":
        kept = {key: values for key, values in COLUMNS.items() if key != "mixed"}
        pq.write_table(pa.table(kept), folder / name)
    else:
        kept = {key: values for key, values in COLUMNS.items() if key != "raw"}
        rows = ({key: values[row] for key, values in kept.items()} for row in range(ROWS))
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def read(path: Path, *exclude: str) -> list[str]:
    config = IngestConfig(source=str(path), columns=ColumnsConfig(exclude=exclude))
    source = open_source(config, labels=["y"])
    scan = source.scan(silent)
    [block] = source.blocks(scan)
    assert block.table.num_rows == ROWS
    return list(block.table.column_names)


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_column_that_cannot_be_read_is_named_with_the_setting_that_leaves_it_out(
    name: str, tmp_path: Path
) -> None:
    path = write(tmp_path, name)
    left_out: list[str] = []

    for column in UNUSABLE[name]:
        with pytest.raises(UnusableColumn) as refused:
            read(path, *left_out)
        assert f"Set data.columns: {{exclude: ['{column}']}}" in str(refused.value)
        left_out.append(refused.value.column)

    assert read(path, *left_out) == ["a", "ragged", "y"]


def test_csv_leaves_out_what_is_excluded_and_files_may_differ_in_it(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,note,y\n" + "1,x,2\n" * 20)
    (tmp_path / "2.csv").write_text("y,note,a\n" + "2,7,1\n" * 20)
    config = IngestConfig(source=str(tmp_path), columns=ColumnsConfig(exclude=("note",)))
    source = open_source(config, labels=["y"])

    blocks = list(source.blocks(source.scan(silent)))

    assert [block.table.to_pylist()[0] for block in blocks] == [{"a": 1, "y": 2}] * 2


def test_an_excluded_column_must_be_there_and_one_must_be_left(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("alpha,y\n1,2\n")

    with pytest.raises(ConfigError, match=r"'alhpa'. Did you mean 'alpha'"):
        read(path, "alhpa")
    with pytest.raises(ConfigError, match="must leave at least one column"):
        read(path, "alpha", "y")


def test_init_leaves_out_what_cannot_be_read_and_says_what_it_holds(tmp_path: Path) -> None:
    written = write_experiment(tmp_path / "new", write(tmp_path, "d.parquet"), label="y")

    settings = (tmp_path / "new" / "stoker.yaml").read_text()
    assert "columns: {exclude: [nested, lists, raw], lists: [ragged]}  # those excluded" in settings
    assert "Column 'nested' is left out: struct<x: int64>." in written.note
    with pytest.raises(UnusableColumn):
        write_experiment(tmp_path / "other", tmp_path / "d.parquet", label="nested")


def test_init_settles_that_a_column_has_lists_of_varying_length(tmp_path: Path) -> None:
    write_experiment(tmp_path / "new", write(tmp_path, "d.parquet"), label="y")
    config = load_experiment(tmp_path / "new").files
    even = tmp_path / "even.parquet"
    pq.write_table(pa.table({"ragged": [[1.0, 2.0]] * ROWS, "y": COLUMNS["y"]}), even)

    scan = open_source(
        IngestConfig(source=str(even), columns=replace(config.columns, exclude=())), labels=["y"]
    ).scan(silent)

    assert scan.columns[0].is_ragged
    assert not scan.assumptions


def test_a_list_column_that_is_none_in_other_data_is_named_with_the_setting() -> None:
    with pytest.raises(AttributeError) as raised:
        tf.function(lambda x: x.to_tensor(0))(tf.ones([2, 2]))

    assert "data.columns: {lists: [COLUMN]} reads it as lists" in advice_for(raised.value)
