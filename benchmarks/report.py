"""The results of every benchmark as docs/benchmarks.md, with a plot of each.

python benchmarks/report.py
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

Figure = dict[str, Any]

TITLES = {
    "data-images": ("Images", "make bench-images"),
    "data-tables": ("Tables", "make bench-tables"),
    "data-ingest": ("Ingest", "make bench-ingest"),
    "data-ingest-images": ("Ingest of images, by number of cores", "make bench-ingest"),
    "data-service": ("tf.data service", "make bench-service"),
    "train-loop": ("The training loop", "make bench-train-loop"),
    "train-floor": ("The most that any loop can gain", "make bench-train-loop"),
    "train-scaling": ("Two workers", "make bench-train-scaling"),
    "train-checkpoints": ("Checkpoints", "make bench-train-checkpoints"),
    "train-ps": ("Parameter servers", "make bench-train-ps"),
    "tune": ("Tuning", "make bench-tune"),
    "serve": ("Serving", "make bench-serve"),
}
"""Result -> its heading, and the command that makes it; in the order of the page."""

INTRODUCTION = """# Benchmarks

Every figure here was written by the command beside it; `make bench-data` and `make bench-train` run them all. The machines are
small (2 cores) and noisy, so contestants run in turn and a ratio is that of what stood side by side: the data engine's in fresh
processes, by CPU time a sample; the training loop's in short turns within one process, by wall clock where CPU time is not named.
`x` is how many times the peer's time ours is the smaller; above 1 we are ahead.
"""

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
        colour = "#c0392b" if figure["holds"] is False else "#2e7d32"
        if figure["target"] is None:
            colour = "#78909c"
        width = max(1.0, at(figure["value"]) - at(least * 0.9))
        lines += [
            f'<text x="{LABEL_PX - 8}" y="{top + 12}" text-anchor="end">{escape(figure["name"])}</text>',
            f'<rect x="{LABEL_PX}" y="{top}" width="{width:.1f}" height="14" fill="{colour}"/>',
            f'<text x="{LABEL_PX + width + 5:.1f}" y="{top + 12}">{figure["value"]:g} x</text>',
        ]
        if figure["target"] is not None:
            lines.append(_mark(at(figure["target"]), top - 2, top + 16, "#c62828"))
    lines.append(_mark(at(1.0), 0, height, "#90a4ae"))
    lines.append(
        f'<text x="{LABEL_PX}" y="{height - 4}" fill="#546e7a">grey line: as quick as the peer; '
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
    for value, colour in ((0.0, "#546e7a"), (1.0, "#cfd8dc"), (1.85, "#c62828"), (2.0, "#cfd8dc")):
        y = place(ats[0], value)[1]
        lines.append(
            f'<line x1="{MARGIN_PX}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>'
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


def _mark(x: float, top: float, bottom: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{colour}" />'


def table(figures: Sequence[Figure]) -> str:
    """Every figure of a result."""
    lines = ["| figure | value | target | holds | how |", "|---|---|---|---|---|"]
    for f in figures:
        target = "" if f["target"] is None else f"{f['target']:g} {f['unit']}"
        holds = {True: "yes", False: "**no**", None: ""}[f["holds"]]
        value = "none" if f["value"] is None else f"{f['value']:g} {f['unit']}"
        lines.append(f"| {f['name']} | {value} | {target} | {holds} | {f['how']} |")
    return "\n".join(lines) + "\n"


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
        parts.append("\n" + table([_refused(figure, record) for figure in record["figures"]]))
    if found:
        sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
        import records

        together = records.derived(found)
        parts.append("\n### Of several parts\n\n" + table(together) if together else "")
    return "".join(parts)


def _refused(figure: Figure, record: Figure) -> Figure:
    """A figure of a rejected record meets no target."""
    return figure | {"holds": None} if record["refused"] else figure


def main() -> None:
    """Write the page and its plots."""
    parts = [INTRODUCTION]
    for name, (title, command) in TITLES.items():
        path = RESULTS / f"{name}.json"
        if not path.is_file():
            continue
        figures: list[Figure] = json.loads(path.read_text())
        parts.append(f"\n## {title}\n\n`{command}` writes `benchmarks/results/{name}.json`.\n")
        ratios = [f for f in figures if f["unit"].startswith("x")]
        if ratios:
            picture = PAGE.parent / f"benchmark-{name}.svg"
            picture.write_text(plot(ratios))
            parts.append(f"\n![{title}: times the peer]({picture.name})\n")
        points = [f for f in figures if "at" in f]
        if points:
            picture = PAGE.parent / f"benchmark-{name}-curve.svg"
            picture.write_text(curve(points))
            parts.append(f"\n![{title}: speed-up by compute per MB reduced]({picture.name})\n")
        note = RESULTS / f"{name}.md"
        if note.is_file():
            parts.append("\n" + note.read_text().strip() + "\n")
        parts.append("\n" + table(figures))
    parts.append(gpu())
    PAGE.write_text("".join(parts))


if __name__ == "__main__":
    main()
