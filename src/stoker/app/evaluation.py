"""The stage `evaluate`: the exported model and the one in the repository, on the same rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.app.experiment import Experiment
from stoker.core.errors import ConfigError, DataError, Plain, UserError
from stoker.core.files import hash_folder, read_json
from stoker.data.columns import Column, to_numpy
from stoker.data.dataset import Dataset
from stoker.evaluate.config import slice_columns
from stoker.evaluate.evaluation import Evaluation, evaluate, measure_baseline, write_evaluation
from stoker.evaluate.gates import BaselineMetrics
from stoker.evaluate.report import write_report
from stoker.evaluate.task import Task, infer_task
from stoker.export.repository import Repository

if TYPE_CHECKING:
    from stoker.data.features.transform import Transform

BATCH_ROWS, IMAGE_BATCH_ROWS = 1024, 64
"""Rows that the exported model is given in one call; of images fewer, whose activations are large."""

LINEAGE = "lineage.json"
"""What an exported model says of itself, inside its own folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The version that `max_drop` compares with."""

    version: int
    path: Path
    content_hash: str


def find_baseline(experiment: Experiment, model: Path) -> Baseline | None:
    """The newest version in the repository that is not this very model; None where there is none.

    A model that was pushed already is still compared with the version that it followed, so that
    evaluating it again says the same.
    """
    repository = Repository(experiment.models_root)
    own = _weightiest(model)
    for version in reversed(repository.versions(experiment.model_name)):
        path = repository.path(experiment.model_name, version)
        content = _weightiest(path)
        if content != own:
            return Baseline(version=version, path=path, content_hash=content)
    return None


def _weightiest(model: Path) -> str:
    """One hash of what a SavedModel computes: its graph, variables and assets."""
    parts = {
        name: digest
        for name, digest in hash_folder(model).items()
        if name == "saved_model.pb" or name.startswith(("variables/", "assets/"))
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Judged:
    """An evaluation, and the columns that it read."""

    evaluation: Evaluation
    columns: tuple[str, ...]


def evaluate_export(
    experiment: Experiment, dataset: Dataset, transform: Transform, model: Path, folder: Path
) -> Judged:
    """Evaluate the SavedModel itself, on raw rows, and let the gates judge it.

    Args:
        experiment: Metrics, slices and gates.
        dataset: Raw rows; its split `eval` is read.
        transform: Makes the label.
        model: The exported SavedModel.
        folder: Takes `evaluation.json` and `report.html`.

    Raises:
        UserError: the model has several outputs, or a slice is no column.
    """
    config = experiment.evaluate
    slices = slices_of(experiment, dataset)
    names = {column.name for column in transform.columns} | set(slices)
    columns = [column for column in dataset.columns if column.name in names]
    rows = _read(dataset, columns)
    labels = labels_of(transform, rows)
    lineage = read_json(model / LINEAGE)
    predictions = predict(model, transform.serving_columns, rows)
    task = _task(labels, predictions, lineage)
    evaluation = evaluate(
        labels,
        predictions,
        task=task,
        slice_columns={name: rows[name] for name in slices},
        config=config,
        baseline=_measure_baseline(experiment, model, dataset, labels, lineage),
    )
    write_evaluation(evaluation, folder / "evaluation.json")
    write_report(
        evaluation,
        folder / "report.html",
        title=experiment.name,
        class_names=transform.classes or (),
    )
    read = {column.name for column in columns} | _baseline_columns(experiment, model)
    return Judged(
        evaluation=evaluation,
        columns=tuple(column.name for column in dataset.columns if column.name in read),
    )


def slices_of(experiment: Experiment, dataset: Dataset) -> tuple[str, ...]:
    """The raw columns that the evaluation slices by.

    Raises:
        ConfigError: one is not there, or holds vectors.
    """
    names = slice_columns(experiment.evaluate, [column.name for column in dataset.columns])
    for name in names:
        length = dataset.column(name).length
        if length is not None:
            raise ConfigError(
                "evaluate.slices must name raw columns that hold one value a record",
                got=Plain(f"{name!r}, which holds vectors of length {length}"),
                fix="Leave it out, or bring the value to slice by as a column of its own.",
            )
    return names


def _task(labels: NDArray[Any], predictions: NDArray[Any], lineage: dict[str, Any]) -> Task:
    if lineage.get("is_regression", False):
        return Task(kind="regression", classes=0)
    return infer_task(labels, predictions.shape, from_logits=lineage["from_logits"])


def predict(model: Path, columns: Sequence[Column], rows: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """The answers of an exported model to raw rows, asked as a server asks it.

    Args:
        model: The SavedModel.
        columns: What it takes.
        rows: [rows] or [rows, length] values by column.

    Returns:
        [rows, ...] its one output.

    Raises:
        ConfigError: it has several outputs.
    """
    from stoker.export.callpath import load_model
    from stoker.export.signatures import SERVING_DEFAULT

    count = len(next(iter(rows.values())))
    images = any(column.dtype == "image" for column in columns)
    at_once = IMAGE_BATCH_ROWS if images else BATCH_ROWS
    loaded = load_model(model)
    try:
        outputs = list(loaded.signatures[SERVING_DEFAULT].outputs)
        if len(outputs) != 1:
            raise ConfigError(
                "evaluation needs a model with one output",
                got=Plain(", ".join(outputs)),
                fix="Return keras.Model(features, one_output) from build.",
            )
        parts = [
            loaded.call(
                SERVING_DEFAULT,
                {c.name: rows[c.name][start : start + at_once] for c in columns},
            )[outputs[0]]
            for start in range(0, count, at_once)
        ]
    finally:
        loaded.close()
    return np.concatenate(parts)


def _measure_baseline(
    experiment: Experiment,
    model: Path,
    dataset: Dataset,
    labels: NDArray[Any],
    lineage: dict[str, Any],
) -> BaselineMetrics | None:
    baseline = find_baseline(experiment, model)
    if baseline is None:
        return None
    version = f"version {baseline.version}"
    try:
        theirs = read_json(baseline.path / LINEAGE)
        if theirs["classes"] != lineage["classes"]:
            raise DataError("both models must know the same classes", got=theirs["classes"])
        wanted = [column for column in dataset.columns if column.name in theirs["inputs"]]
        rows = _read(dataset, wanted)
        predictions = predict(baseline.path, wanted, rows)
        task = _task(labels, predictions, theirs)
    except (UserError, KeyError) as error:
        reason = error.line().rstrip(".") if isinstance(error, UserError) else f"no {error}"
        return BaselineMetrics(version=version, error=reason)
    return measure_baseline(
        labels, predictions, task=task, config=experiment.evaluate, version=version
    )


def _baseline_columns(experiment: Experiment, model: Path) -> set[str]:
    baseline = find_baseline(experiment, model)
    if baseline is None or not (baseline.path / LINEAGE).is_file():
        return set()
    return set(read_json(baseline.path / LINEAGE).get("inputs", ()))


def _read(dataset: Dataset, columns: Sequence[Column]) -> dict[str, NDArray[Any]]:
    table = dataset.table("eval", columns=[column.name for column in columns])
    return {column.name: to_numpy(column, table.column(column.name)) for column in columns}


def labels_of(transform: Transform, rows: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """The labels of raw rows, [rows, ...], as the transform makes them."""
    import tensorflow as tf

    raw = {
        column.name: tf.constant(rows[column.name], column.tensor_dtype)
        for column in transform.label_columns
    }
    return np.asarray(transform.apply_label(raw))
