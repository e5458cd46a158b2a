"""What the driver says is read through NVML's own binding; a compiled stand-in plays the driver.

No GPU was there to see it on: what a real driver answers is checked by its published header only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.compiled import compiled

from stoker.app.cli.main import invoke
from stoker.core.errors import EXIT_CHECK, EXIT_DONE

STAND_IN = Path(__file__).with_name("nvml_stand_in.c")

READ = """\
import json
from dataclasses import asdict
from stoker.cluster.machine.gpus import best_groups, read_gpus
gpus = read_gpus()
print(json.dumps(asdict(gpus) | {"groups": best_groups(gpus)}))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    compiled(STAND_IN, folder / "libnvidia-ml.so.1")
    return folder


def read(driver: Path, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env=os.environ | {"LD_LIBRARY_PATH": str(driver)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_the_driver_says_of_its_gpus_is_told(driver: Path) -> None:
    found = read(driver)

    assert (found["driver"], found["cuda"], found["unread"]) == ("580.65.06", [13, 0], "")
    well, unwell = found["states"]
    assert (well["name"], well["uuid"], well["pci"]) == (
        "NVIDIA H100 80GB HBM3",
        "GPU-a",
        "00000000:01:00.0",
    )
    assert (well["memory_bytes"], well["used_bytes"]) == (80 << 30, 1 << 30)
    assert (well["ecc_uncorrected"], unwell["ecc_uncorrected"]) == (0, 1)
    assert (well["slowed_by"], unwell["slowed_by"]) == ([], ["power limit"])
    assert (unwell["power_w"], unwell["power_limit_w"]) == (350, 350)
    assert (unwell["clock_mhz"], unwell["clock_most_mhz"]) == (1200, 1980)
    assert (well["utilization"], unwell["utilization"]) == (0.0, 0.93)
    assert (unwell["pcie_width"], unwell["pcie_most_width"]) == (4, 16)
    assert (unwell["mig"], unwell["numa_node"]) == (None, None)
    assert well["processes"] == []
    (process,) = unwell["processes"]
    assert process["name"].startswith("python")
    assert process["memory_bytes"] == 20 << 30
    assert found["links"] == [{"gpus": [0, 1], "kind": "NVLink"}]
    assert found["groups"] == [[0, 1]]


def test_a_driver_that_is_not_loaded_is_said_and_nothing_fails(driver: Path) -> None:
    found = read(driver, NO_DRIVER="1")

    assert (found["driver"], found["states"]) == (None, [])
    assert found["unread"] == "Driver Not Loaded"


def test_doctor_exits_with_3_where_it_finds_an_error(driver: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "doctor", "--no-disk"],
        env=os.environ | {"LD_LIBRARY_PATH": str(driver)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == EXIT_CHECK, done.stderr
    assert "GPU 0-1     NVLink" in done.stdout
    assert "error: the driver has 2 GPUs and TensorFlow sees none" in done.stdout
    assert "error: GPU 1 (NVIDIA H100 80GB HBM3) has had 1 memory error" in done.stdout
    # Errors before warnings.
    assert done.stdout.rindex("error: ") < done.stdout.index("warning: ")


def test_doctor_tells_of_this_machine_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = invoke(["doctor", "--json", "--disk", str(tmp_path)], debug=False)

    told = json.loads(capsys.readouterr().out)
    errors = [finding for finding in told["findings"] if finding["severity"] == "error"]
    assert code == (EXIT_CHECK if errors else EXIT_DONE)
    assert told["framework"]["version"].startswith("2.")
    assert told["host"]["cores"] == len(os.sched_getaffinity(0))
    assert told["host"]["disk"]["write_bytes_per_s"] > 0
    assert {package["name"] for package in told["packages"]} >= {"nvidia-cudnn-cu12"}
    assert list(tmp_path.iterdir()) == []


def test_a_tensorflow_that_does_not_start_in_time_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = invoke(["doctor", "--no-disk", "--timeout-s", "0.05"], debug=False)

    assert code == EXIT_CHECK
    told = capsys.readouterr().out
    assert "error: TensorFlow does not start: it did not start within 0.05 s" in told
    assert "stoker doctor --timeout-s 600" in told
    assert "force-reinstall" not in told


def test_a_time_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["doctor", "--no-disk", "--timeout-s", "-1"], debug=False) == 2
    assert "--timeout-s" in capsys.readouterr().err
