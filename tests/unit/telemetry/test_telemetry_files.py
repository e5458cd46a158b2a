"""Files that grow while training goes on, on disks that fill up."""

from __future__ import annotations

import io
import json
import logging
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import RecordWriter

from stoker.core.errors import UserError
from stoker.telemetry.writers.append_only import AppendedFile, JsonLines
from stoker.telemetry.writers.summaries import flat_settings
from stoker.telemetry.writers.tensorboard import framed


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to make any file larger, with part of a write written before it does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_complete_records_is_reported_once_and_ends_when_space_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = JsonLines(tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.WARNING), largest_file(100):
        for step in range(10):
            writer.write(step, {"loss": 0.125})
    said_when_full = [record.getMessage() for record in caplog.records]
    writer.write(10, {"loss": 0.25})
    writer.close()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kept = len(lines) - 1
    assert 0 < kept < 10
    assert [line["step"] for line in lines] == [*range(kept), 10]
    assert len(said_when_full) == 1
    assert "cannot be written, training goes on" in said_when_full[0]
    assert (
        caplog.records[-1]
        .getMessage()
        .endswith(f"can be written again; {10 - kept} writes were lost")
    )


def test_what_is_measured_when_time_allows_is_not_in_the_file(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "metrics.jsonl")
    writer.write(1, {"loss": 0.5, "gradient_norm": 2.0})
    writer.close()

    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}


def test_a_file_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="must be a file that can be written"):
        AppendedFile(tmp_path / "taken" / "metrics.jsonl")


def test_a_closed_file_takes_nothing(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "f")
    file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.append(b"x")


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 50))
def test_a_rewound_file_holds_the_lines_up_to_that_step(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], step: int
) -> None:
    path = tmp_path_factory.mktemp("rewind") / "metrics.jsonl"
    writer = JsonLines(path)
    for done in steps:
        writer.write(done, {})
    writer.rewind(step)
    writer.write(step + 1, {})
    writer.close()

    found = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert found == [*(done for done in steps if done <= step), step + 1]


@pytest.mark.parametrize(("validated", "kept"), [(True, [1.0, 2.0]), (False, [1.0])])
def test_an_epoch_that_is_to_be_validated_again_has_no_line_yet(
    tmp_path: Path, validated: bool, kept: list[float]
) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    for step in range(1, 7):
        writer.write(step, {"loss": 0.5})
        if step % 2 == 0:
            writer.write(step, {"val_loss": 0.5, "epoch": step / 2})
    writer.rewind(4, validated=validated)
    writer.close()

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["epoch"] for line in lines if "epoch" in line] == kept
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


def test_the_half_line_of_a_killed_writer_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    writer = JsonLines(path)
    writer.rewind(5)
    writer.write(6, {"loss": math.inf})
    writer.close()

    assert path.read_text() == '{"step": 1}\n{"step": 6, "loss": "inf"}\n'


@given(st.binary(max_size=300))
def test_records_are_framed_as_tensorboards_own_writer_frames_them(payload: bytes) -> None:
    theirs = io.BytesIO()
    RecordWriter(theirs).write(payload)

    assert framed(payload) == theirs.getvalue()


def test_settings_are_columns_by_dotted_name() -> None:
    settings = {"train": {"epochs": 3, "xla": False, "augment": None}, "slices": ["a", "b"]}

    assert flat_settings(settings) == {
        "train.epochs": 3,
        "train.xla": False,
        "slices": '["a", "b"]',
    }
