"""Writes the source of `model.py`: how each column becomes an input of the model, and the model's output."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.core.errors import ConfigError, Plain
from stoker.data.ingest import ColumnDescription, SourceDescription
from stoker.scaffold.source_facts import Label
from stoker.scaffold.spelling import fill, python_list, python_text

FEW_WORDS = 200
"""A text column with at most this many distinct values gets a vocabulary; one with more is hashed."""

_ID_NAME = re.compile(r"(^|[_\s-])(id|uuid|guid|index|key)$|^unnamed", re.IGNORECASE)
"""Names of columns that probably contain an ID of the row."""


@dataclass(slots=True)
class _Columns:
    """Names of columns, grouped by how the model uses them; `left_out` has pairs of name and reason."""

    numbers: list[str]
    words: list[str]
    hashed: list[str]
    left_out: list[tuple[str, str]]


def table_model(seen: SourceDescription, label: Label) -> str:
    """Return the source of model.py for a table.

    Raises:
        ConfigError: no column except the label is usable.
    """
    image = next((c.column.name for c in seen.columns if c.column.dtype == "image"), None)
    if image is not None:
        return image_model(image, label, preprocessing=True)
    others = (column for column in seen.columns if column.column.name != label.name)
    columns = _sorted_out(others, rows=seen.rows)
    if not columns.numbers + columns.words + columns.hashed:
        raise ConfigError(
            f"the data must have a usable column from which to predict {label.name!r}",
            got=Plain("; ".join(f"{name!r}: {why}" for name, why in columns.left_out) or "none"),
            fix="Give data with another column of numbers or text.",
        )
    used = {*columns.numbers, *columns.words, *columns.hashed}
    lists = [c.column.name for c in seen.columns if c.column.is_ragged and c.column.name in used]
    return fill(
        "model_table",
        lists=fill("lists", names=python_list(lists), suffix=_suffix(lists, seen)) if lists else "",
        lists_dense=fill("lists_dense") if lists else "",
        numbers=python_list(columns.numbers),
        words=python_list(columns.words),
        hashed=python_list(columns.hashed),
        top_k=FEW_WORDS,
        left_out=_left_out(columns.left_out),
        label_output=_label_output(label),
        answer=_answer(label).rstrip(),
    )


def _suffix(lists: list[str], seen: SourceDescription) -> str:
    """Return a suffix, as a Python literal: NAME + suffix is the feature with list NAME's length, and not a column."""
    names, suffix = {column.column.name for column in seen.columns}, " length"
    while not names.isdisjoint(name + suffix for name in lists):
        suffix += "_"
    return python_text(suffix)


def image_model(image: str, label: Label, *, preprocessing: bool = False) -> str:
    """Return the source of model.py for images.

    Args:
        image: Name of the image column.
        label: The label.
        preprocessing: Whether to write a preprocessing_fn, which drops all other columns.
    """
    function = ""
    if preprocessing:
        function = fill(
            "preprocessing_images",
            image=python_text(image),
            label_output=_label_output(label),
        )
    return fill(
        "model_images",
        imports="\nimport stoker.transform as st\n" if "st." in function else "",
        preprocessing=function,
        image=python_text(image),
        answer=_answer(label).rstrip(),
    )


def _sorted_out(columns: Iterable[ColumnDescription], *, rows: int) -> _Columns:
    found = _Columns(numbers=[], words=[], hashed=[], left_out=[])
    for column in columns:
        name, reason = column.column.name, _why_useless(column, rows)
        if reason:
            found.left_out.append((name, reason))
        elif column.column.dtype != "string":
            found.numbers.append(name)
        elif column.distinct is not None and column.distinct <= FEW_WORDS:
            found.words.append(name)
        else:
            found.hashed.append(name)
    return found


def _why_useless(column: ColumnDescription, rows: int) -> str:
    """Return why a column is left out; "" if it may be useful."""
    dtype, distinct = column.column.dtype, column.distinct
    if distinct is not None and distinct < 2 and column.lengths < 2:
        return "the same in every row"
    if column.column.length is not None:
        return ""
    if dtype == "string" and distinct == rows:
        return "a different text in every row"
    numbers_rows = dtype in ("int64", "string") and distinct in (None, rows)
    if numbers_rows and _ID_NAME.search(column.column.name.strip()):
        return "its name suggests an ID of the row"
    return ""


def _left_out(columns: list[tuple[str, str]]) -> str:
    if not columns:
        return ""
    lines = "".join(f"#   {python_text(name)}: {reason}\n" for name, reason in columns)
    return f"\n# Left out because they cannot help; add them to a list above if they can:\n{lines}"


def _label_output(label: Label) -> str:
    if label.form != "by vocabulary":
        return ""
    name = python_text(label.name)
    return (
        "    # The label's numbers are class names: they become 0, 1, 2..., the most frequent first.\n"
        f"    features[{name}] = st.compute_and_apply_vocabulary(inputs[{name}])\n"
    )


def _answer(label: Label) -> str:
    if label.task == "regression":
        return fill("answer_regression", scale=f"{label.scale:.6g}", offset=f"{label.offset:.6g}")
    if label.task == "binary":
        positives = {"counted": "label 1", "by vocabulary": "the rarer one of the two classes"}
        second = "the second class in alphabetical order"
        return fill("answer_binary", positive=positives.get(label.form, second))
    counted = label.form == "counted"
    return fill("answer_multiclass", classes=label.classes if counted else "transform.num_classes")
