"""Numbers in written form: `"3,961,229"`, `$72.50`, `12%`, `857,79`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from stoker.core.errors import ConfigError

_SPACES = " \u00a0\u202f\u2009"
"""Kinds of spaces that may separate groups of digits, or a number and its unit."""

_EXAMPLE = re.compile(
    rf"(?P<before>[^0-9+-]*)[+-]?(?P<core>[0-9](?:[0-9.,'{_SPACES}]*[0-9])?)(?P<after>[^0-9]*)"
)
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(.)[0-9]{3}(?:\1[0-9]{3})*")
"""A whole number with group separators. It does not begin with 0: in 0,123 the comma is a decimal mark."""
_UNITS = re.compile(rf"[$€£¥₹%{_SPACES}]*")
"""Units that `guess` accepts around a number; an example in `data.types` may have other units."""

_SIGNS = re.compile("[-+()\u2212\u2013]")
"""Signs of a negative number. Around an example they are refused, because they would be removed like a unit."""

_WITH_POINT = r"^\s*[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*$"
"""A plain number with a decimal point, which can be read without an example in `data.types`."""

GUESS_SHARE = 0.99
"""Minimum share of the values that must have the form that `guess` returns."""

_MARKS = ((",", "."), (".", ","), (" ", "."), (" ", ","), ("'", "."))
"""Pairs of group separator and decimal mark, the most likely first: 1,234 is more than a thousand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberText:
    """The written form of the numbers in a text column."""

    number: str
    """Example of such a number, with its marks and unit: "1,234.5", "1.234,5 €", "$9.99", "12%". A single mark before
    three digits is a group separator, unless a 0 precedes it: "1,234" is 1234, but "0,123" is less than one. Units are
    removed: 12% is read as 12."""

    def __post_init__(self) -> None:
        text = self.number.strip()
        found = _EXAMPLE.fullmatch(text)
        if (
            found is None
            or _SIGNS.search(found["before"] + found["after"])
            or re.fullmatch(self.pattern, text) is None
        ):
            raise ConfigError(
                "data.types: number must be an example of the numbers in the column",
                got=self.number,
                fix='Write for example {number: "1,234.5"}.',
            )

    @property
    def pattern(self) -> str:
        """A regular expression (RE2) for such numbers; groups: sign, sign after the unit, whole part, decimals."""
        before, core, after = self._parts
        groups, decimal = _marks(core)
        mark = f"[{_SPACES}]" if groups in _SPACES else re.escape(groups)
        grouped = f"[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{3}})+|"
        around = [
            f"(?:{re.escape(part.strip())})?" if part.strip() else "" for part in (before, after)
        ]
        space = f"[{_SPACES}]*"
        return (
            rf"^([+-]?){around[0]}{space}([+-]?)((?:{grouped}[0-9]+))"
            rf"(?:{re.escape(decimal)}([0-9]+))?{space}{around[1]}$"
        )

    @property
    def decimal(self) -> str:
        """The decimal mark."""
        return _marks(self._parts[1])[1]

    @property
    def _parts(self) -> tuple[str, str, str]:
        found = _EXAMPLE.fullmatch(self.number.strip())
        assert found is not None
        return found["before"], found["core"], found["after"]

    def plain(self, values: pa.Array) -> pa.Array:
        """Convert written numbers to the form `1234.5`; a string in any other form is not changed.

        If the decimal mark is a comma, "1.5" is refused: it is unclear whether it means 1.5, because "1.500" is read
        as 1500.

        Args:
            values: [rows] strings.
        """
        trimmed = pc.utf8_trim_whitespace(values)
        is_number = pc.match_substring_regex(trimmed, self.pattern)
        cut = pc.replace_substring_regex(trimmed, self.pattern, r"\1\2\3;\4")
        # A match now has signs, digits, group separators and a semicolon; the separators are removed.
        cut = pc.replace_substring_regex(cut, r"[^0-9;+-]", "")
        cut = pc.replace_substring(pc.replace_substring_regex(cut, ";$", ""), ";", ".")
        if self.decimal != ".":
            strange = pc.match_substring_regex(values, _WITH_POINT)
            values = pc.if_else(strange, pc.binary_join_element_wise("?", values, ""), values)
        return pc.if_else(is_number, cut, values)


def _marks(core: str) -> tuple[str, str]:
    """Return the group separator and the decimal mark of an example, found from its digits and marks."""
    marks = [character for character in core if not character.isdigit()] or ["."]
    first, last = marks[0], marks[-1]
    if first != last:
        return first, last
    if _GROUPED.fullmatch(core):
        return first, "," if first == "." else "."
    return "." if last == "," else ",", last


def guess(texts: Sequence[str]) -> NumberText | None:
    """Return the written form of a text column's numbers; None unless nearly all values have it, and it is clear.

    Args:
        texts: Some values of the column, without values that mean "missing".
    """
    cores, before, after = [], set(), set()
    for text in texts:
        found = _EXAMPLE.fullmatch(text.strip())
        if (
            found
            and "+" not in text
            and _UNITS.fullmatch(found["before"])
            and _UNITS.fullmatch(found["after"])
        ):
            cores.append(found["core"])
            before.add(found["before"].strip())
            after.add(found["after"].strip())
    before, after = before - {""}, after - {""}
    if not cores or len(cores) < GUESS_SHARE * len(texts) or len(before) + len(after) > 1:
        return None
    for groups, decimal in _MARKS:
        digits = f"1{groups}234{decimal}5"
        number = NumberText(number=f"{''.join(before)}{digits}{''.join(after)}")
        others = [core for core in cores if re.fullmatch(number.pattern, core) is None]
        if len(cores) - len(others) >= GUESS_SHARE * len(texts):
            is_sure = bool(before or after) or any(decimal in core for core in cores)
            return None if _is_doubtful(cores, others, groups, is_sure=is_sure) else number
    return None


def _is_doubtful(
    cores: Sequence[str], others: Sequence[str], groups: str, *, is_sure: bool
) -> bool:
    """Return whether the values may be codes, phone numbers or addresses, or may have different marks.

    Args:
        cores: The numbers, without signs and units.
        others: The numbers that do not have the assumed marks.
        groups: The group separator.
        is_sure: Whether a unit or decimals show that they are numbers.
    """
    if any(_MARKED.fullmatch(core) for core in others) or any(
        _ZERO_FIRST.match(core) for core in cores
    ):
        return True
    addresses = [core for core in cores if core.count(".") == _DOTS_OF_ADDRESS]
    if addresses and all(int(part) <= 255 for core in addresses for part in core.split(".")):
        return True
    if groups not in " ." or is_sure:
        return False
    # If a column has 1 250 000 and 850 000, they are numbers. If all values have the form of 555 123 456, or some have
    # the form of 555123456, it is unclear.
    widths = {len(re.split(r"\D", core, maxsplit=1)[0]) for core in cores}
    return len(widths) == 1 or max(widths) > 3


_MARKED = re.compile(r"[0-9]+[.,][0-9]+")
"""A number whose mark must be a decimal mark: "0,5", although other values have commas as group separators."""

_ZERO_FIRST = re.compile(r"0[0-9]")
"""Beginning of codes, phone numbers and dates; numbers do not begin like this."""

_DOTS_OF_ADDRESS = 3
"""Number of dots in an IP address such as 192.168.100.200. In a column of numbers, a part would soon exceed 255."""
