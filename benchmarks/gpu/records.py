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
    "start",
    "transformer",
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

    A record without figures does not replace one with figures, and CPU records are left out.

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
    if bool(new["figures"]) != bool(old["figures"]):
        return bool(new["figures"])
    return bool(new["date"] >= old["date"])


def figures_of(record: Record) -> list[dict[str, Any]]:
    """A record's figures; those of a rejected record meet no target, and say why."""
    refused = "; ".join(record.get("refused", []))
    if not refused:
        return list(record["figures"])
    return [figure | {"holds": None, "refused": refused} for figure in record["figures"]]


def derived(parts: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Figures that need two parts on the same card: ours against the faster `model.fit`."""
    rates = {}
    cards = set()
    for name in ("train", "xla_fit", "xla"):
        record = parts.get(name, {"figures": []})
        for figure in figures_of(record):
            if "rate_of" in figure and "refused" not in figure and figure["value"]:
                rates[figure["rate_of"]] = figure["value"]
                cards.add(record["card"].get("uuid"))
    ours = max((rates[name] for name in ("stoker", "stoker, XLA") if name in rates), default=None)
    if ours is None or not {"fit", "fit, XLA"} <= rates.keys() or len(cards) != 1:
        return []
    peer = max("fit", "fit, XLA", key=rates.__getitem__)
    ratio = ours / rates[peer]
    return [
        {
            "name": "ResNet-50: the best of ours against the best of model.fit",
            "value": float(f"{ratio:.4g}"),
            "unit": "x",
            "target": 1.2,
            "holds": ratio >= 1.2,
            "peer": peer,
            "how": f"{ours:.4g} images/s against {rates[peer]:.4g}; parts train, xla_fit and xla, same card",
        }
    ]


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
