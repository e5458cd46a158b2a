"""Write the results of every benchmark as docs/benchmarks.md and benchmarks/results/figures.md.

The page has one plot, one table and one paragraph per area; `figures.md` has every figure with its method.
Dates, machines and single runs are in `benchmarks/results/NAME.md`, written by hand.

python benchmarks/report.py
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
ALL_FIGURES = RESULTS / "figures.md"

Figure = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Area:
    """One section of the page."""

    title: str
    results: tuple[str, ...]
    """Names of the result files."""

    command: str
    """The command that measures them."""

    method: str
    """How it was measured, one paragraph."""

    picture: str = ""
    """A picture next to the page, in place of a plot of the ratios."""


AREAS = (
    Area(
        title="Images",
        results=("data-images",),
        command="make bench-images",
        method="JPEG files to batches of 64 random resized crops (224x224, flipped, uint8), against TensorFlow's "
        "recipe (TFRecord, interleave, parallel map). CPU time per image in fresh processes, in turn; median of 5 "
        "rounds. Entropy decoding alone is the limit for whole files; at 1600x1200 a crop is decoded only to its "
        "last row.",
    ),
    Area(
        title="Tables",
        results=("data-tables",),
        command="make bench-tables",
        method="5 M rows of 12 floats, 5 integers and 3 categories to batches of 4,096. CPU time per row in fresh "
        "processes, in turn; median of 2 rounds. The limits are decoding Parquet alone, and copying the bytes once.",
    ),
    Area(
        title="Ingest",
        results=("data-ingest", "data-ingest-images"),
        command="make bench-ingest",
        method="A CSV of 4 columns, and 20,000 JPEGs of 95 KB, in one process each: peak memory (`ru_maxrss`), and "
        "images per second by number of cores.",
    ),
    Area(
        title="tf.data service",
        results=("data-service",),
        command="make bench-service",
        method="1,200 JPEGs through the service and through the same pipeline in the training process, in turn; "
        "median of 5 epochs. Everything runs on one machine, so the service adds no core here.",
    ),
    Area(
        title="The training loop",
        results=("train-loop", "train-floor"),
        command="make bench-train-loop",
        method="The same model, data and batch size in Stoker's loop, `model.fit`, and a `tf.function` loop written by "
        "hand, in short turns within one process. Each ratio is the median of three processes: processes with the "
        "same code differ by several percent. `floor` rows are what any loop can gain at most.",
    ),
    Area(
        title="Two workers",
        results=("train-scaling",),
        command="make bench-train-scaling",
        method="Samples per second of two workers on one core each, divided by those of one; over loopback and over "
        "two network namespaces shaped to 1 Gbit/s (as root). The curve has the time that a worker computes for each "
        "megabyte that it sends.",
    ),
    Area(
        title="Checkpoints and parameter servers",
        results=("train-checkpoints", "train-ps"),
        command="make bench-train-checkpoints bench-train-ps",
        method="Two runs of 200 s with 12 checkpoints: the calls after a checkpoint against those when it is long "
        "written, in one process. Parameter servers: updates counted by the servers while workers are killed.",
    ),
    Area(
        title="Tuning",
        results=("tune",),
        command="make bench-tune",
        method="`stoker tune` on the recipe `naive` (a Python generator over JPEG files in one thread), on an emulated "
        "device whose step takes 10 ms and no CPU, and on a step on one core. U after tuning is measured over 60 pairs "
        "of windows of three new processes. The picture is of one tuning of `naive`.",
        picture="tune.svg",
    ),
    Area(
        title="Serving",
        results=("serve",),
        command="make bench-serve",
        method="A small MLP and a CNN, each server on one core and the client (wrk, h2load) on the other, in turn with "
        "its peers. Small requests that arrive together are one call of the model, so Stoker answers more of them than "
        "its HTTP engine alone.",
    ),
    Area(
        title="Jobs on Kubernetes",
        results=("kubernetes",),
        command="make bench-kubernetes",
        method="The official client and `stoker submit`'s code against an API server of the tests, in one process with it: 10 % "
        "of all requests are lost, half of them after the server has carried them out, and each command that says so is "
        "repeated. The time of a real server and its network comes on top.",
    ),
    Area(
        title="Rollout",
        results=("rollout/overhead", "rollout/shadow"),
        command="make bench-rollout",
        method="One server process has the same small MLP twice: without a rollout, and with an active 90/10 split. Server "
        "CPU time per request in the event loop, which does not poll; median of pairs of windows, in turn. `Routing` is against "
        "clients that name the two versions in the same shares: the difference to `one version` is what a second model costs by "
        "itself. With many connections that is most of it, since a turn of the loop holds two runs instead of one. With one connection, "
        "routing that counts nothing costs 2.7 to 3.2 % (decision 0063). Shadow traffic: p99 under an open load of "
        "half of the capacity, in a shadow stage and without a rollout, in turn.",
    ),
    Area(
        title="A/B tests",
        results=("rollout/ab_false_alarms", "rollout/ab_scale"),
        command="make bench-rollout",
        method="Simulated tests with the product's own interval, looked at after every key, and the CPU time and memory that "
        "1,000,000 keys cost a server.",
    ),
    Area(
        title="Rollout under faults",
        results=("rollout/faults", "rollout/answers"),
        command="make bench-rollout",
        method="`stoker serve` with faults inside the candidate (an assertion, NaN, a delay of each run, other predictions, "
        "runs that never end, an abort of the process), 20 requests of it a second at 10, 20 or 50 % of the traffic. The time "
        "is from the first request with a bad answer to the last one that went to the candidate. Healthy releases have the "
        "same model, another training, or an outage that fails half of the requests of both versions for 3 s of each stage, "
        "of 100 % and of the bake time. Checked answers: two servers of one repository, while operators promote and roll back and "
        "`kill -9` takes workers and servers. The picture is of one run (`make rollout-picture`).",
        picture="rollout.svg",
    ),
    Area(
        title="Monitoring",
        results=("monitor_scrape", "monitor_train", "monitor_requests", "monitor_fire"),
        command="make bench-monitor",
        method="A server process with one small model, and the counts of 200 and of 1,000 models with two versions each, "
        "made by the calls that count requests. CPU time of the whole process for a scrape with gzip. The 99th percentile "
        "is of small REST requests on one connection while one scrape follows the other, client and server on the same "
        "two cores. Cost of metrics for a training: two runs in one process, in turn, one of them scraped more than once a second. "
        "Cost for a request: CPU time of a server, sampled for skew and scraped once a second, next to itself without. "
        "The flood of scrapes misses its bound by its connections, not by its text: accepting, sending and closing take most "
        "of the event loop's CPU time, a flood of `/livez` takes as much, and the text is made in a thread, once for all that "
        "wait (py-spy, and CPU time by thread). Alerts: `stoker monitor up --time-scale 60` on metrics written by hand and played by the clock: a healthy "
        "machine for 20 s, then five faults at once. The time is from the change of a metric to the webhook, through "
        "Prometheus and Alertmanager; the slowest of all rounds.",
    ),
    Area(
        title="Jobs on Slurm",
        results=("jobs",),
        command="make bench-jobs",
        method="A Slurm of four machines that are processes of this one. `stoker submit` until two workers have done the first "
        "step of a small training, in turn with the same two workers that a person starts with `srun` and `TF_CONFIG`. "
        "Submissions of which each tenth loses its answer, half of them after Slurm has the job, and that are repeated until "
        "they have one. `stoker jobs` in a process of its own, with the programs that it starts. The picture is of one training.",
        picture="slurm.svg",
    ),
)

INTRODUCTION = """# Benchmarks

The command of each section writes its figures. The machines have 2 cores and are noisy, so all contestants run in turn, and
a ratio compares runs next to each other. A ratio above 1 means that Stoker is faster. The tables show the figures that have a
target; [all figures](../benchmarks/results/figures.md) lists every one with its method.
"""

MAX_ROWS = 16
"""A table with more figures is a matrix: one row per setting, one column per contestant."""

MAX_BARS = 30
"""A plot with more ratios shows only those with a target."""

ROW_PX, LABEL_PX, BAR_PX, FONT_PX = 22, 430, 300, 12


def plot(figures: Sequence[Figure]) -> str:
    """Bars of ratios on a logarithmic scale, a mark at 1 and at each target."""
    most = max(max(f["value"], f["target"] or 0) for f in figures)
    least = min(1.0, *(f["value"] for f in figures))
    span = math.log(most * 1.1) - math.log(least * 0.9)

    def at(value: float) -> float:
        return LABEL_PX + BAR_PX * (math.log(value) - math.log(least * 0.9)) / span

    height = ROW_PX * (len(figures) + 1)
    size = f'width="{LABEL_PX + BAR_PX + 80}" height="{height}"'
    font = f'font-family="sans-serif" font-size="{FONT_PX}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        f'<rect width="100%" height="{height}" fill="white"/>',
    ]
    for row, figure in enumerate(figures):
        top = ROW_PX * row + 6
        color = "#c0392b" if figure["holds"] is False else "#2e7d32"
        if figure["target"] is None:
            color = "#78909c"
        width = max(1.0, at(figure["value"]) - at(least * 0.9))
        lines += [
            f'<text x="{LABEL_PX - 8}" y="{top + 12}" text-anchor="end">{escape(figure["name"])}</text>',
            f'<rect x="{LABEL_PX}" y="{top}" width="{width:.1f}" height="14" fill="{color}"/>',
            f'<text x="{LABEL_PX + width + 5:.1f}" y="{top + 12}">{figure["value"]:g} x</text>',
        ]
        if figure["target"] is not None:
            lines.append(_mark(at(figure["target"]), top - 2, top + 16, "#c62828"))
    lines.append(_mark(at(1.0), 0, height, "#90a4ae"))
    lines.append(
        f'<text x="{LABEL_PX}" y="{height - 4}" fill="#546e7a">gray line: as fast as the peer; '
        "red mark: the target</text></svg>"
    )
    return "\n".join(lines) + "\n"


CURVE_PX, CURVE_HIGH_PX, MARGIN_PX = 560, 300, 60


def curve(points: Sequence[Figure]) -> str:
    """Speed-up of two workers over compute per MB reduced, on a logarithmic axis."""
    points = sorted(points, key=lambda point: point["at"])
    ats = [point["at"] for point in points]
    least, most = math.log(min(ats) * 0.8), math.log(max(ats) * 1.25)

    def place(at: float, value: float) -> tuple[float, float]:
        across = MARGIN_PX + CURVE_PX * (math.log(at) - least) / (most - least)
        return across, 20 + CURVE_HIGH_PX * (1 - min(value, 2.1) / 2.1)

    places = [place(point["at"], point["value"]) for point in points]
    bottom, right = place(ats[0], 0.0)[1], MARGIN_PX + CURVE_PX
    size = f'width="{right + 20}" height="{bottom + 50:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{FONT_PX}">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for value, color in ((0.0, "#546e7a"), (1.0, "#cfd8dc"), (1.85, "#c62828"), (2.0, "#cfd8dc")):
        y = place(ats[0], value)[1]
        lines.append(
            f'<line x1="{MARGIN_PX}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}"/>'
            f'<text x="{MARGIN_PX - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    lines.append(f'<polyline points="{path}" fill="none" stroke="#2e7d32" stroke-width="2"/>')
    for point, (x, y) in zip(points, places, strict=True):
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#2e7d32"/>'
            f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{point["value"]:g}</text>'
            f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{point["at"]:.3g}</text>'
        )
    lines.append(
        f'<text x="{MARGIN_PX}" y="{bottom + 40:.1f}" fill="#546e7a">ms of one core per MB reduced; '
        "upwards: samples of 2 workers over those of 1; red line: the target from 75 ms on</text></svg>"
    )
    return "\n".join(lines) + "\n"


def _mark(x: float, top: float, bottom: float, color: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{color}" />'


def full_table(figures: Sequence[Figure]) -> str:
    """Every figure of a result, with its method."""
    lines = ["| figure | value | target | holds | how |", "|---|---|---|---|---|"]
    lines += [
        f"| {f['name']} | {_value(f)} | {_target(f)} | {_holds(f)} | {f['how']} |" for f in figures
    ]
    return "\n".join(lines) + "\n"


def short_table(figures: Sequence[Figure]) -> str:
    """The figures with a target, or all if none has one."""
    shown = [f for f in figures if f["target"] is not None] or list(figures)
    if len(shown) > MAX_ROWS:
        return _matrix(shown)
    lines = ["| figure | value | target | holds |", "|---|---|---|---|"]
    lines += [f"| {f['name']} | {_value(f)} | {_target(f)} | {_holds(f)} |" for f in shown]
    return "\n".join(lines) + "\n"


def _matrix(figures: Sequence[Figure]) -> str:
    """Figures named `setting: contestant` as a row per setting and a column per contestant."""
    cells: dict[str, dict[str, str]] = {}
    for f in figures:
        row, _, column = f["name"].partition(": ")
        missed = " **missed**" if f["holds"] is False else ""
        cells.setdefault(row, {})[column] = f"{f['value']:g} (at least {f['target']:g}){missed}"
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {row} | {' | '.join(found.get(column, '') for column in columns)} |"
        for row, found in cells.items()
    ]
    return "\n".join(lines) + "\n"


def _value(f: Figure) -> str:
    return "none" if f["value"] is None else f"{f['value']:g} {f['unit']}"


def _target(f: Figure) -> str:
    return "" if f["target"] is None else f"{f['target']:g} {f['unit']}"


def _holds(f: Figure) -> str:
    return {True: "yes", False: "**no**", None: ""}[f["holds"]]


def gpu() -> str:
    """The section of the GPU suite: each part's card and figures, and what is not yet measured."""
    parts = ["\n## On a GPU\n\n`make bench-gpu` writes `benchmarks/results/gpu.json`.\n\n"]
    parts.append((RESULTS / "gpu.md").read_text().strip() + "\n")
    path = RESULTS / "gpu.json"
    found: dict[str, Figure] = json.loads(path.read_text())["parts"] if path.is_file() else {}
    if not found:
        parts.append(
            "\n**Not yet measured on a card in this version: every figure above is open.**\n"
        )
    for name, record in found.items():
        card = record["card"]
        parts.append(
            f"\n### {name}\n\n{record['date'][:10]}, commit {record['commit']}, "
            f"{card.get('name', 'unknown card')}, driver {card.get('driver')}, power limit "
            f"{card.get('power_limit_w')} W, {record['machine']['cores']} cores; {record['status']} after "
            f"{record['took_s']:g} s.\n"
        )
        if record["refused"]:
            parts.append(f"\n**Refused: {'; '.join(record['refused'])}.**\n")
        parts.append("\n" + full_table([_refused(figure, record) for figure in record["figures"]]))
    if found:
        sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
        import records

        together = records.derived(found)
        parts.append("\n### Of several parts\n\n" + full_table(together) if together else "")
    return "".join(parts)


def _refused(figure: Figure, record: Figure) -> Figure:
    """A figure of a rejected record meets no target."""
    return figure | {"holds": None} if record["refused"] else figure


def section(area: Area) -> str:
    """The section of an area; writes its plot."""
    figures = [figure for name in area.results for figure in _figures(name)]
    points = [f for f in figures if "at" in f]
    ratios = [f for f in figures if f["unit"].startswith("x")]
    if len(ratios) > MAX_BARS:
        ratios = [f for f in ratios if f["target"] is not None]
    picture = area.picture
    if not picture and (points or len(ratios) > 1):
        picture = f"benchmark-{area.results[0]}.svg"
        (PAGE.parent / picture).write_text(curve(points) if points else plot(ratios))
    # The parts of a result that has a folder share its notes.
    results = dict.fromkeys(name.partition("/")[0] for name in area.results)
    notes = [name for name in results if (RESULTS / f"{name}.md").is_file()]
    runs = ", ".join(f"[{name}](../benchmarks/results/{name}.md)" for name in notes)
    parts = [f"## {area.title}"]
    parts += [f"![{area.title}: {_alternative(points, picture)}]({picture})"] if picture else []
    parts.append(short_table(figures).rstrip() if figures else "Not yet measured in this version.")
    parts.append(f"{area.method} Command: `{area.command}`.{f' Runs: {runs}.' if runs else ''}")
    return "\n\n".join(parts) + "\n"


def _alternative(points: Sequence[Figure], picture: str) -> str:
    if points:
        return "speed-up by compute per MB reduced"
    others = {
        "tune.svg": "before and after",
        "rollout.svg": "traffic share and errors over time",
        "slurm.svg": "a training of four workers that is preempted",
    }
    return others.get(picture, "times the peer")


def _figures(name: str) -> list[Figure]:
    path = RESULTS / f"{name}.json"
    found: list[Figure] = json.loads(path.read_text()) if path.is_file() else []
    return found


def all_figures() -> str:
    """Every figure of every result."""
    parts = ["# All figures\n\nWritten by `python benchmarks/report.py`.\n"]
    for area in AREAS:
        for name in area.results:
            parts.append(f"\n## {area.title}: {name}.json\n\n`{area.command}`\n")
            parts.append("\n" + full_table(_figures(name)))
    return "".join(parts)


def main() -> None:
    """Write the page, its plots, and the list of all figures."""
    PAGE.write_text("\n".join([INTRODUCTION, *map(section, AREAS)]) + gpu())
    ALL_FIGURES.write_text(all_figures())


if __name__ == "__main__":
    main()
