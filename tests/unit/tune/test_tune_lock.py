"""`stoker.lock.yaml`: written, read, refused; and what of it is used."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.app.tuned_settings import load_tuned, measured_code
from stoker.app.tuning.tuning import check
from stoker.cluster.devices import find_devices, hardware
from stoker.core.errors import ConfigError
from stoker.tune.check import CHECKS, MAX_CHECKS, Measured, broken, settled
from stoker.tune.compare import Load
from stoker.tune.lock import FILE, Lock, differing, read_lock, write_lock

HERE = hardware(find_devices())

LOCK = Lock(
    settings={"train.xla": True, "train.steps_per_call": 10},
    replaced={"train.xla": "auto", "train.steps_per_call": "auto"},
    hardware=HERE,
    code={},
)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    (tmp_path / "stoker.yaml").write_text("name: mine\ndata: model:dataset\nmodel: model:build\n")
    (tmp_path / "model.py").write_text("def build(features): ...\ndef dataset(split): ...\n")
    return tmp_path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_lock(tmp_path / FILE, LOCK)

    assert read_lock(tmp_path / FILE) == LOCK
    assert (tmp_path / FILE).read_text().startswith("# Written by `stoker tune`")


def test_without_a_file_there_is_no_lock(experiment: Path) -> None:
    assert read_lock(experiment / FILE) is None
    assert load_tuned(experiment).lock_note == ""


@pytest.mark.parametrize(
    "text",
    [
        "settings: {}",
        "format: 2\nsettings: {}",
        "format: 1\nsettings: {}",
        "format: 1\nsettings: []\nreplaced: {}\nhardware: {}\ncode: {}",
        "format: 1\nsettings: {}\nreplaced: {}\nhardware: {}\ncode: {}\nmore: {}",
        "format: 1\nsettings: {.: 1}\nreplaced: {}\nhardware: {}\ncode: {}",
        "format: 1\nsettings: {train..xla: 1}\nreplaced: {}\nhardware: {}\ncode: {}",
        "format: 1\nsettings: {}\nreplaced: {}\nhardware: {}\ncode: {1: x}",
        "format: 1\nsettings: {}\nreplaced: {}\nhardware: {}\ncode: {model: x}",
        "settings: " + 4000 * "[" + 4000 * "]",
        "- 1",
        "{",
    ],
)
def test_a_file_that_is_not_a_lock_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)

    with pytest.raises(ConfigError, match="lock"):
        read_lock(tmp_path / FILE)


@pytest.mark.parametrize("kind", ["folder", "dangling", "pipe"])
def test_an_unreadable_lock_is_not_ignored(tmp_path: Path, kind: str) -> None:
    path = tmp_path / FILE
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(tmp_path / "gone")
    else:
        os.mkfifo(path)

    with pytest.raises(ConfigError, match="must be a lock file"):
        read_lock(path)


def test_an_invalid_setting_of_the_lock_names_the_lock_file(experiment: Path) -> None:
    write_lock(
        experiment / FILE, replace(LOCK, settings={"train.xla": 3}, replaced={"train.xla": "auto"})
    )

    with pytest.raises(ConfigError, match=f"^{FILE} cannot be used: train.xla must be"):
        load_tuned(experiment)


@pytest.mark.parametrize(
    "after",
    [
        {},
        {"busy_fraction": 0.9},
        {"busy_fraction": 0.9, "samples_per_s": float("nan")},
        {"busy_fraction": float("inf"), "samples_per_s": 1.0},
        {"busy_fraction": True, "samples_per_s": 1.0},
        {"busy_fraction": 0.9, "samples_per_s": 1.0, "busy_low": "low"},
        {"busy_fraction": 0.9, "samples_per_s": 1.0, "busy_low": -float("inf")},
        {"busy_fraction": 0.9, "samples_per_s": 1.0, "pace": float("inf")},
    ],
)
def test_a_promise_that_cannot_be_broken_is_refused(
    experiment: Path, after: dict[str, Any]
) -> None:
    write_lock(experiment / FILE, replace(LOCK, after=after))
    loaded = load_tuned(experiment).used

    with pytest.raises(ConfigError, match=r"after\.\w+ in .* must be a number"):
        check(loaded, progress=pytest.fail)


def test_it_is_used_on_matching_hardware_and_a_message_says_so(experiment: Path) -> None:
    write_lock(experiment / FILE, LOCK)

    read = load_tuned(experiment)

    loaded, said = read.used, read.lock_note

    assert (loaded.train.xla, loaded.train.steps_per_call) == (True, 10)
    assert said == f"{FILE}: train.xla=True, train.steps_per_call=10"


def test_it_is_not_used_on_another_machine(experiment: Path) -> None:
    write_lock(experiment / FILE, replace(LOCK, hardware=HERE | {"cores": 128}))

    read = load_tuned(experiment)

    loaded, said = read.used, read.lock_note

    assert loaded.train.xla == "auto"
    assert "is not used" in said
    assert "not 128" in said


def test_a_setting_changed_since_then_takes_precedence(experiment: Path) -> None:
    write_lock(experiment / FILE, LOCK)
    with (experiment / "stoker.yaml").open("a") as file:
        file.write("train: {xla: false}\n")

    read = load_tuned(experiment)

    loaded, said = read.used, read.lock_note

    assert (loaded.train.xla, loaded.train.steps_per_call) == (False, 10)
    assert "train.xla as in stoker.yaml" in said


def test_the_command_line_takes_precedence(experiment: Path) -> None:
    write_lock(experiment / FILE, LOCK)

    read = load_tuned(experiment, overrides=["train.xla=auto"])

    loaded, said = read.used, read.lock_note

    assert loaded.train.xla == "auto"
    assert said == f"{FILE}: train.steps_per_call=10"


def test_changed_code_is_reported(experiment: Path) -> None:
    write_lock(experiment / FILE, replace(LOCK, code={"model:build": "0" * 64}))

    read = load_tuned(experiment)

    loaded, said = read.used, read.lock_note

    assert loaded.train.xla is True
    assert "model:build changed since" in said


def test_a_lock_of_another_model_or_dataset_is_not_used(experiment: Path) -> None:
    for other in ("model:another", "model:dataset_of_old"):
        write_lock(experiment / FILE, replace(LOCK, code={other: "0" * 64}))

        read = load_tuned(experiment)

        loaded, said = read.used, read.lock_note

        assert loaded.train.xla == "auto"
        assert said == f"{FILE} is not used, it was measured with {other}"


@pytest.mark.parametrize("change", ["", "code", "options"])
def test_a_setting_of_one_dataset_is_not_used_with_another(experiment: Path, change: str) -> None:
    """A cache of what has become random would be another training."""
    cached = {"data.pipeline.cache": "memory", "train.xla": True}
    was = {"data.pipeline.cache": "none", "train.xla": "auto"}
    code = measured_code(load_tuned(experiment).used)
    assert set(code) == {"model:build", "model:dataset"}
    write_lock(experiment / FILE, replace(LOCK, settings=cached, replaced=was, code=code))
    if change == "code":
        (experiment / "model.py").write_text("def build(features): ...\ndef dataset(split): 1\n")
    elif change == "options":
        (experiment / "stoker.yaml").write_text(
            "name: mine\ndata: {dataset: 'model:dataset', options: {n: 1}}\nmodel: model:build\n"
        )

    read = load_tuned(experiment)

    loaded, said = read.used, read.lock_note

    assert loaded.train.xla is True
    assert loaded.own_dataset is not None
    assert loaded.own_dataset.pipeline.cache == ("none" if change else "memory")
    assert ("data.pipeline.cache left out, the dataset has changed" in said) == bool(change)
    assert ("model:dataset changed since" in said) == bool(change)


def test_a_lock_file_does_not_change_the_fingerprint_of_code_that_reads_its_folder(
    experiment: Path,
) -> None:
    (experiment / "model.py").write_text(
        "import os\ndef build(features): ...\ndef dataset(split): return os.environ['DATA']\n"
    )
    cached, was = {"data.pipeline.cache": "memory"}, {"data.pipeline.cache": "none"}
    code = measured_code(load_tuned(experiment).used)
    write_lock(experiment / FILE, replace(LOCK, settings=cached, replaced=was, code=code))

    assert load_tuned(experiment).lock_note == f"{FILE}: data.pipeline.cache=memory"


def test_a_lock_without_settings_says_whether_all_was_tried(experiment: Path) -> None:
    for finished, end in (
        (True, "helps here"),
        (False, "helps here before the tuning ended"),
    ):
        empty = replace(LOCK, settings={}, replaced={}, tuned={"finished": finished})
        write_lock(experiment / FILE, empty)

        assert load_tuned(experiment).lock_note.endswith(end)


def test_the_short_form_of_data_becomes_a_section(experiment: Path) -> None:
    lock = replace(
        LOCK,
        settings={"data.pipeline.cache": "memory"},
        replaced={"data.pipeline.cache": "none"},
    )
    write_lock(experiment / FILE, lock)

    loaded = load_tuned(experiment).used

    assert loaded.own_dataset is not None
    assert loaded.own_dataset.pipeline.cache == "memory"


def test_an_invalid_setting_is_an_error(experiment: Path) -> None:
    lock = replace(LOCK, settings={"train.xla": 7}, replaced={"train.xla": "auto"})
    write_lock(experiment / FILE, lock)

    with pytest.raises(ConfigError, match=r"train\.xla"):
        load_tuned(experiment)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.feed.warp", "warp"),
        ("train.warp.speed", "train.warp.speed must be a setting of stoker.yaml"),
        ("name.first", "name.first must be a setting of stoker.yaml"),
        (3, "each setting must have a dotted name"),
    ],
)
def test_an_unknown_setting_is_an_error(experiment: Path, name: Any, said: str) -> None:
    write_lock(experiment / FILE, replace(LOCK, settings={name: 9}))

    with pytest.raises(ConfigError, match=said):
        load_tuned(experiment)


def test_the_file_is_plain_yaml(tmp_path: Path) -> None:
    write_lock(tmp_path / FILE, LOCK)

    assert yaml.safe_load((tmp_path / FILE).read_text())["settings"] == LOCK.settings


def test_what_differs_is_named() -> None:
    assert differing({"cores": 2, "gpus": []}, {"cores": 4, "gpus": []}) == ["cores 4, not 2"]
    assert differing(HERE, HERE) == []


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (24, 24, []),
        (24, 22, []),
        (24, 96, []),
        (96, 24, ["memory_gib 24, not 96"]),
        (None, 24, []),
        (24, None, ["memory_gib None, not 24"]),
        ("much", 24, ["memory_gib 24, not much"]),
    ],
)
def test_less_memory_than_it_was_measured_with_is_another_machine(
    was: object, now: object, said: list[str]
) -> None:
    """What is kept in memory might not fit."""
    assert differing({"memory_gib": was}, {"memory_gib": now}) == said


@pytest.mark.parametrize(
    ("promised", "now", "breaks"), [(1.04, 0.96, False), (1.04, 0.94, True), (0.9, 0.84, True)]
)
def test_a_promise_of_more_than_a_whole_device_is_one_of_a_whole_device(
    promised: float, now: float, breaks: bool
) -> None:
    speed = {"samples_per_s": 100.0}

    found = broken({"busy_fraction": promised} | speed, {"busy_fraction": now} | speed)

    assert [line.startswith("U is") for line in found] == [True] * breaks


def test_a_promise_is_no_better_than_the_lower_end_of_its_interval() -> None:
    promised = {"busy_fraction": 0.98, "busy_low": 0.9, "samples_per_s": 100.0}

    for now, breaks in ((0.86, False), (0.84, True)):
        assert any(broken(promised, {"busy_fraction": now, "samples_per_s": 100.0})) is breaks


def test_what_breaks_a_promise_of_busy_lies_below_it_with_all_of_its_interval() -> None:
    promised = {"busy_fraction": 0.98, "busy_low": 0.95, "samples_per_s": 100.0}

    for high, breaks in ((0.91, False), (0.89, True)):
        now = {"busy_fraction": 0.88, "busy_high": high, "samples_per_s": 100.0}
        assert any(broken(promised, now)) is breaks


@pytest.mark.parametrize(
    ("pace", "speed", "breaks"),
    [
        (1e11, 79.0, True),
        (0.5e11, 41.0, False),
        (0.5e11, 39.0, True),
        # A quicker machine promises no more.
        (2e11, 81.0, False),
        (None, 79.0, True),
    ],
)
def test_a_slower_machine_does_not_break_a_promise_of_speed(
    pace: float | None, speed: float, breaks: bool
) -> None:
    promised = {"busy_fraction": 0.98, "samples_per_s": 100.0, "pace": 1e11}
    now: dict[str, Any] = {"busy_fraction": 0.98, "samples_per_s": speed, "pace": pace}

    assert any(broken(promised, now)) is breaks
    assert not any(broken(promised | {"pace": 0.0}, now | {"samples_per_s": 81.0}))


@pytest.mark.parametrize(
    ("busy", "used", "median"),
    [
        ([0.9, 0.5, 0.5], 1, 0.9),
        ([0.5, 0.9, 0.92], 3, 0.9),
        ([0.5, 0.9, 0.6], 3, 0.6),
        ([0.5, 0.5, 0.5], 3, 0.5),
    ],
)
def test_a_promise_breaks_by_the_median_of_processes(
    busy: list[float], used: int, median: float
) -> None:
    """If one process is slower than all others, more are measured, and one never outvotes two."""
    left = [measured(value) for value in busy]

    found = settled(lambda within_s: left.pop(0), PROMISED, within_s=60.0)

    assert len(left) == CHECKS - used
    assert found.figures == {"busy_fraction": median, "samples_per_s": 100.0, "usd_per_epoch": None}
    assert found.not_quiet() == ""


PROMISED = {"busy_fraction": 0.92, "samples_per_s": 100.0}


def measured(busy: float, *, others: float = 0.0) -> Measured:
    figures = {"busy_fraction": busy, "samples_per_s": 100.0, "usd_per_epoch": None}
    return Measured(figures=figures, load=Load(cores=4, others=others))


def test_measurements_under_load_do_not_outvote_measurements_on_a_quiet_machine() -> None:
    left = [measured(0.5, others=2.0), measured(0.6, others=3.0), measured(0.91)]
    left += [measured(0.92), measured(0.9)]

    found = settled(lambda within_s: left.pop(0), PROMISED, within_s=60.0)

    assert left == []
    assert found.figures["busy_fraction"] == 0.91
    assert "other processes used 3.0 of its 4 cores during 2 of 5" in found.not_quiet()
    assert "only the other measurements count" in found.not_quiet()


def test_a_machine_that_stays_loaded_is_reported_and_the_promise_is_still_judged() -> None:
    given = []

    def measure(within_s: float) -> Measured:
        given.append(within_s)
        return measured(0.5, others=1.25)

    found = settled(measure, PROMISED, within_s=60.0)

    assert len(given) == MAX_CHECKS
    assert any(broken(PROMISED, found.figures))
    assert found.not_quiet() == (
        "The machine was not quiet: other processes used 1.2 of its 4 cores during 6 of 6 "
        "measurements. Run the check again when nothing else runs."
    )


def test_a_check_starts_no_process_that_could_not_end_in_time() -> None:
    given = []

    def measure(within_s: float) -> Measured:
        given.append(within_s)
        time.sleep(0.05)  # more than half of the time that there is
        return measured(0.1)

    settled(measure, PROMISED, within_s=0.09)

    assert given == [0.09]
