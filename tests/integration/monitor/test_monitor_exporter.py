"""`stoker monitor exporter` as a process, on a compiled driver that a file controls."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.nvml import driver_folder, environment, samples, set_state

from stoker.core.errors import EXIT_DONE, EXIT_USER


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return driver_folder(tmp_path_factory.mktemp("driver"))


@contextmanager
def exporter(driver: Path | None, folder: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """Its address and process number; checks that it ends well."""
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
            yield found[1], process.pid
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


def test_gpus_the_machine_and_targets_are_served_through_a_gpu_that_is_lost(
    driver: Path, tmp_path: Path
) -> None:
    set_state(tmp_path / "state")
    targets = tmp_path / "runs" / ".targets"
    targets.mkdir(parents=True)
    run = [{"targets": ["127.0.0.1:4100"], "labels": {"run": 'a "run"\n'}}]
    (targets / "a.json").write_text(json.dumps(run))

    flags = ["--interval", "0.1", "--server", "127.0.0.1:8501"]
    with exporter(driver, tmp_path, *flags) as (address, _):
        well = until(f"{address}/metrics", "stoker_gpu_sm_active_ratio")
        set_state(tmp_path / "state", lost1=1)
        lost = until(f"{address}/metrics", 'stoker_gpu_lost{gpu="1",uuid="GPU-b"} 1')
        found = json.loads(get(f"{address}/sd"))

    assert well['stoker_gpu_temperature_celsius{gpu="1",uuid="GPU-b",mig=""}'] == 71
    assert not [
        name for name in lost if "GPU-b" in name and "lost" not in name and "xid" not in name
    ]
    disk = f'{{folder="{tmp_path / "runs"}"}}'
    assert 0 < well[f"stoker_host_disk_free_bytes{disk}"] <= well[f"stoker_host_disk_bytes{disk}"]
    available = well["stoker_host_memory_available_bytes{}"]
    assert 0 < available < well["stoker_host_memory_bytes{}"]
    assert well["stoker_host_cores{}"] >= 1
    assert well["stoker_host_load{}"] >= 0
    server = {
        "targets": ["127.0.0.1:8501"],
        "labels": {"__metrics_path__": "/monitoring/prometheus/metrics"},
    }
    assert found == [*run, server]


def test_names_of_dcgm_and_no_host_where_they_are_asked_for(driver: Path, tmp_path: Path) -> None:
    set_state(tmp_path / "state")
    with exporter(driver, tmp_path, "--dcgm-names", "--no-host-metrics") as (address, _):
        found = until(f"{address}/metrics", "DCGM_FI_DEV_FB_USED")

    assert f'Hostname="{socket.gethostname()}"' in next(name for name in found if "DCGM" in name)
    assert not [name for name in found if name.startswith("stoker_host")]
    assert not [name for name in found if "stoker_gpu_memory" in name]


def test_a_port_that_is_taken_and_wrong_settings_are_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wrong = {
            ("--port", port): f"127.0.0.1:{port}",
            ("--server", "8501"): "--server must be HOST:PORT",
            ("--interval", "0"): "--interval must be at least 0.1 s",
            ("--interval", "nan"): "--interval must be at least 0.1 s",
        }
        for flags, said in wrong.items():
            done = subprocess.run(
                [sys.executable, "-m", "stoker", "monitor", "exporter", *flags],
                env=environment(None, tmp_path / "state"),
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == EXIT_USER, done.stderr
            assert said in done.stderr
            assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
