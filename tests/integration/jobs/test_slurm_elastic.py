"""An elastic training on a real Slurm loses a machine and goes on with fewer workers, as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.integration.jobs.conftest import Counting
from tests.slurm_training import Training, write_experiment

from stoker.jobs.provider import Phase

AGREES = 1e-5
"""Most relative difference of the losses in float32, over the first 100 steps after a change."""

BEFORE, AFTER, EVERY_STEPS = 20, 100, 10

VIRTUAL, ROWS_OF_WORKER = 4, 16

PARTITION, LOST = "four", "n4"
"""A partition of all machines, and the one that is lost."""


@pytest.mark.soak
@pytest.mark.multiworker
@pytest.mark.timeout(3600)
def test_an_elastic_training_that_loses_a_machine_goes_on_with_two_of_four_workers(
    counting: Counting, tmp_path: Path
) -> None:
    cluster = counting.cluster
    cluster.run("scontrol", "create", f"PartitionName={PARTITION}", "Nodes=n[1-4]")
    write_elastic(tmp_path / "pair")
    calm, disturbed = (
        Training(
            cluster,
            tmp_path / "pair",
            tmp_path / name,
            workers=VIRTUAL,
            settings={"partition": PARTITION},
            step_s=0.5,
        )
        for name in ("calm", "disturbed")
    )
    calm.submit()
    assert calm.wait_for_end().phase is Phase.DONE, calm.log()
    assert workers_of(calm, start=1) == VIRTUAL

    disturbed.slow()
    disturbed.submit()
    try:
        disturbed.wait_for_step(BEFORE)
        cluster.daemons[f"slurmd-{LOST}"].send(signal.SIGKILL)
        disturbed.wait_for_step(EVERY_STEPS, start=2)
        disturbed.fast()
        state = disturbed.wait_for_end()
    finally:
        cluster.start_node(LOST)

    assert (state.phase, state.restarts) == (Phase.DONE, 1), disturbed.log()
    assert [workers_of(disturbed, start=start) for start in (1, 2)] == [VIRTUAL, 2]
    changed = disturbed_from(disturbed)
    lost = [disturbed.lost_steps(rank)[1] for rank in range(2)]
    assert max(lost) <= EVERY_STEPS, disturbed.log()
    unbroken, again = dict(calm.losses()), dict(disturbed.losses())
    assert list(again) == list(unbroken), "each step was published once"
    steps = range(changed, changed + AFTER)
    difference = max(abs(again[step] - unbroken[step]) / abs(unbroken[step]) for step in steps)
    print(
        f"went on at step {changed}; the losses of {AFTER} steps differ by at most {difference:.1e}"
    )
    assert difference <= AGREES
    assert all(again[step] == unbroken[step] for step in range(1, changed))


def write_elastic(folder: Path) -> None:
    """Write an experiment with Dropout and BatchNormalization, of 300 steps: Slurm notices a lost machine late."""
    epochs, steps = 10, 30
    rows = steps * VIRTUAL * ROWS_OF_WORKER * 5 // 4
    write_experiment(folder, rows=rows, epochs=epochs, every_steps=EVERY_STEPS)
    settings, model = folder / "stoker.yaml", folder / "model.py"
    elastic = f"  elastic: {{min: 2, max: {VIRTUAL}}}\n  intra_op_threads: 1\n"
    settings.write_text(settings.read_text().replace("train:\n", f"train:\n{elastic}"))
    text, dropped = model.read_text(), "    x = layers.Dropout(0.2)"
    assert dropped in text
    normed = f"    x = layers.BatchNormalization()(layers.Dense(8)(x / 50.0))\n{dropped}"
    model.write_text(
        text.replace(dropped, normed).replace("(x / 50.0))\n    model", "(x))\n    model")
    )


def workers_of(training: Training, *, start: int) -> int:
    """How many workers did steps in a start."""
    ranks = range(training.workers)
    return sum(any(each.start == start for each in training.steps(rank)) for rank in ranks)


def disturbed_from(training: Training) -> int:
    """The first step of the second start."""
    return min(each.number for each in training.steps() if each.start == 2)
