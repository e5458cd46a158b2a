"""What a report draws beside the metrics: calibration and confusion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stoker.evaluate.metrics import predicted_ids, probability_of_one
from stoker.evaluate.task import Examples, FloatArray

_BINS = 10
"""Calibration bins, of about equally many rows."""

_MAX_CLASSES = 100
"""Most classes whose confusion matrix is kept: 10,000 cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationBin:
    """Rows with neighbouring predictions."""

    rows: int
    """How many."""

    mean_prediction: float
    """What the model says of them on average."""

    mean_label: float
    """What is true of them on average."""


def calibration_bins(examples: Examples) -> tuple[CalibrationBin, ...]:
    """Mean prediction against mean label, by tenths of the rows in the order of prediction.

    Args:
        examples: Two classes, or a regression with one output.

    Returns:
        At most ten bins, equal predictions never in two; none for more classes or outputs.
    """
    whole = examples.take(examples.finite)
    said = probability_of_one(whole)
    if said.ndim != 1 or not whole.rows:
        return ()
    _, place, counts = np.unique(said, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - counts / 2.0
    bin_of = np.minimum((middle * _BINS / whole.rows).astype(np.int64), _BINS - 1)[place]
    bins = [bin_of == number for number in range(_BINS) if (bin_of == number).any()]
    return tuple(_calibration_bin(whole.labels[inside], said[inside]) for inside in bins)


def _calibration_bin(labels: FloatArray, said: FloatArray) -> CalibrationBin:
    """Means by way of shares, which no large number makes infinite."""
    rows = len(said)
    return CalibrationBin(
        rows=rows,
        mean_prediction=float((said / rows).sum()),
        mean_label=float((labels / rows).sum()),
    )


def confusion_matrix(examples: Examples) -> tuple[tuple[int, ...], ...]:
    """[label][prediction] number of rows, the broken ones left out; empty beyond 100 classes.

    Empty also where a row may have several labels.
    """
    classes = 0 if examples.task.kind == "multilabel" else examples.task.classes
    if not 0 < classes <= _MAX_CLASSES:
        return ()
    whole = examples.take(examples.finite)
    cells = whole.labels.astype(np.int64) * classes + predicted_ids(whole)
    table = np.bincount(cells, minlength=classes * classes).reshape(classes, classes)
    return tuple(tuple(int(cell) for cell in row) for row in table)
