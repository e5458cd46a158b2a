"""Change one thing, and exactly what depends on it runs again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.app.stage_results import undeclared

from stoker.app.run_folder import NEWEST, Resume, open_run
from stoker.core.errors import BusyError, CheckFailed, ConfigError

ALL = ["ingest", "analyze", "transform", "train", "export", "evaluate", "push"]


def test_nothing_changed_and_nothing_runs_again(folder: Any) -> None:
    result, seen = folder.run()

    assert seen.worked == []
    assert [outcome.stage for outcome in result.outcomes] == ALL
    assert all("unchanged since run" in o.why for o in result.outcomes[:-1])
    assert result.results["push"]["version"] == 1
    assert undeclared(result.results) == {}


@pytest.mark.parametrize(
    ("file", "old", "new", "until", "worked"),
    [
        ("model.py", "UNITS = 8", "UNITS = 9", "push", ["train", "export", "evaluate", "push"]),
        ("model.py", "UNITS = 8", "UNITS = 8  # eight", "push", []),
        # The first case has what follows other weights.
        ("model.py", "> 10.0", "> 11.0", "train", ["transform", "train"]),
        ("stoker.yaml", "epochs: 2", "epochs: 1", "train", ["train"]),
        ("stoker.yaml", "min: 0.5", "min: 0.51", "push", ["evaluate"]),
        ("stoker.yaml", "slices: [city]", "slices: [city, note]", "push", ["evaluate"]),
    ],
)
def test_a_change_of_code_or_option_runs_what_depends_on_it(
    folder: Any, file: str, old: str, new: str, until: str, worked: list[str]
) -> None:
    folder.edit(file, old, new)

    assert folder.run(until=until)[1].worked == worked


def rewrite_column(path: Path, column: str, change: Callable[[str], str]) -> None:
    lines = path.read_text().splitlines()
    index = lines[0].split(",").index(column)
    rows = [line.split(",") for line in lines[1:]]
    for row in rows:
        row[index] = change(row[index])
    path.write_text("\n".join([lines[0], *(",".join(row) for row in rows)]) + "\n")


@pytest.mark.parametrize(
    ("column", "change", "until", "worked"),
    [
        ("note", lambda text: f"{text}!", "push", ["ingest", "analyze"]),
        ("city", lambda text: text.upper(), "transform", ["ingest", "analyze", "transform"]),
        ("spent", lambda text: str(float(text) + 1), "train", ALL[:4]),
    ],
)
def test_a_change_of_one_column_runs_what_reads_it(
    folder: Any, column: str, change: Callable[[str], str], until: str, worked: list[str]
) -> None:
    rewrite_column(folder.path / "data.csv", column, change)

    assert folder.run(until=until)[1].worked == worked


def test_a_damaged_output_is_produced_again_with_a_note(folder: Any) -> None:
    state = next(folder.path.glob("runs/small/*/train/checkpoints/step-*/state.safetensors"))
    raw = bytearray(state.read_bytes())
    raw[len(raw) // 2] ^= 1
    state.write_bytes(bytes(raw))

    result, seen = folder.run()

    train = next(o for o in seen.ended if o.stage == "train")
    assert "was changed or damaged: made again" in train.why
    # The same inputs give the same weights, so what follows still stands.
    assert seen.worked == ["train"]
    assert result.results["push"]["version"] == 1


@pytest.mark.soak
def test_different_weights_reach_the_repository(folder: Any) -> None:
    """What the fingerprints cannot see, here a number from the environment, `--again` brings."""
    folder.edit("model.py", "UNITS = 8", "import sys\nUNITS = 8 + 2 * hasattr(sys, 'more_units')")
    first, _ = folder.run()
    import sys

    sys.more_units = True  # type: ignore[attr-defined]  # an attribute that the stubs do not know
    try:
        from stoker.app.chain import run_chain
        from stoker.app.experiment import load_experiment

        assert folder.run()[1].worked == []
        recorder = type(folder.run()[1])()
        run_chain(load_experiment(folder.path), recorder, until="train", resume=Resume(again=True))
        result, seen = folder.run()
    finally:
        del sys.more_units  # type: ignore[attr-defined]  # an attribute that the stubs do not know

    assert seen.worked[-3:] == ["export", "evaluate", "push"]
    assert result.results["push"]["version"] == first.results["push"]["version"] + 1
    assert result.results["train"]["parameters"] > first.results["train"]["parameters"]


def test_an_earlier_run_that_was_deleted_is_made_again(folder: Any) -> None:
    folder.run()
    oldest = min((folder.path / "runs" / "small").glob("[!.]*"))
    shutil.rmtree(oldest)

    assert folder.run(until="transform")[1].worked == ["ingest", "analyze", "transform"]


def test_one_stage_alone_runs_what_it_needs_and_the_run_goes_on_later(
    make_folder: Callable[[], Any],
) -> None:
    folder = make_folder()
    first, seen = folder.run(until="analyze")
    assert seen.worked == ["ingest", "analyze"]
    assert json.loads((first.run / "run.json").read_text())["finished"] is None

    second, seen = folder.run(until="transform")

    assert second.run == first.run
    assert seen.worked == ["transform"]


def test_a_second_process_on_the_same_run_is_refused_with_the_owner(tmp_path: Path) -> None:
    with (
        open_run(tmp_path, identity={}, settings={}, resume=NEWEST),
        pytest.raises(BusyError, match=f"pid {os.getpid()} on "),
        open_run(tmp_path, identity={}, settings={}, resume=NEWEST),
    ):
        pass


def test_the_lock_of_an_owner_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    hold = (
        "import os, sys; from pathlib import Path; from stoker.app.run_folder import NEWEST\n"
        "from stoker.app.run_folder import open_run\n"
        "with open_run(Path(sys.argv[1]), identity={}, settings={}, resume=NEWEST) as (run, _):\n"
        "    print(run.id, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    owner = subprocess.run([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.returncode == -9
    assert "pid" in (tmp_path / owner.stdout.decode().strip() / "lock").read_text()

    with open_run(tmp_path, identity={}, settings={}, resume=NEWEST) as (run, continued):
        assert continued
        assert run.id == owner.stdout.decode().strip()


def test_a_missing_run_is_not_created_instead(tmp_path: Path) -> None:
    with open_run(tmp_path, identity={}, settings={}, resume=NEWEST) as (run, _):
        pass
    with (
        pytest.raises(ConfigError, match=f"--resume must name a run.*{run.id}"),
        open_run(tmp_path, identity={}, settings={}, resume=Resume(run=run.id[:-1] + "x")),
    ):
        pass
    assert [path.name for path in tmp_path.glob("[!.]*")] == [run.id]


def test_a_worse_model_fails_max_drop_each_time_and_is_not_pushed(folder: Any) -> None:
    folder.edit("stoker.yaml", "gates: {auc: {min: 0.5}}", "gates: {auc: {max_drop: 0.005}}")
    result, _ = folder.run()
    assert result.results["push"]["already"]
    folder.edit("model.py", "Adam(0.02)", "Adam(-0.02)")

    for _ in range(2):
        with pytest.raises(CheckFailed, match=r"evaluate\.gates\.auc\.max_drop.*version 1"):
            folder.run()
    versions = [p.name for p in (folder.path / "models" / "small").iterdir() if p.name.isdigit()]
    assert versions == ["1"]


def test_a_baseline_that_cannot_answer_fails_closed(folder: Any) -> None:
    folder.edit("stoker.yaml", "gates: {auc: {min: 0.5}}", "gates: {auc: {max_drop: 0.5}}")
    folder.edit("model.py", "UNITS = 8", "UNITS = 7")
    variables = next(folder.path.glob("models/small/1/variables/variables.data*"))
    variables.write_bytes(b"\0" * variables.stat().st_size)

    with pytest.raises(CheckFailed, match="max_drop"):
        folder.run()
