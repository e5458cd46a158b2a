"""Names and types of columns, for all formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, DataError, Plain
from stoker.data.columns import Column, Dtype
from stoker.data.sources.columns.text import WIDEST_FLOAT32
from stoker.data.sources.config import IngestConfig, Override
from stoker.data.sources.files.listing import SourceFile
from stoker.data.sources.records import Reading
from stoker.data.sources.written_numbers import NumberText

_DTYPES: dict[Reading, Dtype] = {
    "int": "int64",
    "bool": "int64",
    "float": "float32",
    "string": "string",
    "image": "image",
}


def stored_column(name: str, how: Reading, *, widest: float) -> Column:
    """Return the stored column of single values.

    Args:
        name: The column's name.
        how: How the column is read.
        widest: Largest magnitude of the column's whole numbers; it decides their type if values are missing.
    """
    if how in ("whole", "bool_with_gaps"):
        dtype: Dtype = "float64" if widest > WIDEST_FLOAT32 else "float32"
        return Column(name=name, dtype=dtype, whole=True)
    return Column(name=name, dtype=_DTYPES[how])


def kept_names(config: IngestConfig, names: Sequence[str]) -> list[str]:
    """Return the names of the columns that `data.columns` does not exclude.

    Raises:
        ConfigError: a column that `data.columns` names does not exist, or no column remains.
    """
    excluded = config.columns.exclude
    for key, named in (("exclude", excluded), ("lists", config.columns.lists)):
        for name in named:
            if name not in names:
                raise ConfigError(
                    f"data.columns.{key} must name columns of the data",
                    got=name,
                    fix=nearest(name, names),
                )
    kept = [name for name in names if name not in excluded]
    if excluded and not kept:
        raise ConfigError(
            "data.columns.exclude must leave at least one column",
            got=list(excluded),
            fix="Exclude fewer columns.",
        )
    return kept


def no_lists(name: str) -> ConfigError:
    """Return the error for a column in `data.columns.lists` that does not hold lists."""
    return ConfigError(
        "data.columns.lists must name columns that hold lists of numbers or strings",
        got=name,
        fix="Leave it out.",
    )


class UnusableColumn(DataError):
    """Raised for a column that cannot be read, in files that are otherwise valid."""

    def __init__(self, column: str, rule: str, *, got: object, fix: str) -> None:
        """Store the column's name; for the other arguments see `DataError`."""
        super().__init__(rule, got=got, fix=fix)
        self.column = column


def check_names(names: Sequence[str], *, location: str) -> None:
    """Check that each column of a file has a usable name that occurs only once.

    Raises:
        DataError: a name is empty, occurs twice, or has characters that are not allowed.
    """
    empty = [index + 1 for index, name in enumerate(names) if not name.strip()]
    if empty:
        raise bad_names(location, Plain(f"no name for column {empty[0]} of {len(names)}"))
    if not names or any(map(_is_unfit, "".join(names))):
        raise bad_names(location, list(names))
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise bad_names(location, Plain(f"{twice[0]!r} twice"))


def bad_names(location: str, got: object) -> DataError:
    """Return the error for a file whose columns do not have usable names."""
    return DataError(
        f"every column of {location} must have a different name, in UTF-8 without control characters",
        got=got,
        fix="Fix the file's header.",
    )


def _is_unfit(character: str) -> bool:
    return character < " " or character == "\x7f" or "\ud800" <= character <= "\udfff"


def known_types(config: IngestConfig, names: Sequence[str]) -> dict[str, Override | NumberText]:
    """Check that each column in `data.types` exists; return the setting.

    Raises:
        ConfigError: a column does not exist; the error suggests the most similar name.
    """
    for name in config.types:
        if name not in names:
            raise ConfigError(
                "data.types must name columns of the data", got=name, fix=nearest(name, names)
            )
    return config.types


def check_same_columns(
    names: Sequence[str], others: Sequence[str], *, first: str, other: SourceFile
) -> None:
    """Check that two files have the same columns, in any order.

    Raises:
        DataError: the second file lacks columns or has additional columns; the error lists them.
    """
    missing = [name for name in names if name not in set(others)]
    extra = [name for name in others if name not in set(names)]
    if not missing and not extra:
        return
    parts = [f"no {', '.join(map(repr, missing))}"] if missing else []
    parts += [f"additional {', '.join(map(repr, extra))}"] if extra else []
    raise DataError(
        f"{other.location} must have the columns of {first}",
        got=Plain(" and ".join(parts)),
        fix="Rename columns or exclude them (data.columns) so that all files have the same columns, or "
        "exclude the file with a glob.",
    )
