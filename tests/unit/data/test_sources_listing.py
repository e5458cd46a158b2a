"""Which files are a source, in which order, and what is refused before it is read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.core.errors import ConfigError, DataError
from stoker.data.ingest import ImagesConfig, IngestConfig, source_fingerprint
from stoker.data.sources.source import list_source


def names(source: Path | str) -> list[str]:
    return [file.name for file in list_source(IngestConfig(source=str(source))).files]


def touch(folder: Path, *found: str) -> None:
    for name in found:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n1\n")


@pytest.mark.parametrize("order", [1, -1])
def test_files_are_sorted_by_the_bytes_of_their_names(tmp_path: Path, order: int) -> None:
    touch(tmp_path, *["b.csv", "a.csv", "B.csv", "ä.csv", "\u0131.csv", "10.csv", "9.csv"][::order])

    assert names(tmp_path) == ["10.csv", "9.csv", "B.csv", "a.csv", "b.csv", "ä.csv", "\u0131.csv"]


def test_hidden_files_and_the_marks_of_spark_are_not_data(tmp_path: Path) -> None:
    touch(tmp_path, "part.csv", ".part.csv.crc", "_SUCCESS", "_kept.csv")

    assert names(tmp_path) == ["_kept.csv", "part.csv"]


def test_a_glob_finds_files_at_every_depth_and_follows_no_folder_link(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.csv", "a/b/2.csv", "a/b/3.txt", "c/4.csv")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)

    assert names(tmp_path / "**" / "*.csv") == ["a/1.csv", "a/b/2.csv", "c/4.csv"]
    assert names(tmp_path / "a" / "*.csv") == ["1.csv"]
    assert names(tmp_path / "?" / "[13].csv") == ["a/1.csv"]


def test_a_path_that_exists_is_not_a_glob(tmp_path: Path) -> None:
    touch(tmp_path, "data[1].csv")

    assert names(tmp_path / "data[1].csv") == ["data[1].csv"]


@pytest.mark.parametrize("source", ["nothing.csv", "nothing/*.csv", "*.csv"])
def test_a_source_that_is_not_there_is_named(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match=r"nothing|at least one file"):
        names(tmp_path / source)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one file"):
        names(tmp_path)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path can have no more than 108 bytes
        try:
            listening.bind(path.name)
        finally:
            os.chdir(here)


def link_out(path: Path) -> None:
    path.symlink_to(__file__)


def root_link(path: Path) -> None:
    path.symlink_to("/")


def link_loop(path: Path) -> None:
    path.symlink_to(path.name)


def dead_link(path: Path) -> None:
    path.symlink_to("gone.csv")


STRANGERS = [fifo, device, unix_socket, link_out, root_link, link_loop, dead_link, Path.mkdir]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", STRANGERS)
@pytest.mark.parametrize("pattern", ["", "*.csv"])
def test_what_is_not_a_plain_file_of_the_folder_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None], pattern: str
) -> None:
    folder = tmp_path / "data"
    touch(folder, "a.csv")
    make(folder / "b.csv")

    with pytest.raises(DataError) as caught:
        names(folder / pattern)

    assert str(folder / "b.csv") in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [*STRANGERS])
def test_what_is_not_a_plain_file_of_an_image_class_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = tmp_path / "images"
    touch(folder, "cat/1.png")
    make(folder / "cat" / "2.png")

    with pytest.raises(DataError, match=r"cat/2\.png"):
        names(folder)


@pytest.mark.parametrize("make", [fifo, root_link, link_loop, dead_link])
def test_what_is_not_a_class_folder_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    touch(tmp_path, "cat/1.png")
    make(tmp_path / "dog")

    with pytest.raises((DataError, ConfigError), match="dog"):
        list_source(IngestConfig(source=str(tmp_path), format="images"))


def test_a_stray_file_next_to_the_classes_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.png", "README.md")

    with pytest.raises(DataError, match=r"README\.md, which is a file"):
        names(tmp_path)


def test_a_folder_within_a_class_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "train/cat/1.png", "train/dog/1.png")

    with pytest.raises(DataError, match="train/cat must be a plain file"):
        names(tmp_path)


def test_a_link_inside_the_folder_is_read(tmp_path: Path) -> None:
    touch(tmp_path, "a.csv")
    (tmp_path / "b.csv").symlink_to("a.csv")

    assert names(tmp_path) == ["a.csv", "b.csv"]


def test_a_source_that_is_itself_a_link_is_what_the_user_named(tmp_path: Path) -> None:
    touch(tmp_path, "data/a.csv")
    (tmp_path / "link.csv").symlink_to("data/a.csv")

    assert names(tmp_path / "link.csv") == ["link.csv"]


@pytest.mark.timeout(60)
def test_a_fifo_as_the_source_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.csv")

    with pytest.raises(DataError, match="a FIFO"):
        names(tmp_path / "data.csv")


@pytest.mark.parametrize(
    ("found", "part"),
    [
        (["a.csv", "b.parquet"], "one format"),
        (["a.csv", "README.md"], "README.md"),
        (["a.png"], "a sub-folder for each class"),
    ],
)
def test_files_that_do_not_make_one_source_are_named(
    tmp_path: Path, found: list[str], part: str
) -> None:
    touch(tmp_path, *found)

    with pytest.raises(ConfigError, match=part):
        names(tmp_path)


def test_the_format_of_files_with_other_names_can_be_said(tmp_path: Path) -> None:
    touch(tmp_path, "data.dat")

    listing = list_source(IngestConfig(source=str(tmp_path / "data.dat"), format="csv"))

    assert listing.format == "csv"


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.csv")).write_text("x\n1\n")

    with pytest.raises(DataError, match="must be UTF-8"):
        names(tmp_path)


def test_a_file_that_is_written_after_it_was_listed_is_found(tmp_path: Path) -> None:
    touch(tmp_path, "a.csv")
    listing = list_source(IngestConfig(source=str(tmp_path)))
    listing.check_unchanged()

    with (tmp_path / "a.csv").open("a") as stream:
        stream.write("2\n")

    with pytest.raises(DataError, match="must not change while it is read"):
        listing.check_unchanged()


def test_the_fingerprint_goes_by_names_and_content_and_not_by_place(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        touch(folder, "a.csv", "b.csv")
    before = source_fingerprint(IngestConfig(source=str(first)))

    assert before == source_fingerprint(IngestConfig(source=str(second)))
    assert [each.location for each in list_source(IngestConfig(source=str(first))).files] == [
        str(first / "a.csv"),
        str(first / "b.csv"),
    ]
    (second / "b.csv").write_text("x\n2\n")
    assert before != source_fingerprint(IngestConfig(source=str(second)))
    (first / "b.csv").rename(first / "c.csv")
    assert before != source_fingerprint(IngestConfig(source=str(first)))


@pytest.mark.parametrize("source", ["hdfs://host/data.csv", "http://host/a.csv", "s3://", ""])
def test_a_source_that_is_in_no_known_place_is_one_clear_error(source: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.source must"):
        IngestConfig(source=source)


@pytest.mark.parametrize(
    "splits",
    [
        {"train": 1.0},
        {"train": 0.8, "test": 0.2},
        {"train": 0.8, "eval": 0.3},
        {"train": 1.2, "eval": -0.2},
        {"train": float("nan"), "eval": 0.2},
        {"train": 0.8, "eval": 0.1, "../x": 0.1},
    ],
)
def test_splits_that_are_not_shares_of_one_are_refused(splits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="split"):
        IngestConfig(source="data.csv", splits=splits)


@pytest.mark.parametrize("delimiter", ["", ";;", '"', "\n", "é"])
def test_a_delimiter_that_cannot_be_one_is_refused(delimiter: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.delimiter"):
        IngestConfig(source="data.csv", delimiter=delimiter)


def test_an_image_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.images\.size"):
        ImagesConfig(size=(0, 3))
    with pytest.raises(ConfigError, match=r"data\.images\.max_pixels"):
        ImagesConfig(max_pixels=0)
