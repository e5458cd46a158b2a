"""The errors on data that differs from its name or from the settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.errors import UserError
from stoker.data.ingest import IngestConfig, ingest
from stoker.data.sources.config import ColumnsConfig
from stoker.scaffold import write_experiment

Write = Callable[[Path], Path]


def text(name: str, content: str) -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return write


def parquet(name: str, **columns: pa.Array) -> Write:
    def write(folder: Path) -> Path:
        pq.write_table(pa.table(columns), folder / name)
        return folder / name

    return write


def images(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(20):
        path = folder / "pictures" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), rng.integers(0, 255, (6, 6, 3), np.uint8))
    return folder / "pictures"


LINES = "".join(f'{{"a": {row}, "b": 1}}\n' for row in range(20))
NUMBERS = "".join(f'{{"a": {"-1e999" if row == 3 else row + 0.5}}}\n' for row in range(200))
EMPTY_LISTS = parquet("empty.parquet", x=pa.array([], pa.list_(pa.float32())))
SOME_BYTES = parquet("bytes.parquet", x=pa.array([b"a%d" % n for n in range(20)], pa.binary()))


@pytest.mark.parametrize(
    ("write", "settings", "said"),
    [
        (text("data.csv", LINES), {}, r"must be CSV text.*Received: JSON\..* data\.format: jsonl"),
        (
            text("data.csv", f"[\n{LINES}]"),
            {},
            r"Received: a JSON array\. Write one object per line",
        ),
        (text("data.csv", "a,label\n"), {}, "must hold at least one record. Received: none"),
        (EMPTY_LISTS, {}, "must hold at least one record. Received: none"),
        (
            SOME_BYTES,
            {},
            r"column 'x' of bytes .* no image in any record.*\{x: string\} if it holds",
        ),
        (text("a.jsonl", NUMBERS), {}, r"row 4, column 'a': -1\.8e308 or more does not fit"),
        (images, {"types": {"label": "int"}}, "types must be left out for a folder of images"),
        (
            images,
            {"columns": ColumnsConfig(exclude=("path",))},
            "columns must be left out for a folder of images",
        ),
    ],
)
def test_what_ingest_refuses_is_reported_as_it_is(
    tmp_path: Path, write: Write, settings: dict[str, Any], said: str
) -> None:
    config = IngestConfig(source=str(write(tmp_path)), **settings)
    with pytest.raises(UserError, match=said):
        ingest(config, tmp_path / "out")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (text("data.csv", "a,label\n"), "at least 2 records. Received: 2 columns and no record"),
        (text("data.csv", "a,label\n1,2\n"), "at least 2 records. .* 2 columns and one record"),
        (text("data.csv", LINES), "must be CSV text with a header. Received: JSON"),
        (SOME_BYTES, "of bytes must hold encoded images"),
    ],
)
def test_what_init_can_make_nothing_of_is_reported_as_it_is(
    tmp_path: Path, write: Write, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        write_experiment(tmp_path / "made", write(tmp_path))
    assert not (tmp_path / "made").exists()


def test_bytes_that_are_text_are_read_as_text_where_the_user_says_so(tmp_path: Path) -> None:
    config = IngestConfig(source=str(SOME_BYTES(tmp_path)), types={"x": "string"})
    dataset = ingest(config, tmp_path / "out")
    assert "a0" in dataset.table("train")["x"].to_pylist() + dataset.table("eval")["x"].to_pylist()


def test_images_that_are_all_damaged_are_named_one_by_one(tmp_path: Path) -> None:
    png = cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
    cut = parquet("cut.parquet", x=pa.array([png[:20]] * 3, pa.binary()))(tmp_path)
    with pytest.raises(UserError, match=r"row 1, column 'x': the image is truncated"):
        ingest(IngestConfig(source=str(cut)), tmp_path / "out")


def test_a_folder_of_a_class_without_images_is_warned_of_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = images(tmp_path)
    (source / "horse").mkdir()
    (source / "horse" / ".DS_Store").write_bytes(b"x")

    with caplog.at_level(logging.WARNING):
        dataset = ingest(IngestConfig(source=str(source)), tmp_path / "out")

    assert "folder horse holds no image" in caplog.text
    assert set(dataset.table("train")["label"].to_pylist()) == {"cat", "dog"}


def test_a_backslash_and_a_t_are_a_tab(tmp_path: Path) -> None:
    source = text("data.tsv", "a\tb\n" + "".join(f"{n}\t{n}\n" for n in range(50)))(tmp_path)
    config = IngestConfig(source=str(source), delimiter=r"\t")
    assert [c.name for c in ingest(config, tmp_path / "out").columns] == ["a", "b"]
