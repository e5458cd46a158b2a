"""A finding about a script: which line, why it costs, what to change, and the expected gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from stoker.scriptprofile.observations import Place

Sureness = Literal["measured", "likely", "possible"]
"""Measured in this run; follows from what was observed; depends on what was not observed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptFinding:
    """One thing that costs, or that is silently wrong."""

    kind: str
    """Its name for programs: `sequential_map`."""

    place: Place
    """The line to change."""

    observation: str
    """What was observed, a clause with figures."""

    why: str
    """Why that costs, a sentence."""

    change: str
    """What to write instead: code to paste, or a sentence where code says less."""

    gain: tuple[float, float] | None
    """From, to: how many times more steps a second. None where it is not about speed."""

    sure: Sureness
    """How sure the finding is; a gain is always an estimate until it has been tried."""

    of_script: float = 1.0
    """The share of the script's time without imports that its gain is about; 1 where not known."""

    def gain_text(self) -> str:
        """`1.2x to 2.5x`, or what else it brings."""
        if self.gain is None:
            return "not speed"
        low, high = self.gain
        if high < LEAST_GAIN:
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

LEAST_GAIN = 1.05
"""A smaller gain is not reported as one."""

MOST_GAIN = 20.0
"""No estimate goes further: a share that is nearly all is not known that well."""


def gain_of(share: float, *, least: float = 0.3) -> tuple[float, float]:
    """The gain where between a part and all of a share of the step goes away.

    Args:
        share: Of the step's time, in [0, 1].
        least: The part of it that goes at least.
    """
    share = min(max(share, 0.0), 1.0 - 1.0 / MOST_GAIN)
    return 1.0 / (1.0 - least * share), 1.0 / (1.0 - share)
