from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.core.errors import DataError, Plain, UserError
from stoker.core.files import (
    hash_folder,
    list_files,
    publish_folder,
    read_json,
    scratch_folder,
    write_atomic,
    write_json,
)
from stoker.core.fingerprint import fingerprint


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})

    with pytest.raises(ValueError, match="JSON"):
        write_json(file, {"a": math.nan})

    assert read_json(file) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_is_named_and_the_old_file_is_untouched(small_disk: Path) -> None:
    write_atomic(small_disk / "a", b"old")

    with pytest.raises(UserError, match="must have room for it"):
        write_atomic(small_disk / "a", b"x" * (2 << 20))

    assert (small_disk / "a").read_bytes() == b"old"
    assert os.listdir(small_disk) == ["a"]


WRITER = """
import sys
from pathlib import Path
from stoker.core.files import write_atomic
n = 0
while True:
    n += 1
    write_atomic(Path(sys.argv[1]), (str(n) + "\\n") * 20000)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "whole"
    for pause_s in (0.0, 0.003, 0.011, 0.017):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file)])
        while not file.exists():
            time.sleep(0.005)
        time.sleep(pause_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        lines = file.read_text().split()
        assert len(lines) == 20000
        assert len(set(lines)) == 1
        file.unlink()


def test_a_published_folder_appears_whole_and_never_over_another(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with scratch_folder(final) as made:
        (made / "x").write_text("1")
        publish_folder(made, final)
    assert (final / "x").read_text() == "1"

    with scratch_folder(final) as made:
        (made / "x").write_text("2")
        with pytest.raises(FileExistsError):
            publish_folder(made, final)
    assert (final / "x").read_text() == "1"
    assert os.listdir(tmp_path) == ["out"]


def test_files_are_listed_by_the_bytes_of_their_names_whatever_the_order_of_creation(
    tmp_path: Path,
) -> None:
    for name in ("b", "a/z", "A", "ä", "a-b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    names = [p.relative_to(tmp_path).as_posix() for p in list_files(tmp_path)]

    assert names == sorted(names, key=os.fsencode)
    assert list(hash_folder(tmp_path)) == names


def test_damaged_json_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": ')

    with pytest.raises(DataError, match=r"a\.json must be whole JSON"):
        read_json(tmp_path / "a.json")


def test_an_error_is_one_line_of_rule_received_and_next_action() -> None:
    error = UserError("x must be\n 1.", got="a\nb", fix="Set it.")

    assert error.line() == "x must be 1. Received: 'a\\nb'. Set it."
    assert UserError("x", got=Plain("as it is")).line() == "x. Received: as it is."


def test_a_fingerprint_does_not_depend_on_the_order_of_keys_but_on_that_of_items() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": (1, 2), "a": 1})
    assert fingerprint([1, 2]) != fingerprint([2, 1])
    with pytest.raises(TypeError, match="no canonical form"):
        fingerprint({"a": object()})
