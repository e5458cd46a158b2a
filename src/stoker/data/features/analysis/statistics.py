"""What the data is, as types and as JSON; `measure` takes it from the shards."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker.core.errors import DataError, Plain
from stoker.core.files import read_json

TOP_VALUES = 100
"""Most frequent values kept by column; a column with no more values is known whole."""

HISTOGRAM_BINS = 20
"""Bars of equal width: what a small chart can show."""

QUANTILE_BUCKETS = 10
"""Deciles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberStatistics:
    """Of the finite values of a column of numbers; all None where there is none."""

    mean: float | None
    """Their mean; None also where it is beyond float64."""

    std: float | None
    """Their standard deviation (0 delta degrees of freedom)."""

    min: float | None
    """The smallest."""

    max: float | None
    """The largest."""

    zeros: int
    """How many are 0."""

    infinite: int
    """Values that are infinite; they are counted here only."""

    quantiles: tuple[float, ...]
    """The nine deciles, exact."""

    histogram: tuple[int, ...]
    """Values in each of `HISTOGRAM_BINS` bins of equal width from min to max; one bin where those
    are equal, none where there is no value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthStatistics:
    """Lengths of strings (characters) or encoded images (bytes), missing ones left out; of lists."""

    mean: float | None
    """The mean length."""

    min: int | None
    """The shortest."""

    max: int | None
    """The longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueCount:
    """One value and how often it stands there."""

    value: str
    """The value, numbers as Python writes them."""

    count: int
    """Rows, or places in vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnStatistics:
    """One column of one split."""

    name: str
    """The raw column."""

    dtype: str
    """Its type, see `stoker.data.columns`."""

    count: int
    """Rows that hold a value; of vectors, as in all that follows, the values in all rows."""

    missing: int
    """Rows that hold none: null, NaN, the empty string. Of lists of varying length the missing values
    in them, and the lists without a value."""

    distinct: int | None
    """Different values, exactly; None for images."""

    numbers: NumberStatistics | None
    """For numbers."""

    lengths: LengthStatistics | None
    """For strings and images."""

    top: tuple[ValueCount, ...]
    """The most frequent values, the smaller first among equals; of strings, and of numbers with at
    most `TOP_VALUES` different values."""

    length: int | None = None
    """Values in each row; None where it is a single one, 0 where lists vary in length."""

    whole: bool = False
    """Whether the source has whole numbers only, stored as floats because some are missing."""

    list_lengths: LengthStatistics | None = None
    """Values in each list, where they vary; a missing list has none."""

    @property
    def missing_share(self) -> float:
        """Missing rows (of vectors: values) by all."""
        return self.missing / max(self.count + self.missing, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFacts:
    """How one split relates to the others. Rows with images are compared by these alone."""

    share: float
    """Its rows by those of all splits."""

    distinct: int
    """Different rows in it."""

    label_rates: dict[str, dict[str, float]]
    """Label -> value -> its share of the split's labels; empty for vectors and for labels with more
    than `TOP_VALUES` values."""

    copies_of_train: int | None
    """Rows that the training split holds too; None for the training split, and for images that are
    stored there in another form."""

    features_in_train: int | None
    """The same of rows without their labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """All splits of a dataset."""

    fingerprint: str
    """The dataset that this was taken of."""

    rows: dict[str, int]
    """Split -> records."""

    splits: dict[str, tuple[ColumnStatistics, ...]]
    """Split -> columns, in the dataset's order."""

    distinct: int | None = None
    """Different rows in all splits together; None where they were not compared."""

    split_facts: dict[str, SplitFacts] = field(default_factory=dict)
    """Split that holds a record -> how it relates to the others; empty where they were not compared."""

    def column(self, split: str, name: str) -> ColumnStatistics:
        """One column of one split.

        Raises:
            KeyError: there is none.
        """
        for column in self.splits[split]:
            if column.name == name:
                return column
        raise KeyError(name)


def statistics_to_json(statistics: Statistics) -> dict[str, Any]:
    """As JSON's own types; no NaN and no infinity among them."""
    return asdict(statistics)


def load_statistics(path: Path) -> Statistics:
    """Read `statistics.json`.

    Raises:
        DataError: it is missing, damaged, or something else.
    """
    raw = read_json(path)
    try:
        return Statistics(
            fingerprint=raw["fingerprint"],
            rows=raw["rows"],
            splits={
                split: tuple(_from_json(item) for item in columns)
                for split, columns in raw["splits"].items()
            },
            distinct=raw.get("distinct"),
            split_facts={
                split: SplitFacts(**facts) for split, facts in raw.get("split_facts", {}).items()
            },
        )
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path} must hold statistics",
            got=Plain(f"{type(error).__name__}: {error}"),
            fix="Run `stoker analyze` again.",
        ) from error


def _from_json(raw: dict[str, Any]) -> ColumnStatistics:
    numbers, lengths = raw["numbers"], raw["lengths"]
    if numbers is not None:
        tuples = {name: tuple(numbers[name]) for name in ("quantiles", "histogram")}
        numbers = NumberStatistics(**{**numbers, **tuples})
    if lengths is not None:
        lengths = LengthStatistics(**lengths)
    lists = raw.get("list_lengths")
    made = {
        "numbers": numbers,
        "lengths": lengths,
        "list_lengths": None if lists is None else LengthStatistics(**lists),
        "top": tuple(ValueCount(**item) for item in raw["top"]),
    }
    return ColumnStatistics(**{**raw, **made})
