"""Where a tuning writes: a folder of its own, within the experiment's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.app.bench import SCRATCH
from stoker.app.checking import check
from stoker.app.experiment import Experiment, load_experiment
from stoker.app.tuning import TRIALS, alone
from stoker.cluster.devices import find_devices, hardware
from stoker.core.errors import BusyError, ConfigError, UserError
from stoker.tune.lock import FILE, Lock, write_lock


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "model.py").write_text("def build(f):\n    return 1\n")
    (tmp_path / "stoker.yaml").write_text(
        "name: t\ndata: {source: d.csv}\nmodel: model:build\nlabel: y\n"
    )
    return load_experiment(tmp_path)


def test_what_a_killed_tuning_has_left_is_removed_by_the_next(experiment: Experiment) -> None:
    with alone(experiment) as first:
        left = first / TRIALS / f"01{SCRATCH}"
        (left / "checkpoints").mkdir(parents=True)
        (first / TRIALS / "01.log").write_text("what it said\n")

        with pytest.raises(BusyError, match="by one process at a time"), alone(experiment):
            pass
        assert left.exists(), "it was in use"

    with alone(experiment) as second:
        assert second != first
        assert not left.exists()
        assert (first / TRIALS / "01.log").exists()


def test_a_folder_that_cannot_be_one_is_the_users_to_mend(experiment: Experiment) -> None:
    (experiment.folder / experiment.runs).write_text("a file\n")

    with pytest.raises(UserError, match="must be a folder that can be written"), alone(experiment):
        pass


@pytest.mark.parametrize("after", [{}, {"busy_fraction": "x", "samples_per_s": 1.0}])
def test_a_lock_without_a_promise_cannot_be_checked(
    experiment: Experiment, after: dict[str, Any]
) -> None:
    here = hardware(find_devices())
    lock = Lock(settings={}, replaced={}, hardware=here, code={}, after=after)
    write_lock(experiment.folder / FILE, lock)

    with pytest.raises(ConfigError, match=r"must promise after\.busy_fraction, a number"):
        check(experiment, tell=lambda _: None)
