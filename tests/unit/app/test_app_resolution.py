"""What `auto` became is what it stays, and what a run is is named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.app.context import CHECKPOINTS
from stoker.app.experiment import Experiment, load_experiment
from stoker.app.identity import run_identity, shared_settings
from stoker.app.training.setup import resolve_once
from stoker.core.errors import UserError
from stoker.train.checkpoints.identity import Identity, changes
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.elastic import ElasticConfig

BEFORE = ResolvedTraining(
    batch_size=64,
    accumulate=1,
    replicas=4,
    workers=1,
    steps_per_call=50,
    precision="mixed_bfloat16",
    xla=True,
    strategy="mirrored",
    lr_factor=1.0,
    why={"strategy": "4 GPUs on this machine"},
)


def begun(folder: Path) -> Path:
    """A stage's folder whose run has begun with `BEFORE`, and has a checkpoint."""
    assert resolve_once(folder, TrainConfig(), BEFORE) == BEFORE
    (folder / CHECKPOINTS / "step-0000000003").mkdir(parents=True)
    return folder


def test_a_continued_run_keeps_the_values_of_auto(tmp_path: Path) -> None:
    now = replace(BEFORE, batch_size=32, precision="float32", xla=False, steps_per_call=9)

    assert resolve_once(begun(tmp_path), TrainConfig(), now) == BEFORE


def test_an_explicit_setting_takes_precedence_in_a_continued_run(tmp_path: Path) -> None:
    now = replace(BEFORE, precision="float32", xla=False)

    resolved = resolve_once(begun(tmp_path), TrainConfig(precision="float32"), now)

    assert resolved.precision == "float32"
    assert resolved.xla


def test_a_run_without_a_checkpoint_uses_this_machine(tmp_path: Path) -> None:
    now = replace(BEFORE, replicas=1, strategy="one_device")
    resolve_once(tmp_path, TrainConfig(), BEFORE)

    assert resolve_once(tmp_path, TrainConfig(), now) == now


def test_fewer_devices_than_a_run_began_with_are_named(tmp_path: Path) -> None:
    now = replace(BEFORE, replicas=2, why={"strategy": "2 GPUs on this machine"})

    with pytest.raises(UserError, match=r"2 here \(2 GPUs .* it started with 4 \(4 GPUs"):
        resolve_once(begun(tmp_path), TrainConfig(), now)


ELASTIC = TrainConfig(elastic=ElasticConfig(min=2, max=4))


def test_an_elastic_training_goes_on_with_another_number_of_replicas(tmp_path: Path) -> None:
    before = replace(BEFORE, virtual_workers=4, batch_size=16, strategy="multi_worker", workers=4)
    resolve_once(tmp_path, ELASTIC, before)
    (tmp_path / CHECKPOINTS / "step-0000000003").mkdir(parents=True)
    now = replace(before, replicas=2, workers=1, strategy="mirrored", steps_per_call=9)

    resolved = resolve_once(tmp_path, ELASTIC, now)

    assert (resolved.replicas, resolved.strategy) == (2, "mirrored")
    assert (resolved.steps_per_call, resolved.global_batch) == (50, 64)
    with pytest.raises(UserError, match="must have 2, 4 workers: divisors of 4 that"):
        resolve_once(tmp_path, ELASTIC, replace(now, replicas=1, strategy="one_device"))
    with pytest.raises(UserError, match="must have 2, 4 replicas over all workers"):
        resolve_once(tmp_path, ELASTIC, replace(now, replicas=8))


def test_the_least_number_of_workers_is_not_part_of_a_run_and_virtual_ones_are(
    folder: Path,
) -> None:
    def identity(*overrides: str) -> Identity:
        return run_identity(load_experiment(folder, overrides=overrides), source="s")

    plain, elastic = identity(), identity("train.elastic={min: 2, max: 8}")

    assert not changes(elastic, identity("train.elastic={max: 8}"))
    (change,) = changes(elastic, identity("train.elastic={max: 4}"))
    assert str(change) == "configuration train.elastic.max was 8 and is 4"
    assert [str(each) for each in changes(plain, elastic)] == [
        "configuration train.elastic.max is new"
    ]
    assert not [name for name in plain["configuration"] if "elastic" in name], "as before"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stoker.yaml").write_text(
        "name: t\ndata: {source: d.csv}\nmodel: model:build\nlabel: y\n"
        "train: {callbacks: 'model:callbacks'}\n"
    )
    (tmp_path / "model.py").write_text(
        "def build(f):\n    return 1\n\n\ndef callbacks():\n    return []\n"
    )
    return tmp_path


def differences(before: Experiment, after: Experiment) -> list[str]:
    pair = [run_identity(each, source="s") for each in (before, after)]
    return [f"{change.part} {change.name}" for change in changes(*pair)]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("train.seed=3", ["configuration train.seed"]),
        ("train.checkpoint.every_steps=5", []),
        ("train.watchdog_s=7", []),
        ("evaluate.slices=[a]", ["configuration evaluate.slices"]),
        ("runs=elsewhere", []),
    ],
)
def test_a_setting_is_part_of_a_run_where_it_changes_what_comes_out(
    folder: Path, setting: str, named: list[str]
) -> None:
    changed = load_experiment(folder, overrides=[setting])

    assert differences(load_experiment(folder), changed) == named


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("train.seed=3", {"train.seed"}),
        ("train.checkpoint.every_steps=5", {"train.checkpoint.every_steps"}),
        ("name=other", {"name"}),
        ("data.source=elsewhere.csv", {"data.source"}),
        ("data.cache_dir=here", set()),
        ("runs=elsewhere", set()),
        ("models=elsewhere", set()),
    ],
)
def test_settings_of_tasks_agree_if_only_paths_differ(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, setting: str, named: set[str]
) -> None:
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(folder, copy, dirs_exist_ok=True)

    here = shared_settings(load_experiment(folder))
    there = shared_settings(load_experiment(copy, overrides=[setting]))

    assert {name for name in here | there if here.get(name) != there.get(name)} == named


def test_a_line_of_a_callback_is_part_of_a_run(folder: Path) -> None:
    experiment = load_experiment(folder)
    before = run_identity(experiment, source="s")
    code = (folder / "model.py").read_text()
    (folder / "model.py").write_text(code.replace("return []", "return [1]"))

    found = changes(before, run_identity(experiment, source="s"))

    assert [str(change) for change in found] == ["code model:callbacks has changed"]
