"""Where a tuning writes: a folder of its own, within the experiment's runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from stoker.app.experiment import Experiment, load_experiment
from stoker.app.tuning.profiling import _in_time
from stoker.app.tuning.trials import TRIALS, locked_folder
from stoker.app.tuning.tuning import _keeps_lock, check
from stoker.cli.main import invoke
from stoker.cluster.devices import find_devices, hardware
from stoker.core.errors import BusyError, ConfigError, UserError
from stoker.tune.client import SCRATCH
from stoker.tune.lock import FILE, Lock, write_lock
from stoker.tune.process import TrialFailed


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "model.py").write_text("def build(f):\n    return 1\n")
    (tmp_path / "stoker.yaml").write_text(
        "name: t\ndata: {source: d.csv}\nmodel: model:build\nlabel: y\n"
    )
    return load_experiment(tmp_path)


def test_the_next_tuning_removes_the_scratch_folders_of_a_killed_one(
    experiment: Experiment,
) -> None:
    with locked_folder(experiment) as first:
        left = first / TRIALS / f"01{SCRATCH}"
        (left / "checkpoints").mkdir(parents=True)
        (first / TRIALS / "01.log").write_text("what it said\n")

        with (
            pytest.raises(BusyError, match="by only one process at a time"),
            locked_folder(experiment),
        ):
            pass
        assert left.exists(), "it was in use"

    with locked_folder(experiment) as second:
        assert second != first
        assert not left.exists()
        assert (first / TRIALS / "01.log").exists()


def test_a_folder_that_cannot_be_created_is_a_user_error(experiment: Experiment) -> None:
    (experiment.folder / experiment.runs).write_text("a file\n")

    with (
        pytest.raises(UserError, match="must be a folder that can be written"),
        locked_folder(experiment),
    ):
        pass


@pytest.mark.parametrize("after", [{}, {"busy_fraction": "x", "samples_per_s": 1.0}])
def test_a_lock_without_a_promise_cannot_be_checked(
    experiment: Experiment, after: dict[str, Any]
) -> None:
    here = hardware(find_devices())
    lock = Lock(settings={}, replaced={}, hardware=here, code={}, after=after)
    write_lock(experiment.folder / FILE, lock)

    with pytest.raises(ConfigError, match=r"after\.busy_fraction in .* must be a number"):
        check(experiment, progress=lambda _: None)


def test_a_promise_of_another_model_is_not_held_against_this_one(experiment: Experiment) -> None:
    here = hardware(find_devices())
    after = {"busy_fraction": 0.9, "samples_per_s": 1.0}
    code = {"model:another": "0" * 64}
    lock = Lock(settings={}, replaced={}, hardware=here, code=code, after=after)
    write_lock(experiment.folder / FILE, lock)

    with pytest.raises(
        ConfigError, match=r"was measured with: model:another. Received: model:build"
    ):
        check(experiment, progress=pytest.fail)


@pytest.mark.parametrize("kind", ["budget", "crash"])
def test_a_profile_is_valid_if_only_its_last_figure_ran_out_of_time(kind: str) -> None:
    def late() -> NoReturn:
        raise TrialFailed(kind, "no answer")  # type: ignore[arg-type]  # one of its words

    if kind == "budget":
        assert _in_time(late) is None
    else:
        with pytest.raises(TrialFailed):
            _in_time(late)


@pytest.mark.parametrize(
    ("finished", "settings", "there", "stays"),
    [
        (False, {}, True, True),
        (False, {}, False, False),
        (False, {"train.xla": True}, True, False),
        (True, {}, True, False),
    ],
)
def test_a_tuning_that_ended_early_and_kept_nothing_leaves_an_earlier_lock(
    tmp_path: Path, finished: bool, settings: dict[str, Any], there: bool, stays: bool
) -> None:
    lock = tmp_path / FILE
    if there:
        lock.write_text("what was kept")
    tuned: Any = SimpleNamespace(finished=finished, settings=settings)

    assert _keeps_lock(tuned, lock) is stays


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "1m", "--", "true"], "--budget is for an experiment"),
        (["--seconds", "3", "."], "--seconds is for a script"),
        (["--out", "x", "."], "--out is for a script"),
        (["--set", "a=1", "--", "true"], "Received: --set a=1."),
        (["mine", "--set", "a=1", "--", "true"], "Received: mine --set a=1."),
        (["--"], "Received: nothing after `--`."),
    ],
)
def test_an_option_of_the_other_kind_of_profile_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["profile", *arguments], debug=False) == 2
    assert said in capsys.readouterr().err
