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

FOUR = {"nodes": 2}
"""Four workers on two machines."""

MANY_ENDS = int(os.environ.get("STOKER_TRAINING_ENDS", "20"))
SEED = int(os.environ.get("STOKER_ENDS_SEED", "29"))

EVERY_STEPS = 5
"""Interval of checkpoints."""

MOST_STEPS, EPOCHS, STEPS_OF_EPOCH = 20, 10, 50
"""Steps of a start before its end, at most: 20 ends leave some of all steps."""

STARTUP_S = 15.0
"""A fourth of the ends comes within so many seconds of a start, most of which is before the first step."""


@pytest.mark.multiworker
def test_a_training_of_four_workers_that_starts_again_ends_with_the_same_bits(
    counting: Counting, tmp_path: Path
) -> None:
    write_experiment(tmp_path / "pair")
    calm, disturbed = (
        Training(counting.cluster, tmp_path / "pair", tmp_path / name, workers=4, settings=FOUR)
        for name in ("calm", "disturbed")
    )
    calm.submit()
    state = calm.wait_for_end()
    assert (state.phase, state.restarts) == (Phase.DONE, 0), calm.log()

    disturbed.slow(True)
    disturbed.submit()
    disturbed.wait_for_step(9)
    counting.cluster.run("scontrol", "requeue", disturbed.scheduler_id())
    disturbed.slow(False)
    state = disturbed.wait_for_end()
    assert (state.phase, state.restarts) == (Phase.DONE, 1), disturbed.log()

    assert disturbed.weights() == calm.weights()
    assert disturbed.losses() == calm.losses()
    # Slurm waits for 3 s, on a busy machine too. It signals each process of a worker, and each of them its child:
    # one request to save.
    saved = disturbed.have_saved(1)
    for rank in range(4):
        assert disturbed.lost_steps(rank).keys() == {1}
        assert 0 <= disturbed.lost_steps(rank)[1] <= (0 if saved else 4)


@pytest.mark.soak
@pytest.mark.multiworker
@pytest.mark.timeout(600 + 180 * MANY_ENDS)
def test_a_training_that_is_ended_at_random_instants_ends_with_the_same_bits(
    counting: Counting, tmp_path: Path
) -> None:
    open_partitions(counting.cluster)
    rows = STEPS_OF_EPOCH * 2 * 16 * 5 // 4
    write_experiment(tmp_path / "pair", rows=rows, epochs=EPOCHS, every_steps=EVERY_STEPS)
    settings = {"partition": PARTITION, "nodes": 1, "grace_s": GRACE_S, "max_restarts": 1000}
    calm, disturbed = (
        Training(counting.cluster, tmp_path / "pair", tmp_path / name, settings=settings)
        for name in ("calm", "disturbed")
    )
    calm.submit()
    assert calm.wait_for_end().phase is Phase.DONE, calm.log()

    chance = random.Random(SEED)
    kinds = sorted(ENDS) + chance.choices(sorted(ENDS), k=max(0, MANY_ENDS - len(ENDS)))
    chance.shuffle(kinds)
    disturbed.slow(True)
    disturbed.submit()
    ended_by: dict[int, str] = {}
    for kind in kinds[:MANY_ENDS]:
        start = max(ended_by, default=0) + 1
        wait_for_moment(disturbed, start, chance)
        start = disturbed.starts()
        ended_by[start] = kind
        begun_s = time.monotonic()
        ENDS[kind](disturbed, chance)
        wait_for_start(disturbed, start + 1)
        print(f"start {start}: {kind}, started again after {time.monotonic() - begun_s:.0f} s")
    disturbed.slow(False)
    state = disturbed.wait_for_end()

    assert state.phase is Phase.DONE, (ended_by, disturbed.log())
    assert disturbed.weights() == calm.weights(), ended_by
    assert disturbed.losses() == calm.losses(), "each step was published once"
    for rank in range(2):
        require_little_lost(disturbed, rank, ended_by)
    wait_until(lambda: not worker_processes(disturbed), "end of all workers", 60.0)


def wait_for_moment(training: Training, start: int, chance: random.Random) -> None:
    """Wait until the moment at which a start is ended: of four one early, the others after some steps."""
    early_s, steps = chance.uniform(0.0, STARTUP_S), chance.randint(0, MOST_STEPS)
    wait_for_start(training, start)
    if chance.random() < 0.25:
        time.sleep(early_s)
        return

    def there() -> bool:
        return sum(each.start >= start for each in training.steps()) > steps

    wait_until(there, f"step {steps} of start {start}: {training.log()}", TRAINED_S)


def wait_for_start(training: Training, number: int) -> None:
    """Wait until the job has begun a start."""
    wait_until(lambda: training.starts() >= number, f"start {number}: {training.log()}", TRAINED_S)


def require_little_lost(training: Training, rank: int, ended_by: dict[int, str]) -> None:
    """No start repeats more than an interval of steps, and none that has saved repeats one."""
    for start, lost in training.lost_steps(rank).items():
        most = 0 if training.have_saved(start) else EVERY_STEPS
        assert 0 <= lost <= most, (rank, start, lost, ended_by)
        assert training.have_saved(start) or ended_by[start] not in PATIENT, (start, ended_by)
