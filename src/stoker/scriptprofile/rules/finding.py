"""A finding about a script: the line, why it costs time, the change, and the expected gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from stoker.scriptprofile.observations import Place

Sureness = Literal["measured", "likely", "possible"]
"""How certain a finding is: measured in this run; derived from observations; or dependent on unknown facts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptFinding:
    """A line of a script that costs time, or a silent error."""

    kind: str
    """Name of this kind of finding for programs, e.g. `sequential_map`."""

    place: Place
    """The line to change."""

    observation: str
    """What was observed, a clause with figures."""

    why: str
    """Why it costs time, a sentence."""

    change: str
    """What to change: code to paste, or a sentence if code would say less."""

    gain: tuple[float, float] | None
    """Range of the factor by which steps per second grow; None if the finding is not about speed."""

    sure: Sureness
    """How certain the finding is; the gain is only an estimate until the change has been tried."""

    of_script: float = 1.0
    """Share of the script's time, without imports, to which the gain applies; 1 if unknown."""

    def gain_text(self) -> str:
        """`1.2x to 2.5x`, or that speed hardly changes."""
        if self.gain is None:
            return "not speed"
        low, high = self.gain
        if high < MIN_GAIN:
            return "hardly any here"
        if self.kind == DEVICE_TIME:
            return f"at most {high:.2g}x"
        return f"{low:.2g}x to {high:.2g}x"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values, for `--json` and profile.json."""
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
"""Kind of the finding about the kernel class that takes most time: its gain is an upper bound."""

MIN_GAIN = 1.05
"""Minimum factor by which a change must speed up steps to be reported as a gain."""

MAX_GAIN = 20.0
"""Maximum estimated gain: a share close to 100 % is not known precisely enough for a larger estimate."""


def gain_of(share: float, *, min_saved: float = 0.3) -> tuple[float, float]:
    """Return the range of the gain if a change saves some or all of a share of the step.

    Args:
        share: Share of the step's time that the change affects, in [0, 1].
        min_saved: Minimum part of this share that the change saves, in [0, 1].
    """
    share = min(max(share, 0.0), 1.0 - 1.0 / MAX_GAIN)
    return 1.0 / (1.0 - min_saved * share), 1.0 / (1.0 - share)
