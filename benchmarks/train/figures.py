"""Figures as benchmarks/results holds them and benchmarks/report.py shows them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"

Figure = dict[str, Any]


def figure(
    name: str,
    value: float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    peer: str = "",
    how: str,
) -> Figure:
    """One figure, with its target where it has one."""
    holds = None
    if at_least is not None:
        holds = value >= at_least
    if at_most is not None:
        holds = value <= at_most
    target = at_least if at_most is None else at_most
    shown = {"name": name, "value": float(f"{value:.4g}"), "unit": unit, "target": target}
    return shown | {"holds": holds, "peer": peer, "how": how}


def spread(values: Sequence[float]) -> str:
    """How far the rounds lie apart."""
    return f"{min(values):.3g} to {max(values):.3g}"


def write(path: Path, figures: Sequence[Figure]) -> None:
    """Write a result, and show it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(figures), indent=1) + "\n")
    for each in figures:
        verdict = {True: " holds", False: " MISSED", None: ""}[each["holds"]]
        sys.stdout.write(f"{each['name']}: {each['value']} {each['unit']}{verdict}\n")
