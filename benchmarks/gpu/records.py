"""The records of parts in benchmarks/results/gpu.json, and how they are merged.

The file is `{"parts": {name: record}}`. A record has the part's figures, its card, and how it ended. It is
written again with every figure, so a part that is interrupted keeps the figures it has.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]

GPU, CPU = "gpu", "cpu, stand-in"
"""Device of a record. A CPU record only shows that the suite runs."""

ORDER = (
    "train",
    "fit",
    "start",
    "transformer",
    "transformer_fit",
    "ingest",
    "small",
    "serve",
    "tune",
    "xla_fit",
    "xla",
    "precision",
)
"""The parts, the most important first."""


def read(path: Path) -> dict[str, Record]:
    """Part -> record; empty if the file does not exist."""
    if not path.is_file():
        return {}
    parts: dict[str, Record] = json.loads(path.read_text())["parts"]
    return parts


def put(path: Path, record: Record) -> None:
    """Write or replace one part's record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        parts = read(path) | {record["part"]: record}
        _write(path, parts)


def merge(into: Path, *found: Path) -> dict[str, Record]:
    """Merge the records of other files into one file; the newest measurement of a part counts.

    A record without a value does not replace one with values, and CPU records are left out.

    Returns:
        The content of the file after the merge.
    """
    with _locked(into):
        parts = read(into)
        for path in found:
            for name, record in read(path).items():
                if record["device"] == GPU and _replaces(record, parts.get(name)):
                    parts[name] = record
        _write(into, parts)
    return read(into)


def _replaces(new: Record, old: Record | None) -> bool:
    if old is None:
        return True
    has_values = [any(f["value"] is not None for f in each["figures"]) for each in (new, old)]
    if has_values[0] != has_values[1]:
        return has_values[0]
    return bool(new["date"] >= old["date"])


def figures_of(record: Record) -> list[dict[str, Any]]:
    """A record's figures; those of a rejected record meet no target, and say why."""
    refused = "; ".join(record.get("refused", []))
    if not refused:
        return list(record["figures"])
    return [figure | {"holds": None, "refused": refused} for figure in record["figures"]]


Derived = tuple[str, tuple[str, ...], tuple[str, ...], float]
"""Name; what ours may be, the best of which counts; peers, all of which are needed; least ratio."""

RATIOS: tuple[Derived, ...] = (
    ("ResNet-50: ours against model.fit, both without XLA", ("stoker",), ("fit",), 2.5),
    (
        "ResNet-50: the best of ours against the best of model.fit",
        ("stoker", "stoker, XLA"),
        ("fit", "fit, XLA"),
        1.2,
    ),
    (
        "ResNet-50: images in the first five minutes, against model.fit",
        ("stoker, five minutes",),
        ("fit, five minutes",),
        2.0,
    ),
    ("Transformer: ours against model.fit", ("stoker, texts",), ("fit, texts",), 1.2),
)
"""Figures that need several parts: each part ends within its time, however slow the other side is."""


def derived(parts: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Ours against `model.fit`, if both were measured on the same card by the same commit."""
    rates: dict[str, tuple[dict[str, Any], Record]] = {}
    for record in parts.values():
        for figure in figures_of(record):
            if "rate_of" in figure and "refused" not in figure and figure["value"]:
                rates[figure["rate_of"]] = figure, record
    made = (_ratio(rates, each) for each in RATIOS)
    return [figure for figure in made if figure is not None]


def _ratio(
    rates: Mapping[str, tuple[dict[str, Any], Record]], wanted: Derived
) -> dict[str, Any] | None:
    name, ours, peers, least = wanted
    known = [each for each in ours if each in rates]
    if not known or not set(peers) <= rates.keys():
        return None
    measured = [rates[each] for each in (*known, *peers)]
    if len({(record["card"].get("uuid"), record["commit"]) for _, record in measured}) != 1:
        return None
    best, peer = (max(each, key=lambda side: rates[side][0]["value"]) for each in (known, peers))
    values = [rates[side][0]["value"] for side in (best, peer)]
    ratio = values[0] / values[1]
    unit = rates[peer][0]["unit"]
    return {
        "name": name,
        "value": float(f"{ratio:.4g}"),
        "unit": "x",
        "target": least,
        "holds": ratio >= least,
        "peer": peer,
        "how": f"{values[0]:.4g} {unit} ({best}) against {values[1]:.4g}, one after the other; parts "
        f"{', '.join(dict.fromkeys(record['part'] for _, record in measured))}, same card and commit",
    }


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock for writing: a part and the runner write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, parts: Mapping[str, Record]) -> None:
    order = {name: place for place, name in enumerate(ORDER)}
    names = sorted(parts, key=lambda name: (order.get(name, len(order)), name))
    made = path.with_suffix(".new")
    made.write_text(json.dumps({"parts": {name: parts[name] for name in names}}, indent=1) + "\n")
    os.replace(made, path)
