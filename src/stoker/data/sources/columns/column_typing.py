"""Find the type of a column whose values have types of their own: in Parquet, JSON Lines, TFRecord."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stoker.core.errors import DataError, Plain
from stoker.data.columns import VARYING, Column
from stoker.data.sources.columns.table import UnusableColumn, no_lists, stored_column
from stoker.data.sources.columns.text import TOO_WIDE, Tally, clean, gapped, narrowed, read_text
from stoker.data.sources.columns.vectors import assumed_of_lists, common_length, lengths_of
from stoker.data.sources.config import Override, leaving_out
from stoker.data.sources.files.listing import SourceFile
from stoker.data.sources.images.headers import begins_as_image
from stoker.data.sources.records import Assumption, Cells, Reading, good_cells, joined, with_fault
from stoker.data.sources.written_numbers import NumberText

Family = Literal["int", "float", "string", "image", "null"]
"""Kind of the values of an Arrow type: whole numbers, numbers, strings, bytes, or only nulls."""

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

_DAY_S = 86_400


def family_of(kind: pa.DataType) -> Family | None:
    """Return the family of an Arrow type; None if a column cannot hold its values."""
    is_a = pa.types
    if is_a.is_dictionary(kind):
        return family_of(kind.value_type)
    if is_a.is_null(kind):
        return "null"
    if is_a.is_integer(kind) or is_a.is_boolean(kind) or _is_time(kind):
        return "int"
    if is_a.is_floating(kind) or is_a.is_decimal(kind):
        return "float"
    if is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind):
        return "string"
    return "image" if _is_binary(kind) else None


def item_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of a list's values; None for a type that is not a list."""
    is_a = pa.types
    is_list = is_a.is_list(kind) or is_a.is_large_list(kind) or is_a.is_fixed_size_list(kind)
    return kind.value_type if is_list else None


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _is_binary(kind: pa.DataType) -> bool:
    is_a = pa.types
    return bool(
        is_a.is_binary(kind)
        or is_a.is_large_binary(kind)
        or is_a.is_fixed_size_binary(kind)
        or is_a.is_binary_view(kind)
    )


def plain(values: pa.Array) -> Cells:
    """Convert values to int64, float64 or bytes (string for a column of nulls); null if missing.

    Args:
        values: [rows] of a type that has a family. Times become whole seconds since 1970, UTC.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    family = family_of(values.type)
    if family == "int":
        return _whole(values)
    if family == "float":
        numbers = values.cast(pa.float64())
        return good_cells(pc.if_else(pc.is_nan(numbers), None, numbers), values)
    if family == "null":
        return good_cells(values.cast(pa.string()), values)
    # Strings stay bytes until they are checked, because strings in Parquet may not be valid UTF-8.
    content = values.cast(pa.large_binary()).cast(pa.binary())
    return good_cells(content, content)


def _whole(values: pa.Array) -> Cells:
    if _is_time(values.type):
        return good_cells(_seconds(values), values)
    if not pa.types.is_uint64(values.type):
        return good_cells(values.cast(pa.int64()), values)
    beyond = pc.fill_null(pc.greater(values, pa.scalar(2**63 - 1, pa.uint64())), False)
    kept = pc.if_else(beyond, None, values).cast(pa.int64())
    column = replace(good_cells(kept, values), retype=True)
    return with_fault(column, beyond.to_numpy(zero_copy_only=False), TOO_WIDE)


def _seconds(values: pa.Array) -> pa.Array:
    if pa.types.is_date32(values.type):
        return pc.multiply(values.cast(pa.int32()).cast(pa.int64()), _DAY_S)
    unit = "ms" if pa.types.is_date64(values.type) else values.type.unit
    ticks = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    missing = values.is_null().to_numpy(zero_copy_only=False)
    return pa.array(np.floor_divide(ticks, _PER_SECOND[unit]), pa.int64(), mask=missing)


@dataclass(slots=True)
class ColumnTyping:
    """What is known so far about one column, over all files."""

    name: str
    """The column's name in the files."""
    override: Override | NumberText | None
    """The column's setting in `data.types`; None without one."""
    families: dict[Family, str] = field(default_factory=dict)
    """Family of values -> the first file with such values."""
    tally: Tally = field(default_factory=Tally)
    """Counts of the values by their form."""
    holds_images: bool = False
    """Whether some bytes begin like an image, even of an unsupported format."""
    forms: dict[str, str] = field(default_factory=dict)
    """`vectors` or `single values` -> the first file with them."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Length of a vector or list -> number of records."""
    lists: bool = False
    """Whether a file holds lists whose type does not fix their length."""
    varies: bool = False
    """Whether the lists are read as lists of varying length, for example because of `data.columns.lists`."""

    @property
    def is_vector(self) -> bool:
        """Whether each record holds a vector or list, not a single value."""
        return "vectors" in self.forms

    @property
    def family(self) -> Family:
        """The family that can hold the values of all files."""
        found = set(self.families) - {"null"} or {"null"}
        return "float" if found == {"int", "float"} else next(iter(found))

    @property
    def by_text(self) -> bool:
        """Whether values are read as text, because `data.types` sets a different type than the files have.

        An example of a written number (`{number: "1,234.5"}`) has no effect on values that are numbers already.
        """
        if isinstance(self.override, NumberText) and self.family in ("int", "float"):
            return False
        return self.override not in (None, self.family)

    @property
    def is_open(self) -> bool:
        """Whether values must be counted, because the files' types do not determine how they are read."""
        return self.by_text or self.lists or (self.family == "int" and not self.is_vector)

    def note_type(self, kind: pa.DataType, file: SourceFile, *, rows: int) -> None:
        """Add the type that the column has in a file.

        Raises:
            DataError: no column can hold the type, or the type differs from an earlier file's.
        """
        item = item_type(kind)
        family = family_of(kind if item is None else item)
        if family is None or (item is not None and family == "image"):
            raise UnusableColumn(
                self.name,
                f"{file.location}: column {self.name!r} must hold numbers, strings, times or encoded "
                "images, or lists of numbers or strings",
                got=Plain(str(kind)),
                fix=f"Set {leaving_out(self.name)}, or convert the column; store nested values as "
                "separate columns.",
            )
        self.families.setdefault(family, file.name)
        if item is not None or family != "null":
            self.forms.setdefault("single values" if item is None else "vectors", file.name)
        if pa.types.is_fixed_size_list(kind):
            self.lengths[kind.list_size] += rows
        else:
            self.lists = self.lists or item is not None
        self._require_one_type()

    def _require_one_type(self) -> None:
        found = set(self.families) - {"null"}
        if len(self.forms) > 1 or (len(found) > 1 and found != {"int", "float"}):
            types = self.forms if len(self.forms) > 1 else self.families
            others = ", ".join(f"{what} in {name}" for what, name in types.items())
            raise DataError(
                f"column {self.name!r} must have the same type in all files",
                got=Plain(others),
                fix="Write all files with the same schema, or exclude files with a glob.",
            )

    def add_images(self, encoded: pa.Array) -> None:
        """Add some records of a column of bytes.

        Args:
            encoded: [rows] bytes.
        """
        if not self.holds_images:
            self.holds_images = any(begins_as_image(value or b"") for value in encoded.to_pylist())

    def add_values(self, values: pa.Array, missing: pa.Array) -> None:
        """Count the values of some records; see `is_open`.

        Args:
            values: [rows] as in the file; no images.
            missing: The strings that mean "missing".
        """
        if self.is_vector:
            values = self._values_of_lists(values)
        found = plain(values).values
        if self.by_text:
            self.tally.add(clean(_as_text(found), self.override).values, missing)
        elif self.family == "int":
            self.tally.missing += found.null_count
            self.tally.widen(found)

    def _values_of_lists(self, lists: pa.Array) -> pa.Array:
        if pa.types.is_null(lists.type):
            return lists
        if not pa.types.is_fixed_size_list(lists.type):  # `note_type` counts fixed lengths
            lengths = lengths_of(lists)
            self.lengths.update(lengths[lengths >= 0].tolist())
        return lists.flatten()

    def require_some_image(self) -> None:
        """Check, after all records were read, that a column of bytes holds images.

        Raises:
            DataError: no value begins like an image.
        """
        if not self.holds_images:
            raise UnusableColumn(
                self.name,
                f"column {self.name!r} of bytes must hold encoded images",
                got=Plain("no image in any record"),
                fix=f"Set {leaving_out(self.name)}, or data.types: {{{self.name}: string}} if it holds "
                "text.",
            )

    def reading(self, *, is_label: bool) -> Reading:
        """Return how the column is read."""
        gaps_end_records = is_label or self.is_vector
        if self.by_text:
            return self.tally.settled(self.override, gaps_end_records=gaps_end_records)
        if self.family == "int":
            return "int" if gaps_end_records or not self.tally.missing else "whole"
        return "string" if self.family == "null" else self.family

    def column(self, how: Reading, *, max_bad: int) -> Column:
        """Return the stored column.

        Args:
            how: How the column is read; result of `reading`.
            max_bad: The setting `data.max_bad_rows`.

        Raises:
            ConfigError: `data.columns.lists` names a column of single values.
        """
        column = stored_column(self.name, how, widest=self.tally.widest)
        if self.is_vector:
            length = common_length(self.lengths, max_bad=max_bad)
            return replace(column, length=VARYING if self.varies else length)
        if self.varies:
            raise no_lists(self.name)
        return column

    def assumed(self, column: Column) -> Assumption | None:
        """Return the assumption about the column of which the user must be warned; None if there is none."""
        return None if self.varies else assumed_of_lists(column, self.lengths)

    def typed(self, values: pa.Array, *, how: Reading, wide: bool, missing: pa.Array) -> Cells:
        """Convert values to their stored type."""
        found = plain(values)
        if self.by_text:
            text = clean(_as_text(found.values), self.override)
            return joined(found, read_text(text, how, missing, wide=wide), retype=how != "string")
        if how == "float":
            numbers = found.values.cast(pa.float64(), safe=False)
            return joined(found, narrowed(numbers, found.raw), retype=True)
        if how == "whole":
            return gapped(found, wide=wide)
        if how == "string":
            return joined(found, clean(found.values), retype=False)
        return found


def _as_text(values: pa.Array) -> pa.Array:
    return values if pa.types.is_binary(values.type) else values.cast(pa.string())
