"""Numbers as text for people: few digits, a unit, and an exponent only if it is needed."""

from __future__ import annotations

import math

DIGITS = 5
"""Default number of significant digits."""


def number(value: float, digits: int = DIGITS) -> str:
    """`12,345`, `0.95162` or `1.2e-07`.

    Args:
        value: Any number.
        digits: Significant digits; a whole number up to 10^15 is written in full.
    """
    if not math.isfinite(value):
        return f"{value}"
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    rounded = float(f"{value:.{digits - 1}e}")
    if not 1e-4 <= abs(rounded) < 1e15:
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def percent(share: float) -> str:
    """`12.3%`; a share above zero is never written as zero."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def count_of(count: int, whole: int) -> str:
    """`1,234 (12.3%)`."""
    return f"{count:,} ({percent(count / max(whole, 1))})"


def seconds(value_s: float) -> str:
    """`2 h 5 min`, `3 min 20 s`, `1.23 s`, `45.6 ms` or `789 us`."""
    if value_s >= 2 * 3600:
        hours, minutes = divmod(round(value_s / 60), 60)
        return f"{hours:,} h {minutes} min"
    if value_s >= 120:
        minutes, rest = divmod(round(value_s), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    # Round first: otherwise 999.9 us would be written as 1e+03 us.
    value_s = float(f"{value_s:.3g}")
    if value_s >= 1 or value_s == 0:
        return f"{value_s:g} s"
    return f"{value_s * 1e3:.3g} ms" if value_s >= 1e-3 else f"{value_s * 1e6:.3g} us"
