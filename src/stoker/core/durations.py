"""Durations as people write them: `90s`, `10m`, `1h30m`, `1.5d`."""

from __future__ import annotations

import re

from stoker.core.errors import ConfigError

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_PART = r"\d+(?:\.\d+)?[smhd]"
DURATION = rf"(?:{_PART})+"
"""Regular expression of a duration; use it with `re.ASCII`."""

LONGEST_S = 366 * 86_400.0
"""A year. A longer duration is certainly a typo, and the clocks of operating systems cover only some years."""


def seconds_of(text: str, *, name: str, least_s: float = 0.0) -> float:
    """Return a duration in seconds.

    Args:
        text: `90s`, `10m`, `1h30m` or `1.5d`.
        name: Name of the option, for the message.
        least_s: Shortest duration that is allowed, seconds.

    Raises:
        ConfigError: the text has another form, or the duration is too short or above a year.
    """
    text = text.strip()
    parts = re.findall(_PART, text) if re.fullmatch(DURATION, text, re.ASCII) else []
    seconds = sum(float(part[:-1]) * _UNITS_S[part[-1]] for part in parts)
    if not parts or not least_s <= seconds <= LONGEST_S:
        raise ConfigError(
            f"{name} must be a duration from {least_s:g} s to a year, with its unit",
            got=text,
            fix="E.g. 30s, 10m, 1h30m or 2d.",
        )
    return seconds
