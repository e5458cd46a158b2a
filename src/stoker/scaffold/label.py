"""Which column is the label, and what kind of answer it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain
from stoker.data.ingest import ColumnDescription, IngestConfig, SourceDescription
from stoker.scaffold.look import measure
from stoker.scaffold.spelling import python_text

TaskKind = Literal["binary", "multiclass", "regression"]
Form = Literal["text", "counted", "as text", "by vocabulary", "quantity"]

LABEL_NAMES = (
    *("label", "labels", "target", "class", "y", "outcome", "species", "diagnosis"),
    *("survived", "churn", "fraud", "is_fraud", "category", "response", "quality", "price"),
)
"""Names by which a label is known in public data sets, the surest first."""

MOST_CLASSES = 20
"""A column of numbers with more different values is a quantity and no class."""

ROWS_PER_CLASS = 5
"""Rows per different value, on average, below which a column is no class that can be learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """The column to be predicted."""

    name: str
    """As the header spells it."""

    task: TaskKind
    """What kind of answer it asks for."""

    why: str
    """Why it was taken, a clause."""

    form: Form
    """What it is made of. `text`, and numbers `counted` 0, 1, 2..., are classes already; other
    numbers are read `as text`, or, where some are missing, numbered `by vocabulary` (as text, "NA"
    were a class). A `quantity` is what a regression predicts."""

    classes: int = 0
    """Number of classes; 0 for a regression."""

    missing: int = 0
    """Records that have none."""

    scale: float = 1.0
    """Standard deviation of a regression's label."""

    offset: float = 0.0
    """Mean of a regression's label."""


def find_label(seen: SourceDescription, config: IngestConfig, wanted: str | None) -> Label:
    """Take the wanted column, or guess one, and look at its values.

    Raises:
        ConfigError: there is no such column, it cannot be a label, or none can be guessed.
    """
    column, why = _chosen(seen, wanted)
    name, distinct = column.column.name, _present(column)
    hindrance = _hindrance(column)
    if hindrance:
        raise ConfigError(
            f"column {name!r} must have what a label needs",
            got=Plain(hindrance),
            fix="Name another column with --label.",
        )
    if column.column.dtype == "string":
        assert distinct is not None
        task: TaskKind = "binary" if distinct == 2 else "multiclass"
        return Label(
            name=name, task=task, why=why, form="text", classes=distinct, missing=column.missing
        )
    return _label_of_numbers(column, config, rows=seen.rows, why=why)


def _chosen(seen: SourceDescription, wanted: str | None) -> tuple[ColumnDescription, str]:
    by_name = {column.column.name: column for column in seen.columns}
    if wanted is not None:
        if wanted not in by_name:
            raise ConfigError(
                "--label must name a column of the data", got=wanted, fix=nearest(wanted, by_name)
            )
        return by_name[wanted], "--label says so"
    able = [column for column in seen.columns if not _doubt(column, seen.rows)]
    passed_over = ""
    for known in LABEL_NAMES:
        for column in seen.columns:
            if column.column.name.strip().lower() == known:
                if column in able:
                    return column, f"by its name{passed_over}"
                name, doubt = python_text(column.column.name), _doubt(column, seen.rows)
                passed_over += f"; {name} is not taken: {doubt}"
    if not able:
        raise ConfigError(
            "a column must be fit to be the label: numbers, or text with few different values",
            got=Plain(", ".join(by_name)),
            fix="Name it with --label.",
        )
    which = "" if able[-1] is seen.columns[-1] else " that can be one"
    return able[-1], f"as the last column{which}{passed_over}"


def _present(column: ColumnDescription) -> int | None:
    """Different values, the missing one not among them; None for many."""
    return None if column.distinct is None else column.distinct - (column.missing > 0)


def _doubt(column: ColumnDescription, rows: int) -> str:
    """Why a column is not guessed to be the label, "" where it may be."""
    distinct = _present(column) or 0
    is_rare = column.column.dtype == "string" and distinct > max(2, rows / ROWS_PER_CLASS)
    return _hindrance(column) or (f"{distinct} different texts in {rows} rows" if is_rare else "")


def _hindrance(column: ColumnDescription) -> str:
    """Why a column cannot be a label at all, "" where it can."""
    distinct = _present(column)
    if column.column.dtype == "image":
        return "a column of images"
    if column.column.is_ragged:
        return "a column of lists of varying length"
    if column.column.length is not None:
        return f"a column of vectors of length {column.column.length}"
    if distinct is None and column.column.dtype == "string":
        return "more than 1000 different texts"
    return f"{distinct} different values" if distinct is not None and distinct < 2 else ""


def _label_of_numbers(
    column: ColumnDescription, config: IngestConfig, *, rows: int, why: str
) -> Label:
    spread = measure(config, column.column, most=MOST_CLASSES)
    name, values = column.column.name, spread.values
    if not _are_classes(values, rows):
        deviation = spread.deviation or 1.0
        return Label(
            name=name,
            task="regression",
            why=why,
            form="quantity",
            missing=column.missing,
            scale=deviation,
            offset=spread.mean,
        )
    counted = values == tuple(range(len(values)))
    other: Form = "by vocabulary" if column.missing else "as text"
    return Label(
        name=name,
        task="binary" if len(values) == 2 else "multiclass",
        why=why,
        classes=len(values),
        form="counted" if counted else other,
        missing=column.missing,
    )


def _are_classes(values: Sequence[float], rows: int) -> bool:
    whole = all(value == int(value) for value in values)
    return whole and len(values) > 1 and (len(values) == 2 or len(values) * ROWS_PER_CLASS <= rows)
