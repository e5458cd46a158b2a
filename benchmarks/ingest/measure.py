"""Ingest of many small rows: memory and CPU time; writes benchmarks/results/data-ingest.json.

python benchmarks/ingest/measure.py [--rows 1000000 10000000]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results" / "data-ingest.json"

MAX_BYTES = 1 << 30
"""What the issue allows, however many rows there are."""

INGEST = """
import json, os, resource, sys, time
from pathlib import Path
from stoker.data.ingest import IngestConfig, ingest
begun_s = time.monotonic()
dataset = ingest(IngestConfig(source=sys.argv[1]), Path(sys.argv[2]))
wall_s = time.monotonic() - begun_s
print(json.dumps({
    "rows": sum(dataset.rows(split) for split in dataset.splits),
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "cpu_s": time.process_time(),
    "wall_s": wall_s,
}))
"""


def write_rows(path: Path, rows: int) -> None:
    """A CSV file of four columns: two whole numbers, a fraction, a text that comes again."""
    with path.open("w") as stream:
        stream.write("id,kind,ratio,name\n")
        for start in range(0, rows, 10_000):
            stream.writelines(
                f"{n},{n % 97},{n / 7:.4f},text {n % 1013}\n"
                for n in range(start, min(start + 10_000, rows))
            )


def measured(rows: int) -> dict[str, float]:
    """One ingest in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.csv"
        write_rows(source, rows)
        command = [sys.executable, "-c", INGEST, str(source), str(Path(folder) / "out")]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    if found["rows"] != rows:
        raise RuntimeError(f"{rows} rows went in, {found['rows']} came out")
    return found


def figures(rows: int) -> list[dict[str, object]]:
    """What docs/benchmarks.md shows of one size."""
    found = measured(rows)
    peak = found["peak_bytes"] / 2**20
    how = "a CSV of 4 columns, one process; ru_maxrss and CPU time of the process"
    memory = {
        "name": f"ingest of {rows:,} rows, peak memory",
        "value": round(peak),
        "unit": "MiB",
        "target": MAX_BYTES >> 20,
        "holds": peak <= MAX_BYTES >> 20,
        "peer": "",
        "how": how,
    }
    speed = {
        "name": f"ingest of {rows:,} rows, CPU time a row",
        "value": float(f"{found['cpu_s'] / rows * 1e6:.3g}"),
        "unit": "us",
        "target": None,
        "holds": None,
        "peer": "",
        "how": how,
    }
    return [memory, speed]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    options = parser.parse_args()
    found = [figure for rows in options.rows for figure in figures(rows)]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for figure in found:
        sys.stdout.write(f"{figure['name']}: {figure['value']} {figure['unit']}\n")


if __name__ == "__main__":
    main()
