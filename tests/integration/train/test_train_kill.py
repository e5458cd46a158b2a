"""A run that is killed, at any rename or at any time, ends with the bytes of one that was not.

`make soak` kills it 50 times. Each test is one run that is killed again and again, so that what one
kill leaves behind is there when the next one comes.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.integration.train.killed import (
    Trainer,
    newest,
    outcome,
    published,
    write_images,
    write_table,
)

KILLS = int(os.environ.get("STOKER_KILLS", "2"))
"""Random instants at which training is killed."""

KILL_XLA = 12
"""Each process that XLA compiles for dies at its n-th rename: early enough for two kills, and no more."""

KILL_STEP = int(os.environ.get("STOKER_KILL_STEP", "10"))
"""Every n-th rename is a place to be killed at."""

MIN_RENAMES = 20
"""Before fewer different renames it was not killed, or the test looks at nothing."""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_killed_before_its_renames_ends_as_one_that_never_was(
    trainer: Trainer, tmp_path: Path
) -> None:
    folder, calm, killed = tmp_path / "small", tmp_path / "calm", tmp_path / "killed"
    write_table(folder, tensorboard=False)
    settings = folder / "stoker.yaml"
    settings.write_text(settings.read_text().replace("epochs: 3", "epochs: 2"))
    assert trainer.run(folder, calm) == 0, trainer.said()
    assert trainer.run(folder, killed, verb="transform") == 0, trainer.said()

    kills, rename, before = 0, 1, published(killed)
    while (code := trainer.run(folder, killed, kill=rename)) != 0:
        assert code == -signal.SIGKILL, trainer.said()
        kills += 1
        # Each process does some renames more than the last one, or goes on from a newer checkpoint.
        after = published(killed)
        rename = rename + KILL_STEP if after == before else 1
        before = after

    assert kills >= MIN_RENAMES // KILL_STEP
    assert outcome(killed) == outcome(calm)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_killed_run_that_xla_compiles_ends_as_one_that_never_was(
    trainer: Trainer, tmp_path: Path
) -> None:
    folder, calm, killed = tmp_path / "small", tmp_path / "calm", tmp_path / "killed"
    write_table(folder, tensorboard=False)
    code = folder / "model.py"
    code.write_text(code.read_text().replace("Slow()(x)", "x"))
    assert trainer.run(folder, calm, "--set", "train.xla=true") == 0, trainer.said()
    assert newest(calm).facts["position"]["steps_per_program"] > 1, "steps were grouped"
    assert trainer.run(folder, killed, "--set", "train.xla=true", verb="transform") == 0

    kills = 0
    while (ended := trainer.run(folder, killed, "--set", "train.xla=true", kill=KILL_XLA)) != 0:
        assert ended == -signal.SIGKILL, trainer.said()
        kills += 1

    assert kills > 1
    assert outcome(killed) == outcome(calm)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900 + 120 * KILLS)
def test_a_run_killed_at_random_instants_ends_as_one_that_never_was(
    trainer: Trainer, tmp_path: Path
) -> None:
    folder, calm = tmp_path / "small", tmp_path / "calm"
    write_images(folder)
    assert trainer.run(folder, calm, verb="transform") == 0, trainer.said()
    begun_s = time.monotonic()
    assert trainer.run(folder, calm) == 0, trainer.said()
    took_s = time.monotonic() - begun_s

    expected, rng = outcome(calm), random.Random(0)
    kills = ended = 0
    while kills < KILLS or not ended:
        killed = tmp_path / f"killed-{ended}"
        code = _killed_after(trainer, folder, killed, rng.uniform(0, took_s), kill=kills < KILLS)
        kills += code == -signal.SIGKILL
        if code == 0:
            assert outcome(killed) == expected
            ended += 1
        else:
            assert code == -signal.SIGKILL, trainer.said()
    assert kills == KILLS


def _killed_after(trainer: Trainer, folder: Path, runs: Path, after_s: float, *, kill: bool) -> int:
    pid = trainer.start(folder, runs)
    timer = threading.Timer(after_s, os.kill, (pid, signal.SIGKILL))
    if kill:
        timer.start()
    try:
        return trainer.end()
    finally:
        timer.cancel()
