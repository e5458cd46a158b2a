"""Count the invalid records of an ingest, and enforce the limit `data.max_bad_rows`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stoker.core.errors import DataError, Plain
from stoker.data.dataset import BadRow
from stoker.data.sources.config import IngestConfig, as_lists
from stoker.data.sources.records import SHOWN_FAULTS, Block, Fault
from stoker.data.sources.written_numbers import guess


class Faults:
    """The bad records so far, and the limit for their number."""

    def __init__(self, config: IngestConfig) -> None:
        """Start without bad records."""
        self.listed: list[Fault] = []
        self.count = 0
        self._config = config

    def add(self, block: Block) -> None:
        """Add the bad records of the next block."""
        self.count += block.bad
        room = self._config.max_bad_rows + SHOWN_FAULTS - len(self.listed)
        self.listed += block.faults[:room]

    def resume(self, faults: Sequence[Fault], *, bad: int) -> None:
        """Continue with the bad records of an earlier ingest."""
        self.listed, self.count = list(faults), bad

    def bad_rows(self) -> tuple[BadRow, ...]:
        """Return the bad records in the form that the manifest holds."""
        return tuple(
            BadRow(file=fault.file, row=fault.row, column=fault.column, reason=fault.reason)
            for fault in self.listed
        )

    @property
    def too_many(self) -> bool:
        """Whether there are more bad records than `data.max_bad_rows` allows."""
        return self.count > self._config.max_bad_rows

    def check(self) -> None:
        """Check that there are not too many bad records.

        Raises:
            DataError: there are too many; the error names the first ones.
        """
        if not self.too_many:
            return
        first = _of_each_kind(self.listed)
        allowed = self._config.max_bad_rows
        rest = f"; and {self.count - len(first):,} more" if self.count > len(first) else ""
        retype = next((fault for fault in first if fault.retype), None)
        odd = next((fault for fault in first if _OTHER_LENGTH.match(fault.reason)), None)
        hint = "Fix them, or"
        if retype:
            hint = f"Fix them; or set data.types: {{{retype.column}: {_type(retype)}}}; or"
        elif odd:
            hint = f"Fix them; or set {as_lists(odd.column)} to read lists of any length; or"
        raise DataError(
            f"at most {allowed} records may be bad (data.max_bad_rows); "
            f"bad records: {'; '.join(map(_text, first))}{rest}",
            got=Plain(f"{self.count:,} bad record{'s' if self.count > 1 else ''}"),
            fix=f"{hint} leave them out with --set data.max_bad_rows={self.count}.",
        )


def _of_each_kind(faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults that the error names, in the order of the data.

    The first fault of each kind is chosen before others.
    """
    kinds: dict[tuple[str, str], int] = {}
    for index, fault in enumerate(faults):
        kinds.setdefault((fault.column, _VALUES.sub("", fault.reason)), index)
    firsts = set(kinds.values())
    chosen = sorted(range(len(faults)), key=lambda index: index not in firsts)[:SHOWN_FAULTS]
    return [faults[index] for index in sorted(chosen)]


_VALUES = re.compile(r"'.*'|\d+")
"""Parts of a reason (quoted values, numbers) that may differ between faults of the same kind."""


def _type(fault: Fault) -> str:
    """Return the type with which a failed column of numbers could be read.

    If the bad value is a number in written form, such as "1,234.5 kg", the type is an example of that form. Its
    decimal mark must be a point, because the other values of the column are plain numbers. Otherwise: string.
    """
    shown = _NOT_A_NUMBER.fullmatch(fault.reason)
    number = guess([shown[1], "0"]) if shown else None
    return "string" if number is None or number.decimal != "." else f'{{number: "{number.number}"}}'


_NOT_A_NUMBER = re.compile(r"'(.+)' is not a number")


_OTHER_LENGTH = re.compile(r"a vector of length \d+ instead|it holds \d+ values instead")


def _text(fault: Fault) -> str:
    where = f", column {fault.column!r}" if fault.column else ""
    return f"{fault.file} row {fault.row}{where}: {fault.reason}"
