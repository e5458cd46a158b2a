"""One JSON object a line: `{"step": 100, "loss": 0.31, ...}`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from stoker.telemetry import catalogue
from stoker.telemetry.writers.appended import AppendedFile

_to_json = json.JSONEncoder(allow_nan=False).encode
"""As `json.dumps`, which makes an encoder for each line."""


class JsonLines:
    """Appends scalars to a file; each line is whole once `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = AppendedFile(path)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one line; what JSON cannot hold (NaN, infinity) is written as text."""
        line = {"step": step} | {name: _json_number(value) for name, value in scalars.items()}
        self._file.append(_to_json(line).encode() + b"\n")

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Drop the lines of later steps, and the half line of a writer that was killed."""
        lines = self._file.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _is_up_to(line, step, validated=validated)]
        if len(kept) < len(lines):
            self._file.replace(b"".join(kept))

    def close(self) -> None:
        """Flush to the disk and close."""
        self._file.close()


def _is_up_to(line: bytes, step: int, *, validated: bool) -> bool:
    try:
        scalars = json.loads(line)
        # An epoch's line comes after that of its last step.
        last = step if validated or catalogue.EPOCH.name not in scalars else step - 1
        return line.endswith(b"\n") and bool(scalars["step"] <= last)
    except (ValueError, KeyError, TypeError):
        return False


def _json_number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))
