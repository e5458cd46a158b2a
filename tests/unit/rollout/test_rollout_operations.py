"""What operators do, on a repository with real files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorflow.core.protobuf import saved_model_pb2

from stoker.cli.commands.rollout import follow
from stoker.cli.main import invoke
from stoker.core.errors import EXIT_DONE, CheckFailed, ConfigError, DataError, UserError
from stoker.registry.repository import Repository
from stoker.rollout.ab_tests import ABTests
from stoker.rollout.counts.counts import MEASURED, write_counts
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.memory import check_fits, version_bytes
from stoker.rollout.operations import ModelRollouts, operator
from stoker.rollout.signatures import check_compatible
from stoker.rollout.state.ab_settings import ABTestSettings
from stoker.rollout.state.changes import advance, pause
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER, Phase

FLOAT, STRING = 1, 7
Inputs = Mapping[str, tuple[int, tuple[int, ...]]]
SIMPLE: Inputs = {"x": (FLOAT, (-1, 3))}


def saved_model(
    folder: Path, inputs: Inputs = SIMPLE, *, outputs: tuple[str, ...] = ("y",), noise: str = "a"
) -> Path:
    """A folder with the file that describes a SavedModel's signature; its graph is empty."""
    model = saved_model_pb2.SavedModel()
    graph = model.meta_graphs.add()
    graph.meta_info_def.tags.append("serve")
    graph.meta_info_def.stripped_default_attrs = noise == "b"
    signature = graph.signature_def["serving_default"]
    for name, (dtype, shape) in inputs.items():
        signature.inputs[name].name = f"{name}:0"
        signature.inputs[name].dtype = dtype  # type: ignore[assignment]  # the stub wants the enum's value type
        for size in shape:
            signature.inputs[name].tensor_shape.dim.add().size = size
    for name in outputs:
        signature.outputs[name].name = f"{name}:0"
        signature.outputs[name].dtype = FLOAT  # type: ignore[assignment]  # the stub wants the enum's value type
    folder.mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(model.SerializeToString())
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    repository = Repository(tmp_path / "models")
    for noise in "ab":
        repository.push(saved_model(tmp_path / noise, noise=noise), "taxi")
    return tmp_path / "models"


def test_status_shows_how_many_requests_the_first_stage_waits_for(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ModelRollouts(root, "taxi").start(2, RolloutSettings(stages="10,100"), why="")
    counts = {MEASURED: {1: VersionCounts(requests=41)}}
    write_counts(root / "taxi" / FOLDER, counts, {}, rollout=1, server="a")

    assert invoke(["rollout", "status", "taxi", "--models", str(root)], debug=False) == EXIT_DONE

    assert "stage 1: 10 %, after 1,000 requests of version 1; 41 so far" in capsys.readouterr().out


def test_a_followed_rollout_is_printed_until_its_end_and_goes_on_after_ctrl_c(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = ModelRollouts(root, "taxi")
    begun = rollouts.start(2, RolloutSettings(stages="10,100"), why="")
    steps: list[Callable[[], object]] = [
        lambda: rollouts.promote(why=""),
        lambda: None,
        lambda: rollouts.pause(why="a look"),
        lambda: rollouts.promote(full=True, why=""),
    ]
    clock = SimpleNamespace(sleep=lambda _: steps.pop(0)(), strftime=time.strftime)
    monkeypatch.setattr(follow, "time", clock)

    follow.follow(rollouts, begun, target="taxi")

    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "version 2 measuring the baseline, 0 % of the traffic; baseline version 1; stage 1: 10 %",
        "version 2 running, 10 % of the traffic; baseline version 1; stage 1: 10 %",
        "version 2 paused, 10 % of the traffic; baseline version 1; stage 1: 10 %; a look",
        "version 2 completed, 100 % of the traffic; baseline version 1",
    ]

    def interrupt() -> None:
        raise KeyboardInterrupt

    begun = rollouts.start(1, RolloutSettings(), why="")
    steps[:] = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        follow.follow(rollouts, begun, target="taxi --models m")
    assert "goes on. See `stoker rollout status taxi --models m`" in capsys.readouterr().err
    assert rollouts.state() == begun


def test_a_follower_survives_an_unreadable_state_and_reports_a_rollback_that_another_rollout_followed(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = ModelRollouts(root, "taxi")
    begun = rollouts.start(2, RolloutSettings(stages="10,100"), why="")
    newest = max((root / "taxi" / FOLDER).glob("*.json"))
    damaged = newest.with_name(f"{int(newest.stem) + 1:0{len(newest.stem)}}.json")

    def replace_it() -> None:
        damaged.unlink()
        rollouts.roll_back(to=None, why="page 17")
        rollouts.start(2, RolloutSettings(stages="50,100"), why="")

    steps: list[Callable[[], object]] = [
        lambda: damaged.write_bytes(b"{"),
        lambda: None,
        replace_it,
    ]
    clock = SimpleNamespace(sleep=lambda _: steps.pop(0)(), strftime=time.strftime)
    monkeypatch.setattr(follow, "time", clock)

    with pytest.raises(CheckFailed, match=r"2 was rolled back to version 1. Received: page 17"):
        follow.follow(rollouts, begun, target="taxi")

    shown = capsys.readouterr()
    assert shown.err.count("the state cannot be read now") == 1
    assert "version 2 rolled back" in shown.out


def test_an_operator_takes_a_version_from_start_to_rollback(root: Path) -> None:
    rollouts = ModelRollouts(root, "taxi")
    begun = rollouts.start(2, RolloutSettings(), why="retrained")
    assert (begun.baseline, begun.candidate, begun.who) == (1, 2, operator())

    moved = rollouts.apply(lambda state: advance(state, now_s=1.0), what="promote", why="")
    assert (moved.phase, moved.share) == (Phase.RUNNING, 0.01)
    back = ModelRollouts(root, "taxi").roll_back(to=None, why="page 17")
    assert (back.phase, back.rejected, back.reason) == (Phase.ROLLED_BACK, (2,), "page 17")

    assert [(event.what, event.why, state.phase) for event, state in rollouts.history()] == [
        ("start", "retrained", Phase.MEASURING),
        ("promote", "", Phase.RUNNING),
        ("rollback", "page 17", Phase.ROLLED_BACK),
    ]
    status = rollouts.status()
    assert (status.state, status.counts) == (back, {})
    assert [gate.verdict for gate in status.gates] == ["pass"] * 4


def test_after_a_rollback_to_a_third_version_the_counts_of_others_are_not_judged(
    root: Path, tmp_path: Path
) -> None:
    Repository(root).push(saved_model(tmp_path / "c", noise="c"), "taxi")
    rollouts = ModelRollouts(root, "taxi")
    rollouts.start(3, RolloutSettings(), why="", baseline=2)
    assert rollouts.roll_back(to=1, why="").stable == 1
    assert rollouts.status().gates == []


def test_a_limit_of_no_time_for_a_load_is_refused() -> None:
    with pytest.raises(ConfigError, match="load_limit_s must be a time above 0"):
        RolloutSettings(load_limit_s=0.0)


def test_of_two_operators_the_second_sees_what_the_first_did(root: Path) -> None:
    first, second = ModelRollouts(root, "taxi"), ModelRollouts(root, "taxi")
    first.start(2, RolloutSettings(), why="")

    with pytest.raises(UserError, match=f"version 2, started by {operator()}, measuring"):
        second.start(2, RolloutSettings(), why="")
    first.apply(lambda state: advance(state, now_s=1.0), what="promote", why="")
    second.apply(lambda state: pause(state, reason="a look"), what="pause", why="")
    with pytest.raises(UserError, match="Only a running rollout"):
        first.apply(lambda state: pause(state, reason="a look"), what="pause", why="")


def test_a_baseline_that_does_not_serve_is_refused(root: Path) -> None:
    rollouts = ModelRollouts(root, "taxi")
    rollouts.hold(why="")
    begun = rollouts.start(1, RolloutSettings(), why="", baseline=2)
    assert (begun.baseline, begun.candidate) == (2, 1)
    rollouts.promote(full=True, why="")

    with pytest.raises(UserError, match=r"version 2; version 1 takes it.*Leave --baseline out"):
        rollouts.start(2, RolloutSettings(), why="", baseline=2)
    with pytest.raises(UserError, match=r"version 9; version 1 takes it"):
        rollouts.start(2, RolloutSettings(), why="", baseline=9)
    assert len(rollouts.history()) == 3


def damage(root: Path, version: int) -> None:
    path = root / "taxi" / str(version) / "saved_model.pb"
    path.write_bytes(path.read_bytes() + b" ")


def test_a_damaged_version_is_not_rolled_out(root: Path) -> None:
    damage(root, 2)

    with pytest.raises(DataError, match="bytes that differ from the pushed ones"):
        ModelRollouts(root, "taxi").start(2, RolloutSettings(), why="")
    assert ModelRollouts(root, "taxi").history() == []


def test_no_traffic_goes_back_to_a_damaged_version(root: Path) -> None:
    rollouts = ModelRollouts(root, "taxi")
    begun = rollouts.start(2, RolloutSettings(), why="")
    damage(root, 1)

    with pytest.raises(DataError, match="bytes that differ from the pushed ones"):
        rollouts.roll_back(to=None, why="")
    assert rollouts.status().state == begun


def test_a_version_that_is_not_there_changes_nothing(root: Path) -> None:
    rollouts = ModelRollouts(root, "taxi")
    with pytest.raises(UserError, match="must have a version 9"):
        rollouts.start(9, RolloutSettings(), why="")
    with pytest.raises(UserError, match="has no rollout"):
        rollouts.status()
    with pytest.raises(UserError, match=r"Did you mean 'slow_p50'\?"):
        rollouts.start(2, RolloutSettings(dry_run=("slow_p5",)), why="")
    rollouts.start(2, RolloutSettings(), why="")
    with pytest.raises(UserError, match="must have a version 7"):
        rollouts.roll_back(to=7, why="")
    with pytest.raises(UserError, match="must hold the model 'other'"):
        ModelRollouts(root, "other")
    assert len(rollouts.history()) == 1


def test_the_state_of_a_model_may_begin_with_its_only_version(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "m")
    repository.push(saved_model(tmp_path / "a"), "taxi")
    rollouts = ModelRollouts(tmp_path / "m", "taxi")

    first = rollouts.start(1, RolloutSettings(), why="")

    assert (first.phase, first.stable, first.share) == (Phase.COMPLETED, 1, 1.0)
    with pytest.raises(UserError, match="must have a version to compare with"):
        rollouts.start(1, RolloutSettings(), why="")
    with pytest.raises(UserError, match="already takes all traffic"):
        rollouts.roll_back(to=None, why="")
    repository.push(saved_model(tmp_path / "b", noise="b"), "taxi")
    begun = rollouts.start(2, RolloutSettings(), why="")
    assert (begun.baseline, begun.candidate, begun.rollout) == (1, 2, 2)
    assert rollouts.roll_back(to=None, why="").stable == 1


@pytest.mark.parametrize(
    ("inputs", "difference"),
    [
        ({"x": (STRING, (-1, 3))}, "input 'x' is string, was float32"),
        ({"x": (FLOAT, (-1, 4))}, "input 'x' has a narrower shape"),
        ({"x": (FLOAT, (8, 3))}, "input 'x' has a narrower shape"),
        ({"z": (FLOAT, (-1, 3))}, "no input 'x'; serving_default: a further input 'z'"),
        ({}, "no input 'x'"),
    ],
)
def test_a_version_that_clients_of_the_baseline_cannot_call_is_refused(
    tmp_path: Path, inputs: Inputs, difference: str
) -> None:
    served, new = saved_model(tmp_path / "1"), saved_model(tmp_path / "2", inputs)

    with pytest.raises(UserError, match=f"Clients of version 1.*{difference}"):
        check_compatible(served, new)


def test_a_version_that_accepts_more_is_compatible(tmp_path: Path) -> None:
    served = saved_model(tmp_path / "1", {"x": (FLOAT, (8, 3))})
    check_compatible(served, saved_model(tmp_path / "2", outputs=("y", "z")))
    with pytest.raises(UserError, match="no output 'y'"):
        check_compatible(served, saved_model(tmp_path / "3", outputs=("z",)))


def test_the_result_of_an_ab_test_names_a_version_that_a_server_cannot_load(root: Path) -> None:
    rollouts = ModelRollouts(root, "taxi")
    test = ABTestSettings(arms=((1, 0.5), (2, 0.5)), baseline=2, salt="00" * 16)
    ABTests(rollouts).start(test, RolloutSettings(key="x-user"), why="")
    assert ABTests(rollouts).result()[2].warnings == []
    write_counts(root / "taxi" / FOLDER, {}, {1: "out of memory"}, rollout=1, server="one")

    assert ABTests(rollouts).result()[2].warnings == [
        "Version 1 cannot be loaded by a server: out of memory"
    ]
    assert rollouts.status().gates == []


def test_an_arm_that_clients_of_the_baseline_cannot_call_is_refused(
    root: Path, tmp_path: Path
) -> None:
    other = saved_model(tmp_path / "other", {"z": (FLOAT, (-1, 3))})
    Repository(root).push(other, "taxi")
    test = ABTestSettings(arms=((1, 0.4), (2, 0.3), (3, 0.3)), baseline=1, salt="00" * 16)
    rollouts = ModelRollouts(root, "taxi")

    with pytest.raises(UserError, match="must be able to call version 3"):
        ABTests(rollouts).start(test, RolloutSettings(key="x-user"), why="")
    (root / "taxi" / "2" / "saved_model.pb").write_bytes(b"other bytes")
    two = replace(test, arms=((1, 0.5), (2, 0.5)))
    with pytest.raises(DataError):
        ABTests(rollouts).start(two, RolloutSettings(key="x-user"), why="")
    assert rollouts.history() == []


def test_two_versions_that_do_not_fit_in_memory_are_refused_with_both_figures(root: Path) -> None:
    for version in (1, 2):
        variables = root / "taxi" / str(version) / "variables"
        variables.mkdir()
        (variables / "variables.data-00000-of-00001").write_bytes(b"")
        os.truncate(variables / "variables.data-00000-of-00001", 3 << 30)
        (root / "taxi" / str(version) / "stoker.manifest.json").unlink()
    rollouts = ModelRollouts(root, "taxi")

    with pytest.raises(UserError) as error:
        rollouts.start(2, RolloutSettings(), why="", server_bytes=4 << 30)
    line = error.value.line()
    assert "Versions 1 and 2 must fit in the memory of a server together" in line
    assert "6 GiB of variables and graphs, 4 GiB of memory" in line
    assert rollouts.history() == []

    test = ABTestSettings(arms=((1, 0.5), (2, 0.5)), baseline=1, salt="00" * 16)
    with pytest.raises(UserError, match="Versions 1 and 2 must fit"):
        ABTests(rollouts).start(test, RolloutSettings(key="k"), why="", server_bytes=4 << 30)
    assert rollouts.history() == []

    assert rollouts.start(2, RolloutSettings(), why="", server_bytes=7 << 30).candidate == 2
    assert version_bytes(root / "taxi" / "1") > 3 << 30
    with pytest.raises(UserError, match="the memory of this machine"):
        check_fits(root / "taxi" / "1", huge(root / "taxi" / "9"))


def huge(folder: Path) -> Path:
    """A version of 8 TiB, on the disk nothing."""
    (folder / "variables").mkdir(parents=True)
    path = folder / "variables" / "variables.data-00000-of-00001"
    path.write_bytes(b"")
    os.truncate(path, 1 << 43)
    return folder


@pytest.mark.parametrize("address", ["gs://bucket/models", "s3://bucket", "hdfs://node/models"])
def test_a_repository_in_object_storage_is_refused_and_no_folder_is_made(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match=rf"not object storage. Received: {address}"):
        ModelRollouts(Path(address), "taxi")
    # A path of stoker.yaml is below the folder of the experiment.
    with pytest.raises(UserError, match="not object storage"):
        Repository(tmp_path / address)
    assert list(tmp_path.iterdir()) == []


def test_a_reason_is_one_line_that_controls_no_terminal(root: Path) -> None:
    rollouts = ModelRollouts(root, "taxi")
    rollouts.start(2, RolloutSettings(), why="new\nline \x1b[2J" + "x" * 5_000)

    (event, _), *_ = rollouts.history()
    assert event.why.startswith("new line  [2Jxxx")
    assert len(event.why) == 1_000
