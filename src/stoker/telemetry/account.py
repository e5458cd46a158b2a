"""Reads the account of a run's wall time: a JSON file that `RunTime` keeps up to date."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from stoker.telemetry.processes import Moment
from stoker.telemetry.wall_time import NAMES

FORMAT = 1
"""Version of the file format; a reader refuses other versions."""


def read_earlier(path: Path | None) -> dict[str, Any]:
    """Return the account of a run's earlier processes; an empty account if it does not exist or cannot be read."""
    nothing: dict[str, Any] = {
        "parts": dict.fromkeys(NAMES, 0.0),
        "processes": 0,
        "repeated_steps": 0,
        "input_wait_s": 0.0,
        "step": 0,
        "waiting_s": 0.0,
        "restarts": {},
        "alive": None,
        "end": "",
    }
    if path is None:
        return nothing
    try:
        return read_account(path)
    except (OSError, ValueError):
        return nothing


def read_account(path: Path) -> dict[str, Any]:
    """Return the account of a run: its parts, processes, restarts and waits.

    Files of earlier versions of Stoker lack `waiting_s`, `restarts`, `alive` and `end`: they count as empty.

    Raises:
        OSError: The file cannot be read.
        ValueError: Its content is incomplete or damaged, or has the format of another version.
    """
    try:
        return _checked(json.loads(path.read_text()))
    except LookupError as error:
        raise ValueError(f"entry {error} is missing") from error
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it has another form: {error}") from error


def _checked(found: Any) -> dict[str, Any]:
    if found.get("format", FORMAT) != FORMAT:
        raise ValueError(f"format {found['format']!r}; this version of Stoker reads {FORMAT}")
    alive = found.get("alive")
    return {
        "parts": {name: _seconds(found["parts"].get(name, 0.0)) for name in NAMES},
        "input_wait_s": _seconds(found["input_wait_s"]),
        **{name: _count(found[name]) for name in ("processes", "repeated_steps", "step")},
        "waiting_s": _seconds(found.get("waiting_s", 0.0)),
        "restarts": {str(c): _count(n) for c, n in found.get("restarts", {}).items()},
        "alive": None if alive is None else _moment(**alive),
        "end": str(found.get("end", "")),
    }


def _moment(*, unix_s: Any, boot: Any, boot_s: Any) -> Moment:
    return Moment(unix_s=_seconds(unix_s), boot=str(boot), boot_s=_seconds(boot_s))


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("seconds must be a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError("seconds must be finite and not negative")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError("a count must be a whole number that is not negative")
    return value
