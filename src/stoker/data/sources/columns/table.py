"""Code for both CSV and Parquet: names and types of columns."""

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
    """The column for a way of reading.

    Args:
        name: Its name.
        how: How it is read.
        widest: Largest magnitude of its whole numbers, which decides their type if some are missing.
    """
    if how in ("whole", "bool_with_gaps"):
        dtype: Dtype = "float64" if widest > WIDEST_FLOAT32 else "float32"
        return Column(name=name, dtype=dtype, whole=True)
    return Column(name=name, dtype=_DTYPES[how])


def kept_names(config: IngestConfig, names: Sequence[str]) -> list[str]:
    """The columns of the files that `data.columns` does not exclude.

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
            "data.columns.exclude must leave a column", got=list(excluded), fix="Exclude fewer."
        )
    return kept


def no_lists(name: str) -> ConfigError:
    """The error if `data.columns.lists` names a column of something else."""
    return ConfigError(
        "data.columns.lists must name columns of lists of numbers or text",
        got=name,
        fix="Leave it out.",
    )


class UnusableColumn(DataError):
    """A column from which no feature can be made, in files that are otherwise valid."""

    def __init__(self, column: str, rule: str, *, got: object, fix: str) -> None:
        """Name the column; see `DataError`."""
        super().__init__(rule, got=got, fix=fix)
        self.column = column


def check_names(names: Sequence[str], *, location: str) -> None:
    """Check that a file names each of its columns once.

    Raises:
        DataError: a name is empty, occurs twice, or is not text.
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
    """The error for a file whose columns do not have usable names."""
    return DataError(
        f"{location} must name every column once, in UTF-8 without control characters",
        got=got,
        fix="Fix its header.",
    )


def _is_unfit(character: str) -> bool:
    return character < " " or character == "\x7f" or "\ud800" <= character <= "\udfff"


def known_types(config: IngestConfig, names: Sequence[str]) -> dict[str, Override | NumberText]:
    """Return `data.types`, after checking that each of its columns exists.

    Raises:
        ConfigError: a column does not exist; the nearest name is suggested.
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
        DataError: a file lacks columns or has others; they are listed.
    """
    missing = [name for name in names if name not in set(others)]
    extra = [name for name in others if name not in set(names)]
    if not missing and not extra:
        return
    parts = [f"no {', '.join(map(repr, missing))}"] if missing else []
    parts += [f"besides {', '.join(map(repr, extra))}"] if extra else []
    raise DataError(
        f"{other.location} must have the columns of {first}",
        got=Plain(" and ".join(parts)),
        fix="Rename columns or exclude them (data.columns) so that all files agree, or leave the file "
        "out by a glob.",
    )
