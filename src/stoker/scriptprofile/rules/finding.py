"""A finding about a script: the line, the reason of the cost, the change, and the expected gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from stoker.scriptprofile.observations import Place

Sureness = Literal["measured", "likely", "possible"]
"""Measured in this run; derived from observations; or dependent on unknowns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptFinding:
    """One cost, or one silent error."""

    kind: str
    """Its name for programs: `sequential_map`."""

    place: Place
    """The line to change."""

    observation: str
    """The observation, a clause with figures."""

    why: str
    """Why it costs time, a sentence."""

    change: str
    """The change: code to paste, or a sentence if code says less."""

    gain: tuple[float, float] | None
    """Range of the factor in steps per second. None if it is not about speed."""

    sure: Sureness
    """How certain the finding is; a gain is always an estimate until it has been tried."""

    of_script: float = 1.0
    """The share of the script's time, without imports, that the gain affects; 1 if unknown."""

    def gain_text(self) -> str:
        """`1.2x to 2.5x`, or another benefit."""
        if self.gain is None:
            return "not speed"
        low, high = self.gain
        if high < MIN_GAIN:
            return "hardly any here"
        if self.kind == DEVICE_TIME:
            return f"at most {high:.2g}x"
        return f"{low:.2g}x to {high:.2g}x"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "kind": self.kind,
            "file": self.place.file,
            "line": self.place.line,
            "seen": self.observation,
            "why": self.why,
            "change": self.change,
            "gain": list(self.gain) if self.gain else None,
            "sure": self.sure,
        }


DEVICE_TIME = "device_time"
"""Kind of the finding about the most expensive kernel class: its gain is an upper bound."""

MIN_GAIN = 1.05
"""A smaller gain is not reported."""

MAX_GAIN = 20.0
"""Largest estimate: a share that is nearly everything is not known precisely enough."""


def gain_of(share: float, *, least: float = 0.3) -> tuple[float, float]:
    """The gain if at least a part, and at most all, of a share of the step is saved.

    Args:
        share: Share of the step's time, in [0, 1].
        least: The part of it that is certainly saved.
    """
    share = min(max(share, 0.0), 1.0 - 1.0 / MAX_GAIN)
    return 1.0 / (1.0 - least * share), 1.0 / (1.0 - share)
