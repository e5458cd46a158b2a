"""Every contestant in turn, again and again; writes benchmarks/results/data-tables.json.

python benchmarks/tables/run.py [--root FOLDER] [--rounds 5] [--without polars]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "data-tables.json"

CONTESTANTS = (
    "tfrecord",
    "stoker",
    "tfrecord_batched",
    "stoker_calls",
    "polars",
    "duckdb",
    "stoker_numbers",
    "polars_numbers",
    "duckdb_numbers",
    "decode",
    "copy",
    "resume",
)

Runs = dict[str, list[dict[str, float]]]


def measured(root: Path, names: list[str], rounds: int) -> Runs:
    """Each contestant once a round, each time in a fresh process."""
    runs: Runs = defaultdict(list)
    for number in range(rounds):
        for name in names:
            done = subprocess.run(
                [sys.executable, str(HERE / "contestants.py"), name, str(root)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            runs[name].append(json.loads(done.stdout))
            sys.stderr.write(f"round {number + 1}, {name}: {done.stdout}")
    return runs


def median(runs: Runs, name: str, key: str) -> float:
    """Over the rounds."""
    return statistics.median(run[key] for run in runs[name])


def ratio(runs: Runs, peer: str, ours: str, key: str = "cpu_ns") -> float:
    """How many times the peer's cost is ours: the median over rounds of what stood side by side."""
    pairs = zip(runs[peer], runs[ours], strict=True)
    return statistics.median(theirs[key] / our[key] for theirs, our in pairs)


def entry(
    name: str, value: float, unit: str, *, target: float | None = None, peer: str = "", how: str
) -> dict[str, object]:
    """One figure."""
    less_is_better = unit in ("s", "MiB")
    holds = None if target is None else (value <= target if less_is_better else value >= target)
    shown = float(f"{value:.4g}")
    figure = {"name": name, "value": shown, "unit": unit, "target": target, "holds": holds}
    return figure | {"peer": peer, "how": how}


def figures(runs: Runs) -> list[dict[str, object]]:
    """What docs/benchmarks.md shows."""
    how = f"CPU time a row, paired, median of {len(runs['stoker'])} rounds, fresh processes"
    found = [
        entry(f"cpu a row: {name}", median(runs, name, "cpu_ns"), "ns", how=how)
        for name in runs
        if name != "resume"
    ]
    targets = {
        ("tfrecord", "stoker"): 150.0,
        ("tfrecord_batched", "stoker"): None,
        ("polars", "stoker"): 1.0,
        ("duckdb", "stoker"): 1.0,
        ("polars_numbers", "stoker_numbers"): 1.0,
        ("duckdb_numbers", "stoker_numbers"): 1.0,
        ("tfrecord", "stoker_calls"): None,
    }
    for (peer, ours), target in targets.items():
        if peer in runs and ours in runs:
            value = ratio(runs, peer, ours)
            name = f"{ours} against {peer}"
            found.append(entry(name, value, "x", target=target, peer=peer, how=how))
            wall = ratio(runs, peer, ours, "wall_ns")
            found.append(entry(f"{name}, wall clock", wall, "x", peer=peer, how=how))
    for limit in ("copy", "decode"):
        value = ratio(runs, "stoker_calls", limit)
        how_near = f"our CPU time a row over that of {limit} alone"
        found.append(entry(f"stoker_calls over {limit}", value, "x", peer=limit, how=how_near))
    start_s = max(run["start_s"] for run in runs["resume"])
    started = "longest of 6 steps and all rounds, from opening the dataset (hashes checked)"
    found.append(entry("resume at any step", start_s, "s", target=1.0, how=started))
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("/tmp/stoker-bench-tables"))  # noqa: S108 - a default, which the user can change
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    left_out = tuple(options.without)
    names = [name for name in CONTESTANTS if not name.startswith(left_out or ("-",))]
    options.root.mkdir(parents=True, exist_ok=True)
    prepare = (
        "import sys; from pathlib import Path; from table import dataset, tfrecords; "
        "dataset(Path(sys.argv[1])); tfrecords(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", prepare, str(options.root)], check=True, cwd=HERE)
    found = figures(measured(options.root, names, options.rounds))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for figure in found:
        sys.stdout.write(f"{figure['name']}: {figure['value']} {figure['unit']}\n")


if __name__ == "__main__":
    main()
