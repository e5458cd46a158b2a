"""What clients read of a version that does not serve: why, and no place on the server's disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.core.errors import DataError, Plain, UserError
from stoker.serve.errors import Code, ServeError
from stoker.serve.servables.load_error import reason_of, without_paths

FOLDER = Path("/srv/our models/half/124")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            DataError(
                f"{FOLDER}/saved_model.pb must be as it was pushed", got=Plain("other bytes")
            ),
            "124/saved_model.pb must be as it was pushed. Received: other bytes.",
        ),
        (
            UserError(
                "x must be", got=Plain(f"{FOLDER}/a; file /usr/lib/tf.py:3"), fix="Repair /a/b."
            ),
            "x must be. Received: 124/a; file tf.py:3. Repair b.",
        ),
        (UserError("x must be", got=f"{FOLDER}/a"), "x must be. Received: '124/a'."),
        (UserError("x must be"), "x must be."),
        (ServeError(Code.INTERNAL, f"no {FOLDER}"), "INTERNAL: no 124"),
        (
            FileNotFoundError(2, "No such file or directory", f"{FOLDER}/variables"),
            "FileNotFoundError: [Errno 2] No such file or directory: '124/variables'",
        ),
        (ValueError("first\n  File /a/b.py"), "ValueError: first"),
        (MemoryError(), "MemoryError: MemoryError"),
    ],
)
def test_a_reason_names_files_below_the_model_and_no_others(error: Exception, said: str) -> None:
    assert reason_of(error, FOLDER) == said


@pytest.mark.parametrize(
    "text", ["as 'while/body/dense'", "1/2 of it", "StatefulPartitionedCall/a:0", "a / b", "and/or"]
)
def test_text_that_is_not_a_path_stays(text: str) -> None:
    assert without_paths(text, FOLDER) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("at path: /srv/x/y. Make", "at path: y. Make"),
        ("file:///srv/x", "x"),
        ("(/a/b/c.cc:12)", "(c.cc:12)"),
        ("a=/a/b", "a=b"),
    ],
)
def test_other_absolute_paths_lose_their_folders(text: str, said: str) -> None:
    assert without_paths(text, FOLDER) == said


def test_a_path_that_would_be_cut_in_the_middle_is_taken_out_before() -> None:
    folder = Path("/srv") / ("long name " * 30) / "7"
    said = reason_of(UserError("x", got=Plain(f"{'.' * 150} {folder}/variables")), folder)
    assert "long" not in said


def test_a_folder_that_was_given_relative_to_the_working_one_is_taken_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("models/half/3")
    assert without_paths(f"{folder}/a and {tmp_path / folder}/b", folder) == "3/a and 3/b"
