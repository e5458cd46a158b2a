"""The ledger of a tuning: every sample and every decision, in order.

Each event is a line of JSON, which is on the disk before the search acts on it. So the measurements of a
killed tuning are not lost, and every decision can be derived again from its samples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stoker.core.errors import DataError
from stoker.core.files import full_disk_is_named
from stoker.tune.compare import gain_of, parity_of, threshold_of


class Ledger:
    """An append-only file of events."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            FileExistsError: the file exists.
        """
        self.path = path
        with full_disk_is_named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8")

    def write(self, event: str, facts: Mapping[str, Any]) -> None:
        """Append an event with its facts, and wait until it is on the disk.

        Raises:
            FullDisk: the disk is full.
        """
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        with full_disk_is_named(self.path):
            self._file.write(json.dumps({"event": event, "at": at} | dict(facts)) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with full_disk_is_named(self.path):
            self._file.close()


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a ledger; skip the last line if a kill has truncated it.

    Raises:
        DataError: a line before the last one is not JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            found: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                return
            raise DataError(f"{path}:{number} must be JSON", got=line[:80]) from None
        yield found


def replay(path: Path) -> list[dict[str, Any]]:
    """Derive each decision of a ledger again from its samples; return the decisions that differ.

    Returns:
        For each of them: lever, recorded decision, and the decision that follows from the samples.
    """
    threshold, differing = 1.0, []
    for event in events(path):
        if event["event"] == "noise":
            threshold = threshold_of(gain_of([tuple(pair) for pair in event["pairs"]]))
        if event["event"] == "decision" and event.get("pairs"):
            found = decide(event, threshold=threshold)
            if found != event["decision"]:
                differing.append(
                    {"lever": event["lever"], "decided": event["decision"], "follows": found}
                )
    return differing


def decide(event: Mapping[str, Any], *, threshold: float) -> str:
    """Return the decision that follows from the samples of a lever: `kept`, `reverted` or `proposed`.

    Args:
        event: The samples: `pairs` of speeds; `input_pairs`, if the input's CPU time decides; loss
            `curves` of both settings, if the lever changes numbers; and `only_proposed`.
        threshold: The minimum ratio that counts as a gain.
    """
    speed = gain_of([tuple(pair) for pair in event["pairs"]])
    if event.get("input_pairs"):
        cheaper = gain_of([tuple(pair) for pair in event["input_pairs"]])
        # Training must not become slower, e.g. by reading more from a slow disk.
        helps = cheaper.low > threshold and speed.high > 1.0 / threshold
    else:
        helps = speed.low > threshold
    if not helps:
        return "reverted"
    if event.get("only_proposed"):
        return "proposed"
    curves = event.get("curves")
    if curves is not None and not parity_of(curves[0], curves[1]).alike:
        return "proposed"
    return "kept"
