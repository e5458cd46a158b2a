"""The GPU is hidden from every test but those marked `gpu`, which are skipped without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.compiled import compiled

from stoker.cluster.devices import find_devices

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = ROOT / "tests" / "integration" / "cluster" / "nvml_stand_in.c"
SHOW = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


def test_a_test_and_its_subprocesses_see_no_gpu() -> None:
    child = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)

    assert child.stdout.strip() == "-1"
    assert find_devices().gpus == ()


@pytest.mark.gpu
def test_a_test_marked_gpu_sees_it() -> None:
    assert find_devices().gpus


@pytest.mark.parametrize(
    ("marks", "environment", "said"),
    [
        ([], {}, "1 passed, 1 skipped|the GPU is hidden from other tests"),
        (["-m", "gpu or alone"], {}, "1 skipped|the GPU is hidden from other tests"),
        (["-m", "gpu and not soak"], {}, "1 passed"),
        (["-m", "gpu"], {"NO_DRIVER": "1"}, "1 skipped|no NVIDIA driver shows a GPU here"),
    ],
    ids=["all", "some others", "alone", "no driver"],
)
def test_on_a_machine_with_a_gpu_only_tests_marked_gpu_see_it(
    marks: list[str], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    compiled(STAND_IN, tmp_path / "libnvidia-ml.so.1")
    outside = {name: os.environ[name] for name in os.environ if name != "CUDA_VISIBLE_DEVICES"}
    names = ["see_no_gpu", "marked_gpu_sees_it"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", " or ".join(names)]

    done = subprocess.run(
        [*command, *marks, __file__],
        cwd=ROOT,
        env=outside | {"LD_LIBRARY_PATH": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout
    for words in said.split("|"):
        assert words in done.stdout
    assert ("skipped" in done.stdout) == ("skipped" in said)
