"""Labels and weights that training or evaluation cannot use, found before they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.core.multi_output import by_output
from stoker.data.columns import to_numpy
from stoker.data.dataset import Dataset
from stoker.data.features.analysis.label_summary import LabelCounter, LabelSummary
from stoker.data.features.preprocessing.analysis_passes import batch_rows
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.features.spec import LabelSpec
from stoker.data.sources.records import shown as shown_short

Labels = Callable[[Mapping[str, NDArray[Any]]], None]
"""Receives the labels of the next rows, by label name."""


def unread(labels: Mapping[str, NDArray[Any]]) -> None:
    """Receive labels and do nothing."""


def require_known_labels(
    transform: Transform, dataset: Dataset, split: str, *, seen: Labels = unread
) -> dict[str, LabelSummary]:
    """Refuse a split with a class that the training split has not, no label, or no fit weight.

    A label that is computed hides what it was computed from: `NaN > 10` is False. So a value that
    is missing in a column which only the label or the weight needs is refused too, unless its own
    graph asks for NaN.

    Args:
        transform: Its labels and weight; without a label there is nothing to refuse.
        dataset: What the transform was built from, or of the same columns.
        split: Name of the split.
        seen: Called with the labels of each batch.

    Returns:
        Output of the model -> summary of its labels.

    Raises:
        DataError: names the split, the record and what its label or weight is.
    """
    if not transform.labels:
        return {}
    counters = {output: LabelCounter() for output in transform.labels}
    columns = transform.target_columns
    names = [column.name for column in columns]
    of_labels = [column.name for column in transform.label_columns]
    judged = _judged(transform)
    before = 0
    for batch in dataset.batches(split, columns=names, rows=batch_rows(dataset), whole=False):
        arrays = {column.name: to_numpy(column, batch.column(column.name)) for column in columns}
        raw = {c.name: tf.constant(arrays[c.name], c.tensor_dtype) for c in columns}
        for name, who in judged.items():
            _require_present(name, arrays[name], who, split=split, before=before)
        made = {o: np.asarray(each) for o, each in by_output(transform.apply_label(raw)).items()}
        for output, values in made.items():
            counters[output].add(values)
            shown = {name: arrays[name] for name in of_labels}
            _require_known(transform.labels[output], values, shown, split=split, before=before)
        seen({transform.labels[output].name: values for output, values in made.items()})
        if transform.spec.weight is not None:
            weights = np.asarray(transform.apply_weight(raw))
            _require_weights(transform.spec.weight, weights, split=split, before=before)
        before += batch.num_rows
    return {output: counter.summary() for output, counter in counters.items()}


def _require_known(
    label: LabelSpec,
    values: NDArray[Any],
    arrays: Mapping[str, NDArray[Any]],
    *,
    split: str,
    before: int,
) -> None:
    bad = values < 0 if label.classes is not None else np.isnan(values.astype(np.float64))
    if bad.any():
        row = int(np.argwhere(bad)[0][0])
        shown = ", ".join(f"{name}={_shown(array[row])}" for name, array in arrays.items())
        wanted = "a number" if label.classes is None else "a class of the training split"
        raise DataError(
            f"label {label.name!r} of split {split!r} must be {wanted} (record {before + row + 1})",
            got=Plain(shown),
            fix="Mend or leave out that record, or let the splits share every class.",
        )


def _require_weights(name: str, weights: NDArray[Any], *, split: str, before: int) -> None:
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"train.sample_weight {name!r} must be a number of 0 or more in split {split!r} "
            f"(record {before + row + 1})",
            got=Plain("a missing value" if np.isnan(weights[row]) else f"{weights[row]:g}"),
            fix="Mend that record, or decide in preprocessing_fn what it weighs.",
        )


def _named(transform: Transform) -> str:
    names = dict.fromkeys(label.name for label in transform.labels.values())
    return " or ".join(map(repr, names))


def _shown(value: Any) -> str:
    return shown_short(value.tolist()) if isinstance(value, np.ndarray) else repr(value)


def _judged(transform: Transform) -> dict[str, str]:
    """Columns that may miss no value -> who alone needs them."""
    served = {column.name for column in transform.serving_columns}
    judged: dict[str, str] = {}
    weight = transform.spec.weight
    if weight is not None:
        # A column that is the weight itself is looked at as such.
        left_out = {weight, *transform.weight_columns_asked()}
        names = [c.name for c in transform.spec.weight_columns if c.name not in left_out]
        judged |= dict.fromkeys(names, f"the sample weight {weight!r}")
    asked = transform.label_columns_asked()
    names = [column.name for column in transform.label_columns if column.name not in asked]
    judged |= dict.fromkeys(names, f"the label {_named(transform)}")
    return {name: who for name, who in judged.items() if name not in served}


def _require_present(name: str, values: NDArray[Any], who: str, *, split: str, before: int) -> None:
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    missing = missing.reshape(len(values), -1).any(axis=1)
    if missing.any():
        row = before + int(missing.argmax()) + 1
        raise DataError(
            f"column {name!r}, which only {who} needs, must hold a value (record {row} of split "
            f"{split!r})",
            got=Plain("a missing value"),
            fix="Leave those rows out of the data, or decide in preprocessing_fn what they mean, "
            "with tf.math.is_nan.",
        )
