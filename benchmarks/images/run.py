"""Every contender in turn, round after round, each in a fresh process; then one table of ratios.

CPU time per image decides: a noisy neighbor lengthens wall time and not CPU time. A ratio is taken
within a round, against the recipe of that round; the median of the rounds is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from generate import KINDS, generate

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
STOKER = ROOT / ".venv" / "bin" / "python"
BENCH = ROOT / ".venv-bench" / "bin" / "python"
RESULTS = ROOT / "benchmarks" / "results" / "data-images.json"

FOLDER = Path(tempfile.gettempdir()) / "stoker-bench-images"
"""Generated photographs, TFRecords and shards: 3 GB, kept for the next run."""

MEASURED = {"500x375": 30, "1600x1200": 8}
"""Batches under the clock in one round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to read images."""

    name: str
    python: Path
    command: tuple[str, ...]
    kinds: tuple[str, ...] = ("500x375", "1600x1200")
    target: dict[str, float] | None = None
    """Kind -> times the recipe that it must reach."""

    peer: bool = False


def ours(
    store: str, engine: str = "native", *, kinds: tuple[str, ...], target: dict[str, float]
) -> Contender:
    """Stoker with one store."""
    return Contender(
        name=f"stoker, {store}" + ("" if engine == "native" else f", {engine}"),
        python=STOKER,
        command=("ours.py", "{photos}", store, engine),
        kinds=kinds,
        target=target,
    )


BOTH = ("500x375", "1600x1200")
RECIPE = Contender(
    name="recipe (TFRecord, interleave, parallel map)",
    python=STOKER,
    command=("recipe.py", "{photos}"),
)
CONTENDERS = (
    RECIPE,
    ours("original", kinds=BOTH, target={"500x375": 1.4}),
    ours("original", "opencv", kinds=BOTH, target={}),
    ours("resized", kinds=BOTH, target={"500x375": 3.0, "1600x1200": 10.0}),
    ours("raw", kinds=BOTH, target={"500x375": 6.0}),
    *(
        Contender(
            name=f"{name}, {how}",
            python=BENCH,
            command=("peers.py", "{photos}", loader, decoder),
            peer=True,
        )
        for name, loader, how, decoder in (
            ("torch DataLoader", "torch", "PIL", "pil"),
            ("torch DataLoader", "torch", "simplejpeg + OpenCV", "opencv"),
            ("Grain", "grain", "PIL", "pil"),
            ("Grain", "grain", "simplejpeg + OpenCV", "opencv"),
            ("DALI", "dali", "CPU", "own"),
        )
    ),
    Contender(
        name="limit: entropy decoding alone",
        python=STOKER,
        command=("limit.py", "{photos}", "entropy"),
    ),
    Contender(
        name="limit: copying the result once",
        python=STOKER,
        command=("limit.py", "{photos}", "copying"),
        kinds=("500x375",),
    ),
)


def run(contender: Contender, photos: Path, kind: str) -> dict[str, float] | None:
    """One round of one contender, None where it is not installed."""
    if not contender.python.is_file():
        return None
    command = [part.format(photos=photos) for part in contender.command]
    done = subprocess.run(
        [str(contender.python), *command, "--measured", str(MEASURED[kind])],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((ln for ln in done.stdout.splitlines() if ln.startswith("RESULT ")), None)
    if line is None:
        print(f"  {contender.name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    return found


def rounds_of(kind: str, photos: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Contender -> its rounds; every other round goes through them backwards."""
    chosen = [each for each in CONTENDERS if kind in each.kinds]
    found: dict[str, list[dict[str, float]]] = {each.name: [] for each in chosen}
    for number in range(rounds):
        for contender in chosen if number % 2 == 0 else reversed(chosen):
            result = run(contender, photos, kind)
            if result is not None:
                found[contender.name].append(result)
                print(
                    f"{kind} {number + 1}/{rounds} {contender.name:45} "
                    f"CPU {result['cpu_ms']:7.3f} ms  wall {result['wall_ms']:7.3f} ms",
                    flush=True,
                )
    return found


def table(kind: str, found: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    """The content of the results file."""
    recipe = found[RECIPE.name]
    ratios = {
        name: {
            clock: statistics.median(
                base[clock] / each[clock] for base, each in zip(recipe, rounds, strict=False)
            )
            for clock in ("cpu_ms", "wall_ms")
        }
        for name, rounds in found.items()
        if rounds
    }
    rows: list[dict[str, object]] = []
    best_peer = max(
        (ratios[c.name]["cpu_ms"] for c in CONTENDERS if c.peer and c.name in ratios), default=None
    )
    for contender in CONTENDERS:
        if contender.name not in ratios:
            continue
        target = (contender.target or {}).get(kind)
        ratio = ratios[contender.name]
        rows.append(
            {
                "name": f"{kind}: {contender.name}",
                "value": round(ratio["cpu_ms"], 2),
                "unit": "x the recipe, by CPU time an image",
                "target": target,
                "holds": None if target is None else ratio["cpu_ms"] >= target,
                "peer": best_peer if contender.target is not None else None,
                "wall": round(ratio["wall_ms"], 2),
                "cpu_ms": round(
                    statistics.median(each["cpu_ms"] for each in found[contender.name]), 3
                ),
                "how": f"median of {len(found[contender.name])} rounds in alternation, "
                f"{CROP_TEXT}, {' '.join(contender.command)}",
            }
        )
    return rows


CROP_TEXT = "224 x 224 random resized crop + flip, uint8 batches of 64"


def main() -> None:
    """Generate, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        photos = generate(given.folder, kind)
        rows += table(kind.name, rounds_of(kind.name, photos, given.rounds))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
    for row in rows:
        print(
            f"{row['name']:60} {row['value']:6} x  (wall {row['wall']} x)  target {row['target']}"
        )


if __name__ == "__main__":
    main()
