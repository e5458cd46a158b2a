"""Real trainings through `stoker submit` on a real Slurm end with the same bits, however often they are ended in between."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.integration.jobs.conftest import Counting
from tests.slurm_cluster import wait_until
from tests.slurm_ends import ENDS, GRACE_S, PARTITION, PATIENT, open_partitions, worker_processes
from tests.slurm_training import TRAINED_S, Training, write_experiment

from stoker.jobs.provider import Phase

LAST_STEP = 20

MANY_ENDS = int(os.environ.get("STOKER_TRAINING_ENDS", "20"))
SEED = int(os.environ.get("STOKER_ENDS_SEED", "29"))

EVERY_STEPS = 5
"""Interval of checkpoints."""

MAX_STEPS, STEP_S, EPOCHS, STEPS_OF_EPOCH = 12, 0.6, 20, 50
"""Steps of a start before its end, at most. 20 ends leave some of all steps: the workers of a lost machine go on for the
30 s that Slurm takes to see the loss and to start again."""

STARTUP_S = 15.0
"""A fourth of the ends comes within so many seconds of a start, most of which is before the first step."""


@pytest.mark.multiworker
def test_a_training_of_four_workers_goes_on_with_the_same_bits_after_a_requeue(
    counting: Counting, tmp_path: Path
) -> None:
    """Its first start does all steps, and is ended before it saves the last ones: it is the unbroken run."""
    write_experiment(tmp_path / "pair", epochs=4, every_steps=8)  # of five steps
    training = Training(
        counting.cluster, tmp_path / "pair", tmp_path / "home", workers=4, settings={"nodes": 2}
    )
    training.hold_at(LAST_STEP)
    training.submit()
    training.wait_for_step(LAST_STEP)
    counting.cluster.run("scontrol", "requeue", training.scheduler_id())
    training.fast()
    state = training.wait_for_end()

    assert (state.phase, state.restarts) == (Phase.DONE, 1), training.log()
    for rank in range(4):
        unbroken, again = (
            {each.number: each.weights for each in training.steps(rank) if each.start == start}
            for start in (1, 2)
        )
        assert list(unbroken) == list(range(1, LAST_STEP + 1))
        assert 1 < min(again) <= LAST_STEP < min(again) + 8, "at most an interval is done twice"
        assert again == {number: unbroken[number] for number in again}
    assert len(set(unbroken.values())) == LAST_STEP
    assert training.steps(0)[-1].weights == training.steps(3)[-1].weights
    assert [step for step, _ in training.losses()] == list(range(1, LAST_STEP + 1))


@pytest.mark.soak
@pytest.mark.multiworker
@pytest.mark.timeout(600 + 180 * MANY_ENDS)
@pytest.mark.parametrize(("workers", "ends"), [(2, MANY_ENDS), (4, min(MANY_ENDS, len(ENDS)))])
def test_a_training_that_is_ended_at_random_instants_ends_with_the_same_bits(
    counting: Counting, tmp_path: Path, workers: int, ends: int
) -> None:
    open_partitions(counting.cluster)
    rows = STEPS_OF_EPOCH * workers * 16 * 5 // 4
    write_experiment(tmp_path / "pair", rows=rows, epochs=EPOCHS, every_steps=EVERY_STEPS)
    settings = {"partition": PARTITION, "nodes": workers // 2, "grace_s": GRACE_S}
    calm, disturbed = (
        Training(
            counting.cluster,
            tmp_path / "pair",
            tmp_path / name,
            workers=workers,
            settings=settings | {"max_restarts": 1000},
            step_s=STEP_S,
        )
        for name in ("calm", "disturbed")
    )
    calm.submit()
    assert calm.wait_for_end().phase is Phase.DONE, calm.log()

    chance = random.Random(SEED)
    kinds = sorted(ENDS) + chance.choices(sorted(ENDS), k=max(0, ends - len(ENDS)))
    chance.shuffle(kinds)
    disturbed.slow()
    disturbed.submit()
    ended_by: dict[int, str] = {}
    for kind in kinds[:ends]:
        start = max(ended_by, default=0) + 1
        wait_for_moment(disturbed, start, chance)
        start = disturbed.starts()
        ended_by[start] = kind
        begun_s = time.monotonic()
        ENDS[kind](disturbed, chance)
        disturbed.wait_for_start(start + 1)
        print(f"start {start}: {kind}, started again after {time.monotonic() - begun_s:.0f} s")
    disturbed.fast()
    state = disturbed.wait_for_end()

    assert state.phase is Phase.DONE, (ended_by, disturbed.log())
    assert disturbed.weights() == calm.weights(), ended_by
    assert disturbed.losses() == calm.losses(), "each step was published once"
    for rank in range(workers):
        require_little_lost(disturbed, rank, ended_by)
    wait_until(lambda: not worker_processes(disturbed), "end of all workers", 60.0)


def wait_for_moment(training: Training, start: int, chance: random.Random) -> None:
    """Wait until the moment at which a start is ended: of four one early, the others after some steps."""
    early_s, steps = chance.uniform(0.0, STARTUP_S), chance.randint(0, MAX_STEPS)
    training.wait_for_start(start)
    if chance.random() < 0.25:
        time.sleep(early_s)
        return

    def there() -> bool:
        return sum(each.start >= start for each in training.steps()) > steps

    wait_until(there, lambda: f"step {steps} of start {start}: {training.log()}", TRAINED_S)


def require_little_lost(training: Training, rank: int, ended_by: dict[int, str]) -> None:
    """No start repeats more than an interval of steps, and none that has saved repeats one."""
    for start, lost in training.lost_steps(rank).items():
        most = 0 if training.have_saved(start) else EVERY_STEPS
        assert lost <= most, (rank, start, lost, ended_by, training.steps(rank))
        assert training.have_saved(start) or ended_by[start] not in PATIENT, (start, ended_by)
