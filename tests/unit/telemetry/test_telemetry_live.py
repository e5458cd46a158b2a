"""The newest metrics of a run, as a scrape sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker.core.git_repository import git_commit
from stoker.telemetry.catalogue import training as catalogue
from stoker.telemetry.run_info import RunInfo, run_info
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.wall_time import WallTime
from stoker.telemetry.writers.live import MAX_NAMES, MAX_WAITING, LiveMetrics, Sources

INFO = RunInfo(run="r1", experiment='a "b"\n\\', user="ann")


def scraped(live: LiveMetrics) -> dict[tuple[str, ...], float]:
    """Name and values of the labels -> number."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(live.text())
        for sample in family.samples
    }


def live_metrics(wall: WallTime | None = None, **sources: object) -> LiveMetrics:
    return LiveMetrics(INFO, Sources(run_time=RunTime(wall), **sources))  # type: ignore[arg-type]  # mypy cannot check **


def call(step_s: float) -> dict[str, float]:
    return {"loss": 0.5, "step_time_s": step_s, "samples_per_s": 100.0, "input_wait": 0.25}


def test_calls_and_epochs_become_series_of_the_run() -> None:
    live = live_metrics(
        checkpoint_age_s=lambda: 7.5, local_steps=lambda: {"0": 0.1}, stragglers=lambda: {"0": 1.0}
    )
    live.write(20, call(0.02) | {"busy_fraction": 0.9, "mfu": 0.4, "loss_scale": 1024.0})
    live.write(30, call(0.2) | {"gradient_norm": 3.0})
    live.write(30, {"loss": 0.4, "auc": 0.8, "val_loss": 0.6, "epoch": 1.0, "goodput": 0.5})
    live.progress(step=30, steps=60, epoch=1)

    found = scraped(live)

    assert found["stoker_train_loss", "r1"] == 0.4
    assert found["stoker_train_busy_ratio", "r1"] == 0.9
    assert found["stoker_train_mfu_ratio", "r1"] == 0.4
    assert found["stoker_train_loss_scale", "r1"] == 1024.0
    assert found["stoker_train_gradient_norm", "r1"] == 3.0
    assert found["stoker_train_input_wait_ratio", "r1"] == 0.25
    assert found["stoker_train_samples_per_second", "r1"] == 100.0
    assert found["stoker_train_metric", "r1", "auc"] == 0.8
    assert found["stoker_train_metric", "r1", "val_loss"] == 0.6
    assert found["stoker_train_epoch", "r1"] == 1.0
    assert found["stoker_train_steps_total", "r1"] == 30.0
    assert found["stoker_train_step_seconds_bucket", "r1", "0.025"] == 20
    assert found["stoker_train_step_seconds_bucket", "r1", "+Inf"] == 30
    assert found["stoker_train_step_seconds_sum", "r1"] == pytest.approx(2.4)
    assert found["stoker_train_checkpoint_age_seconds", "r1"] == 7.5
    assert found["stoker_train_local_step_seconds", "r1", "0"] == 0.1
    assert found["stoker_train_straggler_ratio", "r1", "0"] == 1.0
    assert found["stoker_run_info", "r1", 'a "b"\n\\', "ann", "", "", ""] == 1.0
    assert not [name for name, *_ in found if name == "stoker_train_goodput"]


def test_every_series_is_in_the_catalogue_and_every_metric_of_it_is_written() -> None:
    live = live_metrics(
        WallTime(began_s=0.0),
        checkpoint_age_s=lambda: 1.0,
        local_steps=lambda: {"0": 0.1},
        stragglers=lambda: {"0": 1.0},
    )
    live._sources.run_time._restarts["killed"] = 1
    live.write(1, call(1.0) | {"busy_fraction": 1.0, "mfu": 1.0, "loss_scale": 1.0})
    live.write(2, {"gradient_norm": 1.0, "auc": 1.0})
    live.progress(step=1, steps=9, epoch=0)
    live.progress(step=2, steps=9, epoch=0)

    samples, _ = live.samples()

    listed = set(catalogue.METRICS) - {catalogue.STEP_TIME_S}
    assert {metric for metric in samples if samples[metric]} == listed
    for metric, values in samples.items():
        assert all(len(labels) == len(metric.labels) for labels in values), metric.name


def test_steps_that_are_done_again_count_again_and_no_counter_ever_falls() -> None:
    now = [0.0]
    wall = WallTime(began_s=0.0, clock=lambda: now[0], part="steps")
    live = live_metrics(wall)
    live.write(40, call(0.1))
    now[0] = 10.0
    before = scraped(live)
    wall.enter("between")
    wall.move("steps", "repeated", 4.0)
    live.rewind(20)
    live.write(30, call(0.1))

    after = scraped(live)

    assert after["stoker_train_steps_total", "r1"] == 50.0
    part = ("stoker_train_wall_seconds_total", "r1")
    assert before[*part, "steps"] == after[*part, "steps"] == 10.0
    assert after[*part, "repeated"] == 4.0


def test_a_resumed_run_does_not_count_the_steps_of_earlier_processes() -> None:
    live = live_metrics()
    live.rewind(1000)
    live.write(1010, call(0.1))

    assert scraped(live)["stoker_train_steps_total", "r1"] == 10.0


def test_a_model_with_endless_names_of_metrics_makes_no_endless_series() -> None:
    live = live_metrics()
    for number in range(2 * MAX_NAMES):
        live.write(number, {f"metric {number}": 1.0})

    found = scraped(live)

    assert len([name for name, *_ in found if name == "stoker_train_metric"]) == MAX_NAMES


def test_nan_is_a_value_that_prometheus_reads() -> None:
    live = live_metrics()
    live.write(1, {"loss": float("nan"), "auc": float("inf")})

    found = scraped(live)

    assert found["stoker_train_loss", "r1"] != found["stoker_train_loss", "r1"]
    assert found["stoker_train_metric", "r1", "auc"] == float("inf")


def test_a_commit_is_read_from_the_files_of_git(tmp_path: Path) -> None:
    commit, folder = "0123456789" * 4, tmp_path / "repository" / "experiment"
    folder.mkdir(parents=True)
    assert git_commit(folder) == ""
    git = tmp_path / "repository" / ".git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert git_commit(folder) == "", "no commit yet"
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    assert git_commit(folder) == commit
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("f" * 40 + "\n")
    assert git_commit(folder) == "f" * 40
    worktree = tmp_path / "worktree"
    own = git / "worktrees" / "w"
    own.mkdir(parents=True)
    worktree.mkdir()
    (worktree / ".git").write_text(f"gitdir: {own}\n")
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    (own / "commondir").write_text("../..\n")
    assert git_commit(worktree) == "f" * 40
    (own / "HEAD").write_text(commit)
    assert git_commit(worktree) == commit


def test_user_team_and_cluster_come_from_the_environment(tmp_path: Path) -> None:
    environ = {"STOKER_USER": "ann", "STOKER_TEAM": "t", "STOKER_CLUSTER": "c" * 500}

    labels = run_info("r", "e", folder=tmp_path, environ=environ).labels()

    assert labels[:4] == ("r", "e", "ann", "t")
    assert labels[4] == "c" * 128


def test_calls_between_two_scrapes_are_counted_however_many_they_are() -> None:
    live = live_metrics()
    live.rewind(100)

    for step in range(101, 101 + 3 * MAX_WAITING):
        live.write(step, call(0.02))
    live.rewind(100)
    live.write(105, call(0.2))

    found = scraped(live)
    assert found["stoker_train_steps_total", "r1"] == 3 * MAX_WAITING + 5
    assert found["stoker_train_step_seconds_bucket", "r1", "0.025"] == 3 * MAX_WAITING
