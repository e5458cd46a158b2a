"""Convert text to numbers: find the type that a column's values suggest, and read the values in that type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stoker.data.sources.config import Override
from stoker.data.sources.records import Assumption, Cells, Reading, good_cells, joined, with_fault
from stoker.data.sources.written_numbers import NumberText, guess

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
"""Strings that mean "missing" in a column of numbers."""

NUMBER_SHARE = 0.99
"""A column holds numbers if at least this share of its present values are numbers; the other values are bad. With a
smaller share, the column holds text."""

SAMPLED = 1000
"""Maximum number of values of a text column that are checked for numbers in written form."""

WIDEST_FLOAT32 = 2**24
"""Magnitude up to which float32 holds every whole number."""

WIDEST_FLOAT64 = 2**53
"""Magnitude up to which float64 holds every whole number."""

_INT = r"^[+-]?[0-9]+$"
_NUMBER = r"^[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|(?i:inf|infinity))$"
_BOOL = r"^(?i:true|false)$"

NOT_UTF8 = "{} is not UTF-8"
HOLDS_NUL = "{} holds a NUL byte"
NOT_A_NUMBER = "{} is not a number"
NOT_WHOLE = "{} is not a whole number"
NOT_BOOL = "{} is neither true nor false"
TOO_WIDE = "{} does not fit in 64 bits"
TOO_WIDE_WITH_GAPS = (
    "{} does not fit: whole numbers beyond 2^53 need a column without missing values"
)
TOO_LARGE = "{} does not fit in a 32-bit float"


@dataclass(slots=True)
class Tally:
    """Counts of the forms of one column's values, block by block."""

    missing: int = 0
    """Number of values that mean "missing" in a column of numbers."""

    present: int = 0
    """Number of all other values."""

    ints: int = 0
    """Number of present values that are whole numbers, of any size."""

    floats: int = 0
    """Number of present values that are other numbers."""

    bools: int = 0
    """Number of present values that are true or false."""

    widest: float = 0.0
    """Largest magnitude of all numbers."""

    beyond: int = 0
    """Number of values beyond 2^53, up to which float64 holds every whole number."""

    unfit: int = 0
    """Number of whole numbers that do not fit in 64 bits."""

    sample: list[str] = field(default_factory=list)
    """A sample of the values, if the column does not hold only whole numbers."""

    def add(self, text: pa.Array, missing: pa.Array) -> None:
        """Count the values of one block.

        Args:
            text: [rows] strings.
            missing: The strings that mean "missing".
        """
        values = _present(text, missing)
        count = len(values) - values.null_count
        self.missing += values.null_count
        self.present += count
        whole = _all_ints(values)
        if whole is None:
            is_number = pc.match_substring_regex(values, _NUMBER)
            is_whole = pc.match_substring_regex(values, _INT)
            count = _count(is_whole)
            self.unfit += _unfit(values.filter(pc.fill_null(is_whole, False)))
            self.floats += _count(is_number) - count
            self.bools += _count(pc.match_substring_regex(values, _BOOL))
            whole = _floats(values.filter(pc.fill_null(is_number, False)))
            self.keep(values)
        self.ints += count
        self.widen(whole)

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name in ("missing", "present", "ints", "floats", "bools"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.widest = max(self.widest, other.widest)
        self.beyond += other.beyond
        self.unfit += other.unfit
        self.sample += other.sample[: SAMPLED - len(self.sample)]

    def keep(self, values: pa.Array) -> None:
        """Add values of a text column to the sample, until it is full.

        Args:
            values: [rows] strings; null if missing.
        """
        room = SAMPLED - len(self.sample)
        self.sample += [text for text in values[: 2 * room].to_pylist() if text is not None][:room]

    def widen(self, numbers: pa.Array) -> None:
        """Update the largest magnitude, and the number of values beyond 2^53, with more numbers."""
        if len(numbers) > numbers.null_count:
            ends = pc.min_max(numbers).as_py()
            widest = max(abs(float(ends["min"])), abs(float(ends["max"])))
            if widest > WIDEST_FLOAT64:
                self.beyond += _count(
                    pc.greater(pc.abs(numbers.cast(pa.float64(), safe=False)), WIDEST_FLOAT64)
                )
            self.widest = max(self.widest, widest)

    @property
    def kind(self) -> str:
        """What the column holds: `numbers` (including true and false) or `text`."""
        return "text" if self.reading(None, gaps_end_records=True) == "string" else "numbers"

    def settled(self, override: Override | NumberText | None, *, gaps_end_records: bool) -> Reading:
        """Return how the column is read; its values may also be numbers in written form, or ids.

        If more than 1 % of the whole numbers do not fit in the column's type, they are ids, which are text.
        """
        if isinstance(override, NumberText):
            natural = self.reading(None, gaps_end_records=gaps_end_records)
            return natural if natural in ("int", "whole", "float") else "float"
        how = self.reading(override, gaps_end_records=gaps_end_records)
        too_wide = {"int": self.unfit, "whole": self.beyond}.get(how, 0)
        ids = override is None and too_wide > (1 - NUMBER_SHARE) * self.present
        return "string" if ids else how

    def reading(self, override: Override | None, *, gaps_end_records: bool) -> Reading:
        """Return how the column is read, by the counts alone.

        Args:
            override: The column's setting in `data.types`.
            gaps_end_records: Whether a record without a value is a bad record, as for the label; then the
                stored column has no missing value.
        """
        whole: Reading = "int" if gaps_end_records or not self.missing else "whole"
        mostly_bool = self.present > 0 and self.bools >= NUMBER_SHARE * self.present
        truth: Reading = "bool" if whole == "int" else "bool_with_gaps"
        if override is not None and override != "int":
            return override
        if mostly_bool:
            return truth
        if override == "int":
            return whole
        if not self.present or self.ints + self.floats < NUMBER_SHARE * self.present:
            return "string"
        return "float" if self.floats else whole


def assumed_of(name: str, how: Reading, tally: Tally) -> Assumption | None:
    """Return the assumption about a column that is not in `data.types`; None if the user need not be warned."""
    if how != "string":
        return None
    if tally.ints > NUMBER_SHARE * tally.present > 0:
        return Assumption(
            column=name,
            text=f"column {name!r} is read as text, because its whole numbers, up to {tally.widest:.3g}, do "
            f"not fit in 64 bits. This is right for ids; otherwise set data.types: {{{name}: float}}",
        )
    number = guess(tally.sample)
    if number is None:
        return None
    text = next((each for each in tally.sample if not each.isdigit()), tally.sample[0])
    read = number.plain(pa.array([text]))[0].as_py()
    return Assumption(
        column=name,
        text=f"column {name!r} is read as text, but looks like numbers: {text!r} would be {read}. For "
        f'numbers set data.types: {{{name}: {{number: "{number.number}"}}}}; for text, {{{name}: string}}',
        number=number.number,
    )


def clean(raw: pa.Array, override: Override | NumberText | None = None) -> Cells:
    """Convert bytes to strings; a value that is not UTF-8 or contains a NUL byte is bad.

    Args:
        raw: [rows] of type binary or string.
        override: The column's setting in `data.types`. If it is an example of a written number, written
            numbers become plain numbers such as `1234.5`.
    """
    column = _cleaned(raw)
    if isinstance(override, NumberText):
        return replace(column, values=override.plain(column.values))
    return column


def _cleaned(raw: pa.Array) -> Cells:
    try:
        text = raw.cast(pa.binary()).cast(pa.string())
        column = good_cells(text, raw)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        broken = np.array([not _is_utf8(value) for value in raw.cast(pa.binary()).to_pylist()])
        text = pc.if_else(pa.array(broken), None, raw.cast(pa.binary())).cast(pa.string())
        column = with_fault(good_cells(text, raw), broken, NOT_UTF8)
    return with_fault(column, _mask(pc.match_substring(text, "\0")), HOLDS_NUL)


def _is_utf8(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def read_text(column: Cells, reading: Reading, missing: pa.Array, *, wide: bool) -> Cells:
    """Convert strings to a column's stored type.

    Args:
        column: Result of `clean`.
        reading: How the column is read.
        missing: The strings that mean "missing" in a column of numbers.
        wide: Whether whole numbers with missing values are stored as float64, not float32.
    """
    if reading == "string":
        return column
    values = _present(column.values, missing)
    if reading == "float":
        found = _read_floats(values, column.raw)
    elif reading in ("bool", "bool_with_gaps"):
        found = _read_bools(values, column.raw)
    else:
        found = _read_ints(values, column.raw)
    if reading in ("whole", "bool_with_gaps"):
        found = gapped(found, wide=wide)
    return joined(column, found, retype=True)


def gapped(column: Cells, *, wide: bool) -> Cells:
    """Convert int64 with nulls to float32, or float64 if `wide`; numbers beyond 2^53 are bad."""
    values = pc.fill_null(column.values, 0).to_numpy(zero_copy_only=False)
    beyond = (values > WIDEST_FLOAT64) | (values < -WIDEST_FLOAT64)
    kept = pc.if_else(pa.array(beyond), None, column.values) if beyond.any() else column.values
    target = pa.float64() if wide else pa.float32()
    column = replace(column, values=kept.cast(target, safe=False), retype=True)
    return with_fault(column, beyond, TOO_WIDE_WITH_GAPS)


def narrowed(values: pa.Array, raw: pa.Array) -> Cells:
    """Convert float64 to float32, and NaN to null; a finite number that would become infinite is bad."""
    numbers = pc.fill_null(values, np.nan).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        small = numbers.astype(np.float32)
    beyond = np.isinf(small) & np.isfinite(numbers)
    stored = pa.array(small, mask=np.isnan(small) | beyond)
    return with_fault(replace(good_cells(stored, raw), retype=True), beyond, TOO_LARGE)


def _read_floats(values: pa.Array, raw: pa.Array) -> Cells:
    strange = np.zeros(len(values), np.bool_)
    numbers = _all_floats(values)
    if numbers is None:
        is_number = _mask(pc.match_substring_regex(values, _NUMBER))
        strange = ~is_number & values.is_valid().to_numpy(zero_copy_only=False)
        numbers = _floats(pc.if_else(pa.array(is_number), values, None))
    infinite = _mask(pc.is_inf(numbers))
    if infinite.any():
        infinite &= ~_mask(pc.match_substring(values, "inf", ignore_case=True))
    column = with_fault(narrowed(numbers, raw), infinite, TOO_LARGE)
    return with_fault(column, strange, NOT_A_NUMBER)


def _read_bools(values: pa.Array, raw: pa.Array) -> Cells:
    is_bool = _mask(pc.match_substring_regex(values, _BOOL))
    strange = ~is_bool & values.is_valid().to_numpy(zero_copy_only=False)
    truth = pc.equal(pc.ascii_lower(pc.if_else(pa.array(is_bool), values, None)), "true")
    return with_fault(good_cells(truth.cast(pa.int64()), raw), strange, NOT_BOOL)


def _read_ints(values: pa.Array, raw: pa.Array) -> Cells:
    whole = _all_ints(values)
    if whole is not None:
        return good_cells(whole, raw)
    present = values.is_valid().to_numpy(zero_copy_only=False)
    digits = pc.if_else(pc.fill_null(pc.match_substring_regex(values, _INT), False), values, None)
    found, too_wide = _wide_ints(digits)
    # pandas writes 3 as 3.0 if the column has missing values, so 3.0 is read as a whole number, too.
    others = pc.if_else(pc.match_substring_regex(values, _NUMBER), values, None)
    numbers = pc.fill_null(_floats(others), np.nan).to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):
        exact = (np.trunc(numbers) == numbers) & (np.abs(numbers) <= WIDEST_FLOAT64)
    as_float = pa.array(np.where(exact, numbers, 0).astype(np.int64), mask=~exact)
    merged = pc.coalesce(found, as_float)
    nothing = present & merged.is_null().to_numpy(zero_copy_only=False)
    is_number = ~np.isnan(numbers)
    column = with_fault(good_cells(merged, raw), nothing & too_wide, TOO_WIDE)
    column = with_fault(column, nothing & is_number, NOT_WHOLE)
    return with_fault(column, nothing, NOT_A_NUMBER)


def _wide_ints(digits: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return [rows] the whole numbers that fit in 64 bits, and [rows] whether each does not fit."""
    plain = pc.replace_substring_regex(digits, r"^\+", "")
    try:
        return plain.cast(pa.int64()), np.zeros(len(digits), np.bool_)
    except pa.ArrowInvalid:
        # Python refuses to convert thousands of digits; 64-bit numbers have at most 19 digits.
        texts = [
            None if t is None else t if len(t.lstrip("-0")) < 20 else "1" * 20
            for t in plain.to_pylist()
        ]
        exact = [None if text is None else int(text) for text in texts]
        fits = [number is not None and -(2**63) <= number < 2**63 for number in exact]
        kept = [number if ok else None for number, ok in zip(exact, fits, strict=True)]
        too_wide = np.array([n is not None for n in exact]) & ~np.array(fits)
        return pa.array(kept, pa.int64()), too_wide


def _all_ints(values: pa.Array) -> pa.Array | None:
    """Convert strings to int64; None if any is not a whole number. It is fast, and usually sufficient."""
    try:
        numbers = values.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    # Arrow reads 0x1F as a number; pandas and Python do not.
    hexadecimal = pc.any(pc.match_substring(values, "x", ignore_case=True)).as_py()
    return None if hexadecimal else numbers


def _all_floats(values: pa.Array) -> pa.Array | None:
    try:
        numbers = values.cast(pa.float64())
    except pa.ArrowInvalid:
        return None
    return None if pc.any(pc.is_nan(numbers)).as_py() else numbers


def _unfit(digits: pa.Array) -> int:
    numbers = _floats(digits)
    return _count(pc.or_(pc.greater_equal(numbers, 2.0**63), pc.less(numbers, -(2.0**63))))


def _floats(numbers: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(numbers, r"^\+", "").cast(pa.float64())


def _present(text: pa.Array, missing: pa.Array) -> pa.Array:
    trimmed = pc.ascii_trim_whitespace(text)
    return pc.if_else(pc.is_in(trimmed, value_set=missing), None, trimmed)


def _count(mask: pa.Array) -> int:
    return int(pc.sum(mask).as_py() or 0)


def _mask(mask: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(pc.fill_null(mask, False).to_numpy(zero_copy_only=False), np.bool_)


def missing_texts(extra: Sequence[str]) -> pa.Array:
    """Return the strings that mean "missing" in a column of numbers; `extra` is `data.missing_values`."""
    return pa.array([*MISSING, *extra], pa.string())
