"""GPUs while something runs on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.cluster.devices import find_devices
from stoker.cluster.doctor.gpus import GpuState
from stoker.cluster.doctor.visible import summary_of, watched_gpus

GPU = GpuState(
    index=0,
    name="NVIDIA H100",
    uuid="GPU-a",
    compute_capability=(9, 0),
    memory_bytes=80 << 30,
    used_bytes=1 << 30,
    pci="00000000:01:00.0",
    utilization=0.2,
    power_w=100.0,
    clock_mhz=1000,
)


def test_what_was_seen_is_a_mean_and_memory_the_most() -> None:
    later = replace(GPU, utilization=0.6, power_w=300.0, clock_mhz=2000, used_bytes=5 << 30)
    second = replace(GPU, index=1, utilization=None, power_w=None, clock_mhz=None)

    one, two = summary_of([(GPU, second), (later, second)])

    assert one == {
        "index": 0,
        "name": "NVIDIA H100",
        "utilization": pytest.approx(0.4),
        "used_bytes": 5 << 30,
        "power_w": pytest.approx(200.0),
        "clock_mhz": 1500,
    }
    assert (two["index"], two["utilization"], two["power_w"], two["clock_mhz"]) == (1, 0, 0, 0)


def test_a_machine_is_watched_as_it_is() -> None:
    with watched_gpus() as seen:
        pass

    assert len(seen()) == len(find_devices().gpus)
