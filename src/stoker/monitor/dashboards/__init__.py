"""Grafana's dashboards: the JSON that it imports, and next to it the code that `make` generates it from."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
"""Folder of the JSON files."""


def dashboard_texts() -> dict[str, str]:
    """Return file name -> JSON of each dashboard."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.json"))}
