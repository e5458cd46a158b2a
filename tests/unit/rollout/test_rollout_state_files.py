"""States as files: one order of changes among several writers, consistent after kill -9."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.core.errors import DataError
from stoker.rollout.state.files import Conflict, StateFiles

WRITER = """
import sys
from pathlib import Path
from stoker.rollout.state.files import Conflict, StateFiles
files, name = StateFiles(Path(sys.argv[1])), sys.argv[2]
print("up", flush=True)
count = 0
while count < int(sys.argv[3]):
    latest = files.latest()
    counts = dict(latest.content) if latest else {}
    counts[name] = counts.get(name, 0) + 1
    try:
        files.append(counts, after=latest)
        count += 1
    except Conflict:
        pass
"""


def writer(folder: Path, name: str, changes: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), name, str(changes)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_every_reader_finds_the_newest_state(tmp_path: Path) -> None:
    one, other = StateFiles(tmp_path / "s"), StateFiles(tmp_path / "s")
    assert one.latest() is None

    first = one.append({"share": 0.1}, after=None)
    assert other.latest() == first
    second = other.append({"share": 0.5}, after=first)
    assert one.latest() == second
    assert [stored.content["share"] for stored in one.history()] == [0.1, 0.5]
    assert StateFiles(tmp_path / "s").latest() == second


def test_a_damaged_state_that_others_follow_is_left_out_of_the_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = StateFiles(tmp_path)
    for share in (0.1, 0.5, 1.0):
        files.append({"share": share}, after=files.latest())
    (tmp_path / "00000002.json").write_text("{")

    assert [stored.content["share"] for stored in files.history()] == [0.1, 1.0]
    assert "the history lacks a change: " in caplog.text
    assert "00000002.json is damaged" in caplog.text
    (tmp_path / "00000003.json").write_text("{")
    with pytest.raises(DataError, match=r"00000003\.json is damaged"):
        list(files.history())


def test_a_state_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    StateFiles(folder).append({"share": 0.1}, after=None)
    (folder / "00000002.json").mkdir()
    with pytest.raises(DataError, match=r"must be readable.*00000002\.json: Is a directory"):
        StateFiles(folder).latest()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"must be readable.*file: Not a directory"):
        StateFiles(tmp_path / "file").latest()


def test_of_two_changes_to_one_state_the_second_is_refused(tmp_path: Path) -> None:
    one, other = StateFiles(tmp_path), StateFiles(tmp_path)
    first = one.append({"share": 0.1}, after=None)
    assert other.latest() == first

    one.append({"share": 0.5}, after=first)

    with pytest.raises(Conflict):
        other.append({"share": 0.0}, after=first)
    latest = other.latest()
    assert latest is not None
    assert latest.content == {"share": 0.5}
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == [
        "00000001.json",
        "00000002.json",
    ]


def test_several_writers_lose_no_change(tmp_path: Path) -> None:
    with (
        writer(tmp_path, "a", 40) as a,
        writer(tmp_path, "b", 40) as b,
        writer(tmp_path, "c", 40) as c,
    ):
        assert [process.wait(120) for process in (a, b, c)] == [0, 0, 0]

    latest = StateFiles(tmp_path).latest()

    assert latest is not None
    assert latest.content == {"a": 40, "b": 40, "c": 40}
    assert latest.number == 120


def test_a_writer_that_is_killed_leaves_the_state_before_or_after_its_change(
    tmp_path: Path,
) -> None:
    for round_ in range(5):
        with writer(tmp_path, "a", 10**6) as process:
            time.sleep(0.05 + 0.013 * round_)  # another instant of a write each time
            process.kill()

        whole = list(StateFiles(tmp_path).history())

        assert [stored.content["a"] for stored in whole] == [*range(1, len(whole) + 1)]
    StateFiles(tmp_path).append({"b": 1}, after=whole[-1])


@pytest.mark.parametrize("cut", [0, 20, -1])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, cut: int) -> None:
    files = StateFiles(tmp_path)
    files.append({"share": 0.1}, after=files.append({"share": 0.0}, after=None))
    path = tmp_path / "00000002.json"
    path.write_bytes(path.read_bytes()[:cut])

    with pytest.raises(
        DataError, match=r"00000002\.json is damaged.*delete it to go back to state 1"
    ):
        StateFiles(tmp_path).latest()
    path.unlink()
    latest = StateFiles(tmp_path).latest()
    assert latest is not None
    assert latest.content == {"share": 0.0}


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    StateFiles(tmp_path).append({"share": 0.1}, after=None)
    path = tmp_path / "00000001.json"
    path.write_text(path.read_text().replace("0.1", "0.9"))

    with pytest.raises(DataError, match="is damaged"):
        StateFiles(tmp_path).latest()
