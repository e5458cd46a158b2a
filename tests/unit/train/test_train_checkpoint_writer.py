from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.errors import ConfigError, Superseded, UserError
from stoker.core.incarnation import take_next
from stoker.train.checkpoints.cadence import AIM, MAX_EVERY_S, MIN_CALLS, MIN_EVERY_S, Cadence
from stoker.train.checkpoints.store import STATE, VerifiedCheckpoint, best, newest_good, places
from stoker.train.checkpoints.writer import CheckpointInfo, CheckpointWriter, superseded
from stoker.train.config import CheckpointConfig

ARRAYS = {"model/w": np.arange(1000, dtype=np.float32)}


def writer(
    folder: Path, *, after: VerifiedCheckpoint | None = None, **config: object
) -> CheckpointWriter:
    return CheckpointWriter(
        folder,
        config=CheckpointConfig(**config),  # type: ignore[arg-type]  # mypy cannot check **
        identity={},
        better="min",
        after=after,
    )


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_last_ones_and_the_best_one_are_kept(tmp_path: Path) -> None:
    with writer(tmp_path, keep_last=2) as writing:
        for step, value in enumerate([3.0, 1.0, 2.0, float("nan"), 4.0], start=1):
            writing.save(ARRAYS, {"step": step}, step=step, monitored=value)

    assert names(tmp_path) == ["step-0000000002", "step-0000000004", "step-0000000005"]
    assert best(tmp_path).step == 2


def test_the_best_one_stays_the_best_over_a_restart(tmp_path: Path) -> None:
    with writer(tmp_path, keep_last=1) as writing:
        writing.save(ARRAYS, {}, step=1, monitored=1.0)
        writing.save(ARRAYS, {}, step=2, monitored=2.0)
    with writer(tmp_path, keep_last=1, after=newest_good(tmp_path)) as writing:
        writing.save(ARRAYS, {}, step=3, monitored=1.5)

    assert names(tmp_path) == ["step-0000000001", "step-0000000003"]
    assert best(tmp_path).step == 1


def test_a_later_one_of_the_same_step_takes_its_place(tmp_path: Path) -> None:
    with writer(tmp_path) as writing:
        writing.save(ARRAYS, {"epoch": 0}, step=5)
        writing.save(ARRAYS, {"epoch": 1}, step=5)

    assert names(tmp_path) == ["step-0000000005.1"]
    found = newest_good(tmp_path)
    assert found is not None
    assert found.facts == {"epoch": 1}


def test_a_run_that_fell_back_passes_the_damaged_one_and_removes_it(tmp_path: Path) -> None:
    with writer(tmp_path) as writing:
        for step in (10, 20):
            writing.save(ARRAYS, {}, step=step)
    (tmp_path / "step-0000000020" / STATE).unlink()

    found = newest_good(tmp_path)
    assert found is not None
    with writer(tmp_path, after=found) as writing:
        writing.save(ARRAYS, {}, step=15)

    assert names(tmp_path) == ["step-0000000010", "step-0000000015"]


def test_facts_that_change_after_the_hand_over_are_those_of_its_moment(tmp_path: Path) -> None:
    facts = {"losses": [1.0]}
    with writer(tmp_path) as writing:
        writing.save(ARRAYS, facts, step=1)
        facts["losses"].append(2.0)

    found = newest_good(tmp_path)
    assert found is not None
    assert found.facts == {"losses": [1.0]}


def test_what_a_killed_writer_left_is_swept_at_the_start(tmp_path: Path) -> None:
    (tmp_path / ".step-0000000001.abc.tmp").mkdir()
    (tmp_path / ".step-0000000001.abc.tmp" / STATE).write_bytes(b"half")

    with writer(tmp_path):
        assert names(tmp_path) == []


def test_saving_returns_before_the_disk_has_it_and_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, to_disk = threading.Event(), os.fsync

    def slow_disk(descriptor: int) -> None:
        assert free.wait(timeout=60)
        to_disk(descriptor)

    with writer(tmp_path) as writing:
        writing.save(ARRAYS, {}, step=1)
        writing.wait()
        monkeypatch.setattr(os, "fsync", slow_disk)
        writing.save(ARRAYS, {}, step=2)
        assert [path.name for path in places(tmp_path)] == ["step-0000000001"]
        assert not writing.due(10**9)
        threading.Timer(0.1, free.set).start()
        writing.save(ARRAYS, {}, step=3)
        assert free.is_set()
        assert [path.name for path in places(tmp_path)][-1] == "step-0000000002"

    assert [path.name for path in places(tmp_path)][-1] == "step-0000000003"
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]


def save_all(folder: Path, *sizes: int) -> None:
    with writer(folder) as writing:
        for step, size in enumerate(sizes, start=1):
            writing.save({"model/w": np.zeros(size, np.float32)}, {}, step=step)


def test_a_full_disk_says_need_and_free_and_leaves_the_older_one(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    with pytest.raises(UserError, match="must have room for it") as error:
        save_all(folder, 1000, 500_000, 1000)

    assert "2,000,000 bytes more" in str(error.value)
    assert " bytes free" in str(error.value)
    assert names(folder) == ["step-0000000001"]
    found = newest_good(folder)
    assert found is not None
    assert found.step == 1


def test_a_file_above_the_limit_of_its_size_leaves_the_older_one(tmp_path: Path) -> None:
    # SIGXFSZ is ignored by Python: the write is short, as with a quota.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(UserError, match="File too large"):
            save_all(tmp_path, 1000, 500_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert names(tmp_path) == ["step-0000000001"]


def test_a_read_only_disk_is_refused_at_once(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    with pytest.raises(UserError, match="Read-only file system"):
        writer(small_disk / "checkpoints")
    with pytest.raises(UserError, match="Read-only file system"):
        writer(small_disk)


def test_a_disk_that_becomes_read_only_ends_the_next_save(small_disk: Path) -> None:
    writing = writer(small_disk)
    writing.save(ARRAYS, {}, step=1)
    writing.wait()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    writing.save(ARRAYS, {}, step=2)
    with pytest.raises(UserError, match="Older checkpoints are intact"):
        writing.save(ARRAYS, {}, step=3)

    assert names(small_disk) == ["step-0000000001"]


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@given(
    stall_s=st.floats(0.0001, 60.0),
    step_s=st.floats(0.1, 2.0),
    share=st.sampled_from([0.01, 0.035, 0.2]),
)
def test_the_automatic_rate_keeps_to_its_share(stall_s: float, step_s: float, share: float) -> None:
    clock = Clock()
    cadence = Cadence(CheckpointConfig(max_overhead=share), now_s=clock)
    saves, step = 0, 0
    begun_s = paid_s = 0.0
    while saves < 12:
        step += 1
        clock.s += step_s
        if cadence.due(step):
            cadence.saved(step)
            clock.s += stall_s
            cadence.cost(stalled_s=stall_s, cpu_s=0.0)
            # The first one has to be paid to know what one costs.
            saves += 1
            begun_s = begun_s or clock.s
            paid_s += stall_s if saves > 1 else 0.0
        if step > 20_000:
            return

    bounded = stall_s / share > MAX_EVERY_S
    assert bounded or paid_s / (clock.s - begun_s) <= share * 1.001
    assert MIN_EVERY_S <= cadence.every_s <= MAX_EVERY_S


def test_what_steps_lose_during_a_write_counts_as_cost() -> None:
    """Whatever CPU time the writing says that it took: cores may idle, or be taken from the step."""
    cadence = Cadence(CheckpointConfig(max_overhead=0.01), now_s=Clock())

    for _ in range(MIN_CALLS):
        cadence.trained(10, 1.0, while_writing=False)
    cadence.trained(10, 1.5, while_writing=True)
    cadence.trained(10, 1.3, while_writing=True)
    cadence.cost(stalled_s=0.2, cpu_s=30.0)

    assert cadence.every_s == pytest.approx((0.2 + 0.5 + 0.3) / (AIM * 0.01))
    # The next one slowed no step down.
    cadence.trained(10, 0.9, while_writing=True)
    cadence.cost(stalled_s=0.2, cpu_s=30.0)
    assert cadence.every_s == pytest.approx((1.0 + 0.2) / 2 / (AIM * 0.01))


def test_before_the_usual_step_is_known_the_cpu_time_of_writing_counts() -> None:
    cadence = Cadence(CheckpointConfig(max_overhead=0.01), now_s=Clock())

    for _ in range(MIN_CALLS - 1):
        cadence.trained(10, 1.0, while_writing=False)
    cadence.trained(10, 1.5, while_writing=True)
    cadence.cost(stalled_s=0.2, cpu_s=3.0)

    assert cadence.every_s == pytest.approx((0.2 + 3.0) / (AIM * 0.01))


def test_calls_that_begin_during_a_write_count_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, written = list[bool](), threading.Event()
    monkeypatch.setattr(Cadence, "trained", lambda *_, while_writing: counted.append(while_writing))
    monkeypatch.setattr(CheckpointWriter, "_write", lambda *_, **_facts: float(written.wait(60)))
    with writer(tmp_path) as writing:
        writing.trained(1, 0.1)
        writing.save(ARRAYS, {}, step=1)
        assert not writing.due(1)
        writing.trained(1, 0.1)
        written.set()
        writing.wait()
        writing.trained(1, 0.1)

    assert counted == [False, True, False]


def test_steps_go_before_the_clock() -> None:
    clock = Clock()
    cadence = Cadence(CheckpointConfig(every_steps=10), now_s=clock)
    clock.s += 1e6
    assert next(step for step in range(1, 25) if cadence.due(step)) == 10
    cadence.saved(12)
    assert not cadence.due(21)
    assert cadence.due(22)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from([None, 1.0, 2.0]),
)
def test_which_checkpoints_are_kept_does_not_depend_on_when_that_is_decided(
    gaps_h: list[int], keep_last: int, every_h: float | None
) -> None:
    # One by one, as a run does it, and at once over all that were ever written.
    all_of_them: list[CheckpointInfo] = []
    kept: list[CheckpointInfo] = []
    hours = 0
    for step, gap in enumerate(gaps_h):
        hours += gap
        newest = CheckpointInfo(name=str(step), step=step, elapsed_s=3600.0 * hours)
        gone = superseded(kept, newest, best="0", keep_last=keep_last, every_h=every_h)
        kept = [one for one in kept if one.name not in gone] + [newest]
        all_of_them.append(newest)
    gone = superseded(
        all_of_them[:-1], all_of_them[-1], best="0", keep_last=keep_last, every_h=every_h
    )

    assert kept == [one for one in all_of_them if one.name not in gone]
    assert kept[-1] == all_of_them[-1]
    assert len(kept) >= min(keep_last, len(all_of_them))
    assert kept[0].name == "0"


AT_H = (0.0, 0.4, 0.9, 1.2, 1.7, 2.0, 2.5, 5.9, 6.1, 6.2)
"""Hours after which a run's checkpoints are written."""


@pytest.mark.parametrize(
    ("every_h", "keep_last", "stay_h"),
    [
        (None, 1, [6.2]),
        (None, 2, [6.1, 6.2]),
        (1.0, 1, [1.2, 2.0, 5.9, 6.1, 6.2]),
        (1.0, 3, [1.2, 2.0, 5.9, 6.1, 6.2]),
        (1.0, 4, [1.2, 2.0, 2.5, 5.9, 6.1, 6.2]),
        (2.0, 1, [2.0, 5.9, 6.1, 6.2]),
        (0.5, 1, [0.9, 1.2, 1.7, 2.0, 2.5, 5.9, 6.1, 6.2]),
        (6.0, 1, [6.1, 6.2]),
        (24.0, 1, [6.2]),
    ],
)
def test_the_first_one_after_every_so_many_hours_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every_h: float | None,
    keep_last: int,
    stay_h: list[float],
) -> None:
    """As the rule says it of all at once, and as a run keeps them by and by."""
    all_of_them = [
        CheckpointInfo(name=str(hours), step=step, elapsed_s=3600 * hours)
        for step, hours in enumerate(AT_H, start=1)
    ]
    gone = superseded(
        all_of_them[:-1], all_of_them[-1], best=None, keep_last=keep_last, every_h=every_h
    )
    assert [hours for hours in AT_H if str(hours) not in gone] == stay_h

    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    with writer(tmp_path, keep_last=keep_last, keep_every_h=every_h) as writing:
        for step, hours in enumerate(AT_H, start=1):
            clock.s = 100.0 + 3600 * hours
            writing.save(ARRAYS, {}, step=step)
            writing.wait()

    assert names(tmp_path) == [f"step-{1 + AT_H.index(hours):010}" for hours in stay_h]


def test_hours_of_training_go_on_in_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    found = None
    for step in range(1, 8):
        # Each process trains for 40 minutes, whatever its clock says at its start.
        clock.s = 1e6 / step
        with writer(tmp_path, after=found, keep_last=1, keep_every_h=1.0) as writing:
            clock.s += 2400
            writing.save(ARRAYS, {}, step=step)
            writing.wait()
        found = newest_good(tmp_path)

    # After 40, 80, 120, 160, 200, 240 and 280 minutes.
    assert names(tmp_path) == [f"step-{step:010}" for step in (2, 3, 5, 6, 7)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"every_s": 0.0},
        {"every_steps": 0},
        {"keep_last": 0},
        {"keep_every_h": 0.0},
        {"max_overhead": 0.0},
    ],
)
def test_a_rule_that_cannot_hold_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"train.checkpoint.{next(iter(wrong))} must be"):
        CheckpointConfig(**wrong)  # type: ignore[arg-type]  # mypy cannot check **


def test_an_earlier_start_of_a_job_publishes_and_deletes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = tmp_path / "job", tmp_path / "checkpoints"
    job.mkdir()
    monkeypatch.setenv("STOKER_INCARNATION", f"{job}:{take_next(job)}")

    older = writer(folder, keep_last=1)
    older.save(ARRAYS, {}, step=1)
    older.wait()
    take_next(job)
    older.save(ARRAYS, {}, step=2)

    with pytest.raises(Superseded, match="start 2 has begun"):
        older.wait()

    assert names(folder) == ["step-0000000001"]
    older.__exit__(None, None, None)
    with pytest.raises(Superseded):
        writer(folder)  # it would remove what the later one is writing
