"""The driver is read through NVML's own binding; a compiled library replaces the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.compiled import compiled

from stoker.cli.main import invoke
from stoker.core.errors import EXIT_CHECK, EXIT_DONE, EXIT_USER

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]

SET_OUTSIDE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA", "MAKEFLAGS", "MAKELEVEL")
"""Variables of conftest.py, of the user and of `make test` that no command here may see."""

READ = """\
import json
from dataclasses import asdict
from stoker.cluster.doctor.gpus import best_groups, read_gpus
gpus = read_gpus()
print(json.dumps(asdict(gpus) | {"groups": best_groups(gpus)}))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1, and a libcuda.so.1 without a device."""
    folder = tmp_path_factory.mktemp("driver")
    compiled(FOLDER / "nvml_stand_in.c", folder / "libnvidia-ml.so.1")
    compiled(FOLDER / "cuda_stand_in.c", folder / "libcuda.so.1")
    return folder


def run(driver: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command on a machine with this driver, where no GPU is hidden unless `environment` does it."""
    kept = {name: value for name, value in os.environ.items() if name not in SET_OUTSIDE}
    return subprocess.run(
        [sys.executable, *command],
        env=kept | {"LD_LIBRARY_PATH": str(driver)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def read(driver: Path, script: str = READ, **environment: str) -> Any:
    done = run(driver, "-c", script, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_the_driver_says_of_its_gpus_is_reported(driver: Path) -> None:
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


def test_a_driver_that_is_not_loaded_is_reported_and_nothing_fails(driver: Path) -> None:
    found = read(driver, NO_DRIVER="1")

    assert (found["driver"], found["states"]) == (None, [])
    assert found["unread"] == "Driver Not Loaded"


def test_doctor_exits_with_3_where_it_finds_an_error(driver: Path) -> None:
    done = run(driver, "-m", "stoker", "doctor", "--no-disk")

    assert done.returncode == EXIT_CHECK, done.stderr
    assert "GPU 0-1     NVLink" in done.stdout
    assert "error: the driver has 2 GPUs and TensorFlow sees none" in done.stdout
    assert "error: GPU 1 (NVIDIA H100 80GB HBM3) has had 1 memory error" in done.stdout
    # Errors before warnings.
    assert done.stdout.rindex("error: ") < done.stdout.index("warning: ")


DOCTOR = """\
import json, os
from dataclasses import replace
from stoker.cluster.doctor.examine import Machine, examine
from stoker.cluster.doctor.framework import cuda_packages, probe_framework
from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.host import read_host
from pathlib import Path
found = {}
framework = probe_framework(timeout_s=300)
# TensorFlow sees no device of this driver; on the real one it sees both.
framework = replace(framework, gpus=("/physical_device:GPU:0", "/physical_device:GPU:1"))
host = read_host(Path(), measure_disk=False)
os.environ["GPU_WELL"] = "1"
for name, capability in (("NVIDIA H100", "9.0"), ("NVIDIA H200", "9.0"), ("NVIDIA L4", "8.9"),
                         ("NVIDIA RTX PRO 6000", "12.0"), ("Tesla M60", "5.2")):
    os.environ |= {"GPU_NAME": name, "GPU_CAPABILITY": capability}
    machine = Machine(host=host, gpus=read_gpus(), framework=framework, packages=())
    found[name] = [(finding.kind, finding.message, finding.fix) for finding in examine(machine)
                   if finding.message.find("GPU") >= 0]
print(json.dumps(found))
"""


def test_doctor_is_silent_about_healthy_cards_that_the_installed_tensorflow_has_code_for(
    driver: Path,
) -> None:
    found = read(driver, DOCTOR)

    assert (found["NVIDIA H100"], found["NVIDIA H200"], found["NVIDIA L4"]) == ([], [], [])
    assert [kind for kind, _, _ in found["NVIDIA RTX PRO 6000"]] == ["gpu_new", "gpu_new"]
    _, message, fix = found["NVIDIA RTX PRO 6000"][1]
    assert "no machine code for GPU 1 (NVIDIA RTX PRO 6000, compute capability 12.0)" in message
    assert "CUDA_CACHE_MAXSIZE=4294967296 CUDA_CACHE_PATH=" in fix
    assert [kind for kind, _, _ in found["Tesla M60"]] == ["gpu_code", "gpu_code"]


DEVICES = """\
import json
from stoker.cluster.devices import find_devices
print(json.dumps([(gpu.name, gpu.memory_bytes >> 30) for gpu in find_devices().gpus]))
"""


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, [["NVIDIA H100 80GB HBM3", 80]] * 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [["NVIDIA H100 80GB HBM3", 80]]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        (
            {"CUDA_VISIBLE_DEVICES": "MIG-a2", "GPU_MIG": "1"},
            [["NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40]],
        ),
    ],
    ids=["all", "one", "none", "MIG slice"],
)
def test_only_visible_gpus_count_as_devices(
    driver: Path, environment: dict[str, str], devices: list[list[object]]
) -> None:
    assert read(driver, DEVICES, **environment) == devices


SHOW = """\
import os, subprocess, sys
print([os.environ.get(name) for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")], flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""


@pytest.mark.parametrize(
    ("chosen", "shown"),
    [
        ("1", "['PCI_BUS_ID', '1']"),
        ("GPU-b,0", "['PCI_BUS_ID', 'GPU-b,GPU-a']"),
        ("none", "[None, '-1']"),
    ],
)
def test_gpus_are_chosen_for_a_command_and_the_processes_that_it_starts(
    driver: Path, tmp_path: Path, chosen: str, shown: str
) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    out = ["--out", str(tmp_path / "out")]

    # The flag overrides what was set before.
    done = run(
        driver, "-m", "stoker", "profile", "--gpus", chosen, *out, "--", sys.executable, str(script),
        CUDA_VISIBLE_DEVICES="0",
    )  # fmt: skip

    assert (done.stdout + done.stderr).count(shown) == 2, done.stderr


@pytest.mark.parametrize(
    ("verb", "chosen", "said"),
    [
        ("run", "2", "--gpus must name GPUs of this machine. Received: '2'. Available: 0 (GPU-a,"),
        ("train", "1,1", "--gpus must name each GPU once. Received: '1,1'."),
        ("evaluate", "x", "--gpus must list GPU indices or UUIDs"),
        ("tune", "GPU-c", "--gpus must name GPUs of this machine. Received: 'GPU-c'."),
        (
            "serve",
            "0",
            "GPU 0 is divided into MIG slices, which are chosen by UUID. Received: '0'.",
        ),
        ("profile", "MIG-a", "Received: 'MIG-a', which 2 GPUs match."),
    ],
)
def test_a_wrong_gpu_ends_a_verb_with_one_line(
    driver: Path, verb: str, chosen: str, said: str
) -> None:
    done = run(driver, "-m", "stoker", verb, "--gpus", chosen, GPU_MIG="1")

    assert done.returncode == EXIT_USER
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


DETECT = ROOT / ".ci" / "nvidia_driver.py"


def test_setup_finds_a_driver_that_shows_a_gpu(driver: Path) -> None:
    def finds(**environment: str) -> bool:
        return run(driver, str(DETECT), **environment).returncode == 0

    assert finds()
    assert finds(CUDA_VISIBLE_DEVICES="-1")  # hidden from tests, and yet there
    assert not finds(NO_DRIVER="1")
    assert finds(NO_DRIVER="1", CUDA_DEVICE="1")  # a container without NVML


@pytest.mark.parametrize(
    ("arguments", "environment", "locks", "stamp"),
    [
        ([], {}, 2, "auto cuda"),
        ([], {"NO_DRIVER": "1"}, 1, "auto cpu"),
        ([], {"CUDA": "/usr/local/cuda"}, 2, "auto cuda"),  # a variable of another program
        (["CUDA=0"], {}, 1, "0 cpu"),
        (["CUDA=1"], {"NO_DRIVER": "1"}, 2, "1 cuda"),
    ],
)
def test_make_setup_installs_cuda_if_the_machine_has_a_gpu_or_as_requested(
    driver: Path, arguments: list[str], environment: dict[str, str], locks: int, stamp: str
) -> None:
    make = [f"PYTHON={sys.executable}", "VENV=no-such-venv", *arguments]

    planned = run(driver, "-c", MAKE, *make, **environment)

    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.count("--require-hashes --compile-bytecode requirements.lock") == 1
    assert planned.stdout.count("requirements-cuda.lock\n") == locks - 1
    assert f'echo "{stamp}" > no-such-venv/.stamp' in planned.stdout


MAKE = f"""\
import os, sys
os.execvp("make", ["make", "--dry-run", "--directory", {str(ROOT)!r}, "setup", *sys.argv[1:]])
"""


def test_make_setup_keeps_the_choice_and_syncs_again_where_it_changes(
    driver: Path, tmp_path: Path
) -> None:
    def planned(stamp: str, *arguments: str, **environment: str) -> list[str]:
        """What make would install for a stamp that is newer than all that it is made from."""
        venv = tmp_path / "venv"
        venv.mkdir(exist_ok=True)
        (venv / ".stamp").write_text(f"{stamp}\n")
        make = [f"PYTHON={sys.executable}", f"VENV={venv}", f"UV={sys.executable}", "OTHER="]
        done = run(driver, "-c", MAKE, *make, *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return [
            line
            for line in done.stdout.splitlines()
            if line.startswith("echo") and ".stamp" in line
        ]

    settled = ["auto cuda", "auto cpu", "0 cpu", "1 cuda"]
    for stamp in settled:
        assert planned(stamp, NO_DRIVER="1") == []
    assert planned("auto cuda") == planned("0 cpu") == planned("1 cuda") == []
    assert planned("auto cuda", NO_DRIVER="1", CUDA="/usr/local/cuda") == []  # does not choose
    assert "auto cuda" in planned("auto cpu")[0]  # a driver has come
    assert "0 cpu" in planned("auto cuda", "CUDA=0")[0]
    assert "1 cuda" in planned("0 cpu", "CUDA=1")[0]
    assert "auto cpu" in planned("1 cuda", "CUDA=auto", NO_DRIVER="1")[0]
    assert planned("0 cpu", "CUDA=0") == planned("1 cuda", "CUDA=1") == []


def test_make_asks_the_driver_only_where_something_is_installed(
    driver: Path, tmp_path: Path
) -> None:
    python, log = tmp_path / "a folder" / "python", tmp_path / "log"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho \"$@\" >> '{log}'\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)

    def dry_run(*goals: str) -> tuple[bool, str]:
        log.write_text("")
        make = ["make", "--dry-run", "--directory", str(ROOT), *goals]
        make += [f"PYTHON={python}", "VENV=no-such-venv"]
        done = run(driver, "-c", "import os, sys; os.execvp('make', sys.argv[1:])", *make)
        assert done.returncode == 0, done.stderr
        return "nvidia_driver.py" in log.read_text(), done.stdout

    assert not dry_run()[0]
    assert not dry_run("help")[0]
    assert not dry_run("clean")[0]
    for goals in (["setup"], ["clean", "setup"]):
        queries, planned = dry_run(*goals)
        assert queries
        assert 'echo "auto cuda" > no-such-venv/.stamp' in planned


def test_make_refuses_a_choice_that_there_is_not(driver: Path) -> None:
    done = run(driver, "-c", MAKE, "CUDA=yes")

    assert done.returncode != 0
    assert "CUDA must be 0, 1 or auto. Received: yes" in done.stderr


def test_doctor_tells_of_this_machine_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = invoke(["doctor", "--json", "--disk", str(tmp_path)], debug=False)

    facts = json.loads(capsys.readouterr().out)
    errors = [finding for finding in facts["findings"] if finding["severity"] == "error"]
    assert code == (EXIT_CHECK if errors else EXIT_DONE)
    assert facts["framework"]["version"].startswith("2.")
    assert facts["host"]["cores"] == len(os.sched_getaffinity(0))
    assert facts["host"]["disk"]["write_bytes_per_s"] > 0
    assert {package["name"] for package in facts["packages"]} >= {"nvidia-cudnn-cu12"}
    assert list(tmp_path.iterdir()) == []


def test_a_tensorflow_that_does_not_start_in_time_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = invoke(["doctor", "--no-disk", "--timeout-s", "0.05"], debug=False)

    assert code == EXIT_CHECK
    output = capsys.readouterr().out
    assert "error: TensorFlow does not start: it did not start within 0.05 s" in output
    assert "stoker doctor --timeout-s 600" in output
    assert "force-reinstall" not in output


def test_a_time_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["doctor", "--no-disk", "--timeout-s", "-1"], debug=False) == 2
    assert "--timeout-s" in capsys.readouterr().err
