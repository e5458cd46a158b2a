"""`stoker monitor exporter` as a process, on a compiled driver that a file controls."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.nvml import driver_folder, environment, samples, set_state

from stoker.cli.main import invoke
from stoker.core.errors import EXIT_CHECK, EXIT_DONE, EXIT_USER

ROOT = Path(__file__).parents[3]

UNWELL = '{gpu="1",uuid="GPU-b",mig=""}'


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return driver_folder(tmp_path_factory.mktemp("driver"))


@contextmanager
def exporter(driver: Path | None, folder: Path, *flags: str) -> Iterator[str]:
    """Its address; checks that it ends well."""
    command = [sys.executable, "-m", "stoker", "monitor", "exporter", "--port", "0", *flags]
    with subprocess.Popen(
        command,
        env=environment(driver, folder / "state"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            found = re.fullmatch(r"metrics: (http://127\.0\.0\.1:\d+)/metrics\n", first)
            assert found, process.communicate()[1]
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
    assert (process.returncode, "Traceback" in errors) == (EXIT_DONE, False), errors


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return str(answer.read().decode())


def until(address: str, text: str) -> dict[str, float]:
    end_s = time.monotonic() + 20
    while text not in (found := get(address)):
        assert time.monotonic() < end_s, found
        time.sleep(0.02)
    return samples(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the exporter of `address` works, with the driver's state."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "runs" / ".targets").mkdir(parents=True)
    set_state(folder / "state")
    return folder


@pytest.fixture(scope="module")
def address(driver: Path, folder: Path) -> Iterator[str]:
    """An exporter that samples ten times a second."""
    with exporter(driver, folder, "--interval", "0.1", "--server", "127.0.0.1:8501") as running:
        until(f"{running}/metrics", "stoker_gpu_sm_active_ratio")
        yield running


def test_gpus_the_machine_and_targets_are_served(address: str, folder: Path) -> None:
    runs = folder / "runs"
    run = [{"targets": ["127.0.0.1:4100"], "labels": {"run": 'a "run"\n'}}]
    (runs / ".targets" / "a.json").write_text(json.dumps(run))

    found = samples(get(f"{address}/metrics"))
    targets = json.loads(get(f"{address}/sd"))

    assert found[f"stoker_gpu_temperature_celsius{UNWELL}"] == 71
    disk = f'{{folder="{runs}"}}'
    assert 0 < found[f"stoker_host_disk_free_bytes{disk}"] <= found[f"stoker_host_disk_bytes{disk}"]
    available = found["stoker_host_memory_available_bytes{}"]
    assert 0 < available < found["stoker_host_memory_bytes{}"]
    assert found["stoker_host_cores{}"] >= 1
    assert found["stoker_host_load{}"] >= 0
    server = {
        "targets": ["127.0.0.1:8501"],
        "labels": {"__metrics_path__": "/monitoring/prometheus/metrics"},
    }
    assert targets == [*run, server]


def test_a_flood_of_scrapes_does_not_stop_the_samples(address: str) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    with contextlib.ExitStack() as clients:
        for _ in range(20):  # they ask and never read
            slow = clients.enter_context(socket.create_connection((host, int(port))))
            slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(get, [f"{address}/metrics"] * 200))
        assert all("stoker_exporter_last_sample_age_seconds" in text for text in found)
        # Samples went on: without a new one in ten intervals, this would be absent.
        time.sleep(1)
        until(f"{address}/metrics", "stoker_gpu_sm_active_ratio")


def test_a_lost_gpu_is_served_as_lost_and_the_other_goes_on(address: str, folder: Path) -> None:
    set_state(folder / "state", lost1=1)
    lost = until(f"{address}/metrics", 'stoker_gpu_lost{gpu="1",uuid="GPU-b"} 1')

    rest = [name for name in lost if "GPU-b" in name and "stoker_gpu_lost" not in name]
    assert all(name.startswith("stoker_gpu_xid") for name in rest)
    assert lost['stoker_gpu_temperature_celsius{gpu="0",uuid="GPU-a",mig=""}'] == 35


def test_the_benchmark_runs_and_compares_with_nvidia_smi(driver: Path, tmp_path: Path) -> None:
    """With the simulated driver its figures mean nothing, except that a wrong value is found."""
    shown = tmp_path / "nvidia-smi"
    # index, temperature, power, limit, memory: total, used, free, clocks: sm, memory, utilization
    well = "0, 35, 70.1, 350.00, 81920, 1024, 80384, 345, 345, 0"
    hot = "1, 99, 350.0, 350.00, 81920, 20480, 60928, 1200, 1200, 93"
    shown.write_text(f"#!/bin/sh\necho '{well}'\necho '{hot}'\n")
    shown.chmod(0o755)
    set_state(tmp_path / "state")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    script = ROOT / "benchmarks" / "monitor" / "gpu_exporter.py"
    done = subprocess.run(
        [sys.executable, str(script), "--seconds", "0.5", "--every", "0.1"],
        env=environment(driver, tmp_path / "state", PATH=path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    found = json.loads(done.stdout)
    assert done.returncode == EXIT_CHECK, done.stderr
    assert found["different_from_nvidia_smi"] == ["GPU 1 temperature.gpu: 71, nvidia-smi 99"]
    assert (found["gpus"], found["activity"]) == (2, [0.625, 0.625])
    assert 0 < found["cores_per_gpu"] < 0.5


def test_names_of_dcgm_and_no_host_are_exported_if_configured(driver: Path, tmp_path: Path) -> None:
    set_state(tmp_path / "state")
    with exporter(driver, tmp_path, "--dcgm-names", "--no-host-metrics") as running:
        found = until(f"{running}/metrics", "DCGM_FI_DEV_FB_USED")

    assert f'Hostname="{socket.gethostname()}"' in next(name for name in found if "DCGM" in name)
    assert not [name for name in found if name.startswith("stoker_host")]
    assert not [name for name in found if "stoker_gpu_memory" in name]


def test_a_port_that_is_taken_and_wrong_settings_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wrong = {
            ("--port", port): f"127.0.0.1:{port}",
            ("--server", "8501"): "--server must be HOST:PORT",
            ("--interval", "0"): "--interval must be at least 0.1 s",
            ("--interval", "nan"): "--interval must be at least 0.1 s",
        }
        for flags, said in wrong.items():
            assert invoke(["monitor", "exporter", *flags], debug=False) == EXIT_USER
            errors = capsys.readouterr().err
            assert said in errors
            assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert "stoker-gpus" not in [thread.name for thread in threading.enumerate()]
