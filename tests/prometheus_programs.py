"""Debian's Prometheus, Alertmanager and their tools."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / ".tools"
FOLDER = TOOLS / "prometheus" / "usr" / "bin"
"""Where `make test` unpacks them."""

DEBIAN_NAMES = {"alertmanager": "prometheus-alertmanager"}
"""Program -> its name in Debian's package."""


def program(name: str) -> str:
    """A program: on the PATH, or where `make test` has unpacked it; skips the test where there is none."""
    for each in (name, DEBIAN_NAMES.get(name, name)):
        unpacked = FOLDER / each
        found = shutil.which(each) or (str(unpacked) if unpacked.is_file() else None)
        if found is not None:
            return found
    outcome = TOOLS / "prometheus.txt"
    why = outcome.read_text().strip() if outcome.is_file() else "`make test` unpacks it"
    if os.environ.get("CI") == "true" and why == "installed":
        pytest.fail(f"`make test` unpacked {name}, but it is not there")
    pytest.skip(f"no {name}: {why}")
