"""What `stoker tune` reaches, and whether it does so again.

python benchmarks/tune/run.py [--cases naive emulated real again disturbance]

Each case writes benchmarks/results/tune/<case>.json; all that are there make benchmarks/results/tune.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "train"), str(ROOT / "benchmarks" / "tune")]

import photographs  # noqa: E402 - next to this file, which is in no package
from figures import RESULTS, Figure, figure, write  # noqa: E402 - as above

from stoker.app.experiment import load_experiment  # noqa: E402 - as above
from stoker.app.tuning.trials import Trials  # noqa: E402 - as above
from stoker.pages.html import Html  # noqa: E402 - as above
from stoker.pages.plot import picture_file  # noqa: E402 - as above
from stoker.tune.client import TrialLimits  # noqa: E402 - as above
from stoker.tune.compare import gain_of, interval  # noqa: E402 - as above
from stoker.tune.process import TrialProcess  # noqa: E402 - as above
from stoker.tune.profile import busy_fractions  # noqa: E402 - as above

PARTS = RESULTS / "tune"
PAIRS = 10
WINDOW_S = 1.0
PROCESSES, TURNS = 3, 20
"""How often the tuned training is started again, and the pairs of windows of each: two processes of the same
settings may differ by some per cent, and on a shared host so do pairs of windows."""

LONG_S = 1800.0
LONG = ("--budget", "20m")


def tuned(folder: Path, *arguments: str) -> dict[str, Any]:
    """What `stoker tune --json` says."""
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "tune", str(folder), "--json", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def recipe(into: Path) -> Path:
    """A copy of the naive recipe, without what earlier runs left."""
    leave = shutil.ignore_patterns("runs", "models", "stoker.lock.yaml", "__pycache__")
    return Path(shutil.copytree(ROOT / "recipes" / "naive", into / "naive", ignore=leave))


def against_hand(folder: Path, settings: dict[str, Any]) -> tuple[Any, str]:
    """The tuned training against the one by hand, in turn."""
    trials = Trials(load_experiment(folder), folder / "trials", progress=print)
    limits = TrialLimits(left_s=lambda: LONG_S, max_s=LONG_S, window_s=WINDOW_S)
    trial = trials.open(settings, name="tuned", limits=limits)
    by_hand = TrialProcess(
        {"recipe": str(folder)},
        folder=folder / "trials",
        name="by-hand",
        command=(sys.executable, str(ROOT / "benchmarks" / "tune" / "by_hand.py")),
    )
    pairs = []
    with closing(by_hand):
        name = by_hand.ask("name", timeout_s=LONG_S)
        for number in range(PAIRS):
            ours = trial.speed() if number % 2 else None
            found = by_hand.ask("speed", timeout_s=LONG_S, seconds=WINDOW_S)
            ours = trial.speed() if ours is None else ours
            pairs.append((found["rows"] / found["wall_s"], ours))
    trial.close()
    return gain_of(pairs), name


def naive(scratch: Path) -> list[Figure]:
    """As beginners write it, and what is made of it."""
    folder = recipe(scratch)
    found = tuned(folder, *LONG)
    (PARTS / "waterfall.svg").write_text(_waterfall(Path(found["report"])))
    gain, hand = against_hand(folder, found["settings"])
    total = found["after"]["samples_per_s"] / found["before"]["samples_per_s"]
    kept = ", ".join(f"{name}={value}" for name, value in found["settings"].items())
    how = f"{PAIRS} pairs of windows in turn, {gain.shown()}; by hand: {hand}; tuned: {kept}"
    return [
        figure(
            "naive: tuned, relative to made by hand",
            gain.ratio,
            "x",
            at_least=0.95,
            peer="by hand",
            how=how,
        ),
        figure("naive: tuned against as it was", total, "x", how=f"samples a second, {kept}"),
        figure(
            "naive: U before", 100 * found["before"]["busy_fraction"], "%", how="middle of 6 turns"
        ),
        figure(
            "naive: U after", 100 * found["after"]["busy_fraction"], "%", how="middle of 6 turns"
        ),
        figure("naive: time that tuning took", found["took_s"], "s", how="wall, ingest included"),
    ]


def emulated(scratch: Path) -> list[Figure]:
    """A device that leaves the CPU to the input."""
    folder = photographs.write(scratch / "emulated", real=False)
    return _busy("emulated device", folder, first=45.0)


def real(scratch: Path) -> list[Figure]:
    """A compiled step on one core, the input on the other."""
    folder = photographs.write(scratch / "real", real=True)
    return _busy("step on one core", folder, first=None)


def _busy(name: str, folder: Path, *, first: float | None) -> list[Figure]:
    found = tuned(folder, "--parity-steps", "40", *LONG)
    fractions = [100 * u for u in _fractions(folder, found["settings"])]
    low, high = interval(fractions)
    kept = ", ".join(f"{key}={value}" for key, value in found["settings"].items()) or "nothing"
    how = f"{photographs.COUNT} JPEG files of 1600x1200, 224x224 seen; kept: {kept}"
    before, after = (100 * found[when]["busy_fraction"] for when in ("before", "after"))
    measured = (
        f"the middle of {len(fractions)} pairs of windows, resident and real in turn, "
        f"{low:.4g} to {high:.4g}, of {PROCESSES} new processes with what was kept"
    )
    return [
        figure(f"{name}: U before", before, "%", at_most=first, how=how),
        figure(f"{name}: U after", median(fractions), "%", at_least=95.0, how=f"{measured}; {how}"),
        figure(f"{name}: U after, as tune states it", after, "%", how="one process, few pairs"),
        figure(f"{name}: time that tuning took", found["took_s"], "s", how="wall"),
    ]


def _fractions(folder: Path, settings: dict[str, Any]) -> list[float]:
    """The busy fraction of each pair of windows of a tuned training."""
    found: list[float] = []
    trials = Trials(load_experiment(folder), folder / "trials", progress=print)
    for number in range(PROCESSES):
        trial = trials.open(settings, name=f"busy-{number}", limits=TrialLimits.within(LONG_S))
        turns, _ = trial.turns(TURNS)
        trial.close()
        found += busy_fractions(turns)
    return found


def again(scratch: Path) -> list[Figure]:
    """Five tunings of an unchanged experiment."""
    seen = []
    for number in range(5):
        folder = recipe(scratch / f"again-{number}")
        seen.append(tuned(folder, *LONG)["settings"])
    same = max(seen.count(each) for each in seen)
    how = "; ".join(json.dumps(each, sort_keys=True) for each in seen)
    return [figure("naive: tunings of five that keep the same", same, "of 5", at_least=5, how=how)]


def disturbance(scratch: Path) -> list[Figure]:
    """What a profile from outside costs a script."""
    del scratch
    script = ROOT / "benchmarks" / "tune" / "disturbance.py"
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def _waterfall(report: Path) -> str:
    """The first picture of a report: samples per second, lever by lever."""
    text = report.read_text()
    begin = text.index("<svg")
    picture = text[begin : text.index("</svg>", begin) + len("</svg>")]
    return picture_file(Html(picture))


CASES = {
    "naive": naive,
    "emulated": emulated,
    "real": real,
    "again": again,
    "disturbance": disturbance,
}


def main() -> None:
    """Run the given cases, and put all figures together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    PARTS.mkdir(parents=True, exist_ok=True)
    for name in given.cases:
        with tempfile.TemporaryDirectory(prefix="stoker-bench-") as scratch:
            write(PARTS / f"{name}.json", CASES[name](Path(scratch)))
    found = [PARTS / f"{name}.json" for name in CASES]
    whole = [json.loads(path.read_text()) for path in found if path.is_file()]
    write(RESULTS / "tune.json", [each for part in whole for each in part])
    waterfall = PARTS / "waterfall.svg"
    if waterfall.is_file():
        shutil.copy(waterfall, ROOT / "docs" / "tune.svg")


if __name__ == "__main__":
    main()
