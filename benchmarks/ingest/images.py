"""Ingest of 500x375 JPEGs by number of worker processes, and its bound: only the check.

python benchmarks/ingest/images.py [--rows 20000] [--workers 1 16] [--out FILE] [--repeats 3]

Each ingest is a separate process with as many cores as workers. The source is in the
page cache; the shards are written to the folder given by --folder and removed after each ingest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "images"))

from generate import Kind, generate

RESULTS = Path(__file__).resolve().parent.parent / "results" / "data-ingest-images.json"

DIFFERENT = 2000
"""Images that are made; further rows are links to them under other names, which is faster."""

TARGET_PER_S = {16: 4000}
"""Target rows per second, by number of cores."""

TARGET_SPEEDUP = {2: 1.8, 16: 10.0}
"""Of one core, by number of cores."""

TIMEOUT_S = 120
"""Longest time for one ingest."""

INGEST = """
import json, os, resource, sys, time
source, out, workers, begun_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), time.monotonic()
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:workers])
from pathlib import Path
from stoker.data.ingest import ImagesConfig, IngestConfig, ingest
imported_s = time.monotonic()
images = ImagesConfig(size=(224, 224), channels=3)
dataset = ingest(IngestConfig(source=source, images=images, workers=workers), Path(out))
own, workers_ = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({
    "rows": sum(dataset.rows(split) for split in dataset.splits),
    "fingerprint": dataset.fingerprint,
    "wall_s": time.monotonic() - imported_s,
    "import_s": imported_s - begun_s,
    "own_cpu_s": own.ru_utime + own.ru_stime,
    "workers_cpu_s": workers_.ru_utime + workers_.ru_stime,
    "peak_bytes": own.ru_maxrss * 1024,
    "worker_peak_bytes": workers_.ru_maxrss * 1024,
}))
"""

CHECK = """
import json, os, sys, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
from pathlib import Path
from stoker.data.sources.images.check import check_image
data = [path.read_bytes() for path in sorted(Path(sys.argv[1]).rglob("*.jpg"))[:500]]
best = float("inf")
for _ in range(5):
    begun_s = time.process_time()
    for each in data:
        check_image(each, max_pixels=50_000_000, channels=3)
    best = min(best, (time.process_time() - begun_s) / len(data))
print(json.dumps({"check_s": best}))
"""


def source_of(folder: Path, rows: int) -> Path:
    """A folder of classes with this many images."""
    kind = Kind(
        name="500x375", images=min(rows, DIFFERENT), height=375, width=500, quality=94, noise=10.5
    )
    photos = generate(folder, kind)
    files = sorted(photos.rglob("*.jpg"))
    linked = folder / f"linked-{rows}"
    for number in range(rows):
        original = files[number % len(files)]
        path = linked / original.parent.name / f"{number:07d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.hardlink_to(original)
    return linked


def run(script: str, *arguments: str) -> dict[str, Any]:
    """The result of a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(source: Path, folder: Path, *, workers: int, repeats: int) -> dict[str, Any]:
    """The median of several ingests, and their spread."""
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=folder) as out:
            found.append(run(INGEST, str(source), f"{out}/data", str(workers)))
    rates = [each["rows"] / each["wall_s"] for each in found]
    median = sorted(found, key=lambda each: each["wall_s"])[len(found) // 2]
    return median | {
        "workers": workers,
        "rows_per_s": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "cpu_ms": (median["own_cpu_s"] + median["workers_cpu_s"]) / median["rows"] * 1e3,
    }


def figures(results: Sequence[dict[str, Any]], check_s: float) -> list[dict[str, object]]:
    """The figures in docs/benchmarks.md."""
    one = next((each for each in results if each["workers"] == 1), None)
    found: list[dict[str, object]] = []
    for each in results:
        cores, rate = each["workers"], each["rows_per_s"]
        how = (
            f"{each['rows']:,} images of 95 KB, {cores} core(s); {each['least']:,.0f} to "
            f"{each['most']:,.0f}; CPU {each['cpu_ms']:.2f} ms an image, of which this process "
            f"{each['own_cpu_s'] / each['rows'] * 1e3:.2f}; the bound is the check alone, "
            f"{check_s * 1e3:.2f} ms: {cores / check_s:,.0f} rows/s; peak "
            f"{each['peak_bytes'] >> 20} MiB and {each['worker_peak_bytes'] >> 20} MiB a worker"
        )
        found.append(
            _figure(
                f"ingest of 500x375 JPEGs, {cores} core(s)",
                rate,
                "rows/s",
                TARGET_PER_S.get(cores),
                how,
            )
        )
        if one is not None and cores > 1:
            speedup = rate / one["rows_per_s"]
            found.append(
                _figure(
                    f"ingest of 500x375 JPEGs, {cores} cores against 1",
                    speedup,
                    "x",
                    TARGET_SPEEDUP.get(cores),
                    how,
                )
            )
    return found


def _figure(
    name: str, value: float, unit: str, target: float | None, how: str
) -> dict[str, object]:
    return {
        "name": name,
        "value": float(f"{value:.3g}"),
        "unit": unit,
        "target": target,
        "holds": None if target is None else value >= target,
        "peer": "",
        "how": how,
    }


def main() -> None:
    """Measure and write."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where source and shards go, several GB")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        source = source_of(folder, options.rows)
        results = [
            measured(source, folder, workers=workers, repeats=options.repeats)
            for workers in options.workers
        ]
        check_s = run(CHECK, str(source), "1")["check_s"]
    if len({each["fingerprint"] for each in results}) > 1:
        raise RuntimeError("another number of workers gave another dataset")
    found = figures(results, check_s)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for figure in found:
        sys.stdout.write(f"{figure['name']}: {figure['value']} {figure['unit']}; {figure['how']}\n")


if __name__ == "__main__":
    main()
