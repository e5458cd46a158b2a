"""Shared settings of all tests: no deadlines on a noisy machine, no GPU, and the external data."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.cpu_time import CpuTime
from tests.small_disk import mounted

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Tests compile the programs that they test; tests of the cache have their own cache folder.
os.environ["STOKER_CACHE"] = "off"

# What nohup, or a shell's `&`, has ignored would be ignored by the processes that tests start.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

settings.register_profile("stoker", deadline=None, print_blob=True)
settings.load_profile("stoker")

LONGEST = (
    "test_app_workers",
    "test_app_recipes",
    "test_app_caching",
    "test_train_one_program",
    "test_tune_commands",
    "test_tune_scripts",
    "test_data_service",
    "test_train_parameter_server",
    "test_train_strategies",
    "test_train_kill",
    "test_train_numbers",
    "test_train_keras_loop",
    "test_train_preempted",
    "test_app_commands",
    "test_app_own_dataset",
    "test_app_images",
)
"""Files that take longest, the longest first: one that begins last would leave the other cores idle."""

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


CPU_FOR_GPU = "STOKER_GPU_TESTS_ON_CPU"
"""Environment variable: run tests marked `gpu` without a GPU, where they use the CPU instead."""


def pytest_configure(config: pytest.Config) -> None:
    """Measure CPU time, and hide the GPU from all tests and subprocesses unless only `gpu` tests run.

    CUDA reads the variable when TensorFlow first looks for devices, so it is set before any test is
    imported. One process cannot show a GPU to some tests and hide it from others.
    """
    config.pluginmanager.register(CpuTime(config), "cpu-time")
    if not _runs_gpu_tests_alone(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        _hide_sklearn_from_subprocesses()


def _hide_sklearn_from_subprocesses() -> None:
    """Let subprocesses import Keras without scikit-learn, as in an installation without extras.

    Where it is installed, Keras imports it: 0.5 of the 2.2 CPU seconds that importing TensorFlow takes.
    """
    paths = [str(Path(__file__).with_name("without_sklearn")), os.environ.get("PYTHONPATH", "")]
    if paths[0] not in paths[1].split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _runs_gpu_tests_alone(config: pytest.Config) -> bool:
    """Whether `-m` selects tests marked `gpu` and no others: `gpu`, `gpu and not soak`."""
    words: list[str] = config.getoption("markexpr").split()
    return words[:1] == ["gpu"] and "or" not in words


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a GPU if there is none or if it is hidden."""
    if item.get_closest_marker("gpu") is None or os.environ.get(CPU_FOR_GPU) == "1":
        return
    if not _runs_gpu_tests_alone(item.config):
        pytest.skip("the GPU is hidden from other tests; those that need it run alone: -m gpu")
    from stoker.cluster.devices import find_devices

    if not find_devices().gpus:
        pytest.skip("no NVIDIA driver shows a GPU here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; the rest stays in its order."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Begin with what was imported out of the way."""
    _spare_what_stays()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None, item: pytest.Item) -> Iterator[None]:
    """Go on to another file with what this one has left out of the way."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _as_it_began()
        _spare_what_stays()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure as it happens: a run that is ended from outside never comes to its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        text = f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}"
        print(text, file=sys.__stderr__, flush=True)


def _as_it_began() -> None:
    """Take back what a test has set for its whole process.

    Which files share one differs from run to run, so what one left would be another's rare failure.
    """
    if "keras" in sys.modules:
        import keras

        keras.mixed_precision.set_dtype_policy("float32")
    if "tensorflow" in sys.modules:
        _determinism().disable_op_determinism()


def _determinism() -> Any:  # TensorFlow has no types here
    from tensorflow.python.framework import config

    return config


def _spare_what_stays() -> None:
    """Let no later collection of garbage look through what is there: a million objects of imports.

    TensorFlow and Keras ask for so many that it was a quarter of the time of some tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data next to the checkout, for tests that compare with it."""
    if not SHARED.is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{SHARED} must be there in CI")
        pytest.skip(f"{SHARED} is not there")
    return SHARED


@pytest.fixture(scope="session")
def sample_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of real data; if it is missing, a folder of simulated files like them."""
    if SHARED.is_dir():
        return SHARED
    from tests.simulated import WRITERS

    folder = tmp_path_factory.mktemp("sample-data")
    for name, write in WRITERS.items():
        write(folder / name)
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    with mounted(disk, size="1m") as why_not:
        if why_not:
            pytest.skip(why_not)
        yield disk


@pytest.fixture
def determinism() -> Iterator[Any]:
    """TensorFlow's deterministic operations, which hold for the whole process: none at its end."""
    switch = _determinism()
    yield switch
    switch.disable_op_determinism()
