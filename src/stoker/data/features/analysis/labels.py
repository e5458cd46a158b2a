"""Refuse labels and weights that training or evaluation cannot use, before they are used."""

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
"""Function that is called with the labels of the next rows, by label name."""


def ignore_labels(labels: Mapping[str, NDArray[Any]]) -> None:
    """Do nothing: the default for `on_labels`."""


def require_known_labels(
    transform: Transform, dataset: Dataset, split: str, *, on_labels: Labels = ignore_labels
) -> dict[str, LabelSummary]:
    """Refuse a split with a class that the training split lacks, a missing label, or an invalid weight.

    A computed label can hide a missing input: `NaN > 10` is False. So a missing value is also refused in a
    column that only the label or the weight needs, unless the graph of that label or weight checks for NaN.

    Args:
        transform: Computes labels and weight; without a label nothing is refused.
        dataset: The dataset that the transform was built from, or one with the same columns.
        split: Name of the split.
        on_labels: Called with the labels of each batch.

    Returns:
        Output of the model -> summary of its labels.

    Raises:
        DataError: a label or weight is invalid; the error names the split, the record and the values.
    """
    if not transform.labels:
        return {}
    counters = {output: LabelCounter() for output in transform.labels}
    columns = transform.target_columns
    names = [column.name for column in columns]
    of_labels = [column.name for column in transform.label_columns]
    required = _required_columns(transform)
    first_record = 0
    for batch in dataset.batches(split, columns=names, rows=batch_rows(dataset), whole=False):
        arrays = {column.name: to_numpy(column, batch.column(column.name)) for column in columns}
        raw = {c.name: tf.constant(arrays[c.name], c.tensor_dtype) for c in columns}
        for name, needed_by in required.items():
            _require_present(name, arrays[name], needed_by, split=split, first_record=first_record)
        made = {o: np.asarray(each) for o, each in by_output(transform.apply_label(raw)).items()}
        for output, values in made.items():
            counters[output].add(values)
            shown = {name: arrays[name] for name in of_labels}
            _require_known(
                transform.labels[output], values, shown, split=split, first_record=first_record
            )
        on_labels({transform.labels[output].name: values for output, values in made.items()})
        if transform.spec.weight is not None:
            weights = np.asarray(transform.apply_weight(raw))
            _require_weights(transform.spec.weight, weights, split=split, first_record=first_record)
        first_record += batch.num_rows
    return {output: counter.summary() for output, counter in counters.items()}


def _require_known(
    label: LabelSpec,
    values: NDArray[Any],
    arrays: Mapping[str, NDArray[Any]],
    *,
    split: str,
    first_record: int,
) -> None:
    bad = values < 0 if label.classes is not None else np.isnan(values.astype(np.float64))
    if bad.any():
        row = int(np.argwhere(bad)[0][0])
        shown = ", ".join(f"{name}={_shown(array[row])}" for name, array in arrays.items())
        wanted = "a number" if label.classes is None else "a class of the training split"
        raise DataError(
            f"label {label.name!r} of split {split!r} must be {wanted} (record {first_record + row + 1})",
            got=Plain(shown),
            fix="Fix or leave out that record, or split the data so that the training split has every class.",
        )


def _require_weights(name: str, weights: NDArray[Any], *, split: str, first_record: int) -> None:
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"train.sample_weight {name!r} must be a number of 0 or more in split {split!r} "
            f"(record {first_record + row + 1})",
            got=Plain("a missing value" if np.isnan(weights[row]) else f"{weights[row]:g}"),
            fix="Fix that record, or compute its weight in preprocessing_fn.",
        )


def _named(transform: Transform) -> str:
    names = dict.fromkeys(label.name for label in transform.labels.values())
    return " or ".join(map(repr, names))


def _shown(value: Any) -> str:
    return shown_short(value.tolist()) if isinstance(value, np.ndarray) else repr(value)


def _required_columns(transform: Transform) -> dict[str, str]:
    """Return column -> the label or weight that needs a value of it in every record."""
    served = {column.name for column in transform.serving_columns}
    required: dict[str, str] = {}
    weight = transform.spec.weight
    if weight is not None:
        # A column that is the weight itself is checked as a weight.
        left_out = {weight, *transform.nan_checked_weight_columns()}
        names = [c.name for c in transform.spec.weight_columns if c.name not in left_out]
        required |= dict.fromkeys(names, f"the sample weight {weight!r}")
    nan_checked = transform.nan_checked_label_columns()
    names = [column.name for column in transform.label_columns if column.name not in nan_checked]
    required |= dict.fromkeys(names, f"the label {_named(transform)}")
    return {name: needed_by for name, needed_by in required.items() if name not in served}


def _require_present(
    name: str, values: NDArray[Any], needed_by: str, *, split: str, first_record: int
) -> None:
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    missing = missing.reshape(len(values), -1).any(axis=1)
    if missing.any():
        row = first_record + int(missing.argmax()) + 1
        raise DataError(
            f"column {name!r}, which only {needed_by} needs, must hold a value (record {row} of split "
            f"{split!r})",
            got=Plain("a missing value"),
            fix="Leave such rows out of the data, or handle missing values in preprocessing_fn with "
            "tf.math.is_nan.",
        )
