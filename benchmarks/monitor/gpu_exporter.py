"""CPU time of sampling each GPU once a second, and the sampled values next to nvidia-smi's; JSON on stdout.

python benchmarks/monitor/gpu_exporter.py [--seconds 60] [--if-there]

Exit code 3: a target is missed, a value differs, or the machine has no GPU; with --if-there the last is one line and not a failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from stoker.telemetry.exposition import text_of
from stoker.telemetry.gpu.readings import GpuReading
from stoker.telemetry.gpu.sampler import GpuSampler

TARGET = 0.005
"""Most cores for each GPU: 0.5 % of one."""

NO_GPU = "no driver or no GPU answers"

_MIB = 1 << 20
_SCRAPES = 20

Field = tuple[Callable[[GpuReading], float | None], float, float]
"""Our value in nvidia-smi's unit; how far the two may differ: absolute, and as a share of nvidia-smi's."""

FIELDS: dict[str, Field] = {
    "temperature.gpu": (lambda reading: reading.temperature_c, 2, 0),
    "power.draw": (lambda reading: reading.power_w, 10, 0.15),
    "enforced.power.limit": (lambda reading: reading.slow.power_limit_w, 1, 0),
    "memory.total": (lambda reading: reading.memory and reading.memory.total_bytes / _MIB, 1, 0),
    "memory.used": (lambda reading: reading.memory and reading.memory.used_bytes / _MIB, 64, 0),
    "memory.free": (lambda reading: reading.memory and reading.memory.free_bytes / _MIB, 64, 0),
    "clocks.sm": (lambda reading: reading.sm_clock_mhz, 30, 0.05),
    "clocks.mem": (lambda reading: reading.memory_clock_mhz, 30, 0.05),
    "utilization.gpu": (lambda reading: _percent(reading.kernel_ran), 20, 0),
}


def main() -> int:
    """Measure; 0, or 3 if a target is missed or a value differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure, seconds")
    parser.add_argument("--every", type=float, default=1.0, help="between two samples, seconds")
    parser.add_argument(
        "--if-there", action="store_true", help="skip with a reason on a machine without a GPU"
    )
    settings = parser.parse_args()
    with GpuSampler(every_s=settings.every) as sampler:
        sampler.wait(30)
        time.sleep(settings.every)  # GPM needs two samples
        if not sampler.readings():
            if settings.if_there:
                sys.stderr.write(f"bench-monitor: GPUs are left out: {NO_GPU}\n")
                return 0
            print(json.dumps({"gpus": 0, "why": NO_GPU}))
            return 3
        found = _cost(sampler, settings.seconds)
        found |= _scrape(sampler)
        found["different_from_nvidia_smi"] = differences = _differences(sampler)
        found["activity"] = [
            None if reading.activity is None else reading.activity.sm
            for reading in sampler.readings()
        ]
    print(json.dumps(found, indent=1))
    missed = found["cores_per_gpu"] > TARGET or bool(differences)
    return 3 if missed else 0


def _cost(sampler: GpuSampler, seconds: float) -> dict[str, Any]:
    """The main thread sleeps: all CPU time of the process is that of the samples."""
    gpus = len({reading.identity.index for reading in sampler.readings()})
    began_s, cpu_s = time.monotonic(), time.process_time()
    time.sleep(seconds)  # the sampler's thread works meanwhile
    cores = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
    return {"gpus": gpus, "cores_per_gpu": cores / gpus, "target": TARGET}


def _scrape(sampler: GpuSampler) -> dict[str, Any]:
    began_s = time.process_time()
    for _ in range(_SCRAPES):
        text = text_of(sampler.families())
    return {
        "cpu_s_per_scrape": (time.process_time() - began_s) / _SCRAPES,
        "bytes": len(text.encode()),
    }


def _differences(sampler: GpuSampler) -> list[str] | None:
    """What nvidia-smi says otherwise; None without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = ["--query-gpu=index," + ",".join(FIELDS), "--format=csv,noheader,nounits"]
    shown = subprocess.run([program, *query], capture_output=True, text=True, check=True).stdout
    whole = {each.identity.index: each for each in sampler.readings() if not each.identity.mig}
    found = []
    for line in shown.splitlines():
        index, *values = (value.strip() for value in line.split(","))
        for name, value in zip(FIELDS, values, strict=True):
            ours, absolute, share = FIELDS[name][0](whole[int(index)]), *FIELDS[name][1:]
            theirs = _number(value)
            if not _equal(ours, theirs, absolute + share * (theirs or 0)):
                found.append(f"GPU {index} {name}: {ours}, nvidia-smi {value}")
    return found


def _equal(ours: float | None, theirs: float | None, most: float) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return abs(ours - theirs) <= most


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # [N/A]


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


if __name__ == "__main__":
    sys.exit(main())
