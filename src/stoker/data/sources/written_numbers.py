"""Numbers in written form: `"3,961,229"`, `$72.50`, `12%`, `857,79`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from stoker.core.errors import ConfigError

_SPACES = " \u00a0\u202f\u2009"
"""Separators of groups of digits."""

_EXAMPLE = re.compile(
    rf"(?P<before>[^0-9+-]*)[+-]?(?P<core>[0-9](?:[0-9.,'{_SPACES}]*[0-9])?)(?P<after>[^0-9]*)"
)
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(.)[0-9]{3}(?:\1[0-9]{3})*")
"""No group follows a leading 0: 0,123 is less than one."""
_UNITS = re.compile(rf"[$€£¥₹%{_SPACES}]*")
"""What may surround a number in a guess; in `data.types`, the surroundings of the example."""

_SIGNS = re.compile("[-+()\u2212\u2013]")
"""Written forms of a negative number; around an example they would be lost as a unit."""

_WITH_POINT = r"^\s*[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*$"
"""A number that is read without an example, with a decimal point."""

GUESS_SHARE = 0.99
"""Least share of the values that a guess must be able to read."""

_MARKS = ((",", "."), (".", ","), (" ", "."), (" ", ","), ("'", "."))
"""Group separator and decimal mark, the likeliest first: 1,234 is one thousand and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberText:
    """A text column whose values are numbers in written form."""

    number: str
    """One such number as an example, with its marks and unit: "1,234.5", "1.234,5 €", "$9.99", "12%".
    A single mark before three digits separates groups, unless a 0 precedes it: "1,234" is 1234, "0,123" less
    than one. Units are left out: 12% is 12."""

    def __post_init__(self) -> None:
        text = self.number.strip()
        found = _EXAMPLE.fullmatch(text)
        if (
            found is None
            or _SIGNS.search(found["before"] + found["after"])
            or re.fullmatch(self.pattern, text) is None
        ):
            raise ConfigError(
                "data.types: number must be an example of a number as the column has them",
                got=self.number,
                fix='Write for example {number: "1,234.5"}.',
            )

    @property
    def pattern(self) -> str:
        """A regular expression (RE2): sign, sign after the unit, whole part, decimals."""
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
        """Converts texts to the form `1234.5`; a text that is not such a number is unchanged.

        If the decimal mark is a comma, "1.5" is not a number: it would be 1.5 next to a 1.500 that is 1500.

        Args:
            values: [rows] strings.
        """
        trimmed = pc.utf8_trim_whitespace(values)
        is_number = pc.match_substring_regex(trimmed, self.pattern)
        cut = pc.replace_substring_regex(trimmed, self.pattern, r"\1\2\3;\4")
        # The rest of a match: signs, digits, group separators, one semicolon.
        cut = pc.replace_substring_regex(cut, r"[^0-9;+-]", "")
        cut = pc.replace_substring(pc.replace_substring_regex(cut, ";$", ""), ";", ".")
        if self.decimal != ".":
            strange = pc.match_substring_regex(values, _WITH_POINT)
            values = pc.if_else(strange, pc.binary_join_element_wise("?", values, ""), values)
        return pc.if_else(is_number, cut, values)


def _marks(core: str) -> tuple[str, str]:
    """The group separator and the decimal mark in an example's digits."""
    marks = [character for character in core if not character.isdigit()] or ["."]
    first, last = marks[0], marks[-1]
    if first != last:
        return first, last
    if _GROUPED.fullmatch(core):
        return first, "," if first == "." else "."
    return "." if last == "," else ",", last


def guess(texts: Sequence[str]) -> NumberText | None:
    """The written form of a text column's numbers, if nearly all values have it and no other form is likely.

    Args:
        texts: Some of its values, without those that mean "missing".
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
    """Whether numbers may be codes, phone numbers or addresses, or have other marks.

    Args:
        cores: The numbers without signs and units.
        others: The texts without the marks.
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
    # 1 250 000 next to 850 000 is a number; 555 123 456 alone, or next to 555123456, is unclear.
    widths = {len(re.split(r"\D", core, maxsplit=1)[0]) for core in cores}
    return len(widths) == 1 or max(widths) > 3


_MARKED = re.compile(r"[0-9]+[.,][0-9]+")
"""A number with other decimals than the rest: "0,5" if the rest is grouped by commas."""

_ZERO_FIRST = re.compile(r"0[0-9]")
"""Beginnings of codes, phone numbers and dates, but not of numbers."""

_DOTS_OF_ADDRESS = 3
"""Pattern of 192.168.100.200; in numbers, one of the parts would soon exceed 255."""
