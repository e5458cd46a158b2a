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
from stoker.app.stage_outputs import eval_rows
from stoker.core.errors import ConfigError, DataError, Plain, UserError
from stoker.core.files import hash_folder, read_json
from stoker.core.multi_output import ONLY, by_output
from stoker.data.user_dataset.description import AnyColumn
from stoker.evaluate.config import slice_columns
from stoker.evaluate.evaluation import Evaluation, evaluate, measure_baseline, write_evaluation
from stoker.evaluate.gates import BaselineMetrics
from stoker.evaluate.report import write_report
from stoker.evaluate.task import Examples, Task, infer_task, pair
from stoker.registry.repository import Repository

if TYPE_CHECKING:
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.data.user_dataset.load_dataset import AnyDataset

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
    columns: tuple[AnyColumn, ...]


def evaluate_export(
    experiment: Experiment, dataset: AnyDataset, transform: AnyTransform, model: Path, folder: Path
) -> Judged:
    """Evaluate the SavedModel itself, on raw rows, and let the gates judge it.

    Args:
        experiment: Metrics, slices and gates.
        dataset: Raw rows; its split `eval` is read.
        transform: Makes the label.
        model: The exported SavedModel.
        folder: Takes `evaluation.json` and `report.html`.

    Raises:
        UserError: the model's outputs are not those that have labels, or a slice is no column.
    """
    config = experiment.evaluate
    slices = slices_of(experiment, dataset.columns)
    asked = ask_model(model, dataset, transform, inputs=transform.serving_columns, slices=slices)
    lineage = read_json(model / LINEAGE)
    evaluation = evaluate(
        _examples(asked, lineage),
        slice_columns=asked.slices,
        config=config,
        baseline=_measure_baseline(experiment, model, dataset, transform, lineage),
    )
    write_evaluation(evaluation, folder / "evaluation.json")
    write_report(
        evaluation,
        folder / "report.html",
        title=experiment.name,
        classes={output: label.classes or () for output, label in transform.labels.items()},
    )
    read = {column.name for column in transform.columns} | set(slices)
    read |= _baseline_columns(experiment, model)
    return Judged(
        evaluation=evaluation,
        columns=tuple(column for column in dataset.columns if column.name in read),
    )


def slices_of(experiment: Experiment, columns: Sequence[AnyColumn]) -> tuple[str, ...]:
    """The raw columns that the evaluation slices by.

    Raises:
        ConfigError: one is not there, or holds vectors.
    """
    names = slice_columns(experiment.evaluate, [column.name for column in columns])
    for column in columns:
        if column.name in names and column.shape:
            kind = "vectors of length" if len(column.shape) == 1 else "tensors of shape"
            shape = " x ".join(map(str, column.shape))
            raise ConfigError(
                "evaluate.slices must name raw columns that hold one value a record",
                got=Plain(
                    f"{column.name!r}, which holds "
                    + ("lists of varying length" if column.shape == (None,) else f"{kind} {shape}")
                ),
                fix="Leave it out, or bring the value to slice by as a column of its own.",
            )
    return names


def _examples(asked: Asked, lineage: dict[str, Any]) -> dict[str, Examples]:
    """By output labels and predictions, and what they mean by what the model says of itself."""
    is_regression = by_output(lineage.get("is_regression", False))
    from_logits = by_output(lineage["from_logits"])
    multi_hot = by_output(lineage.get("multi_hot", False))
    one_class = by_output(lineage.get("one_class", False))
    examples: dict[str, Examples] = {}
    for output, labels in asked.labels.items():
        predictions = asked.predictions[output]
        if is_regression.get(output, False):
            task = Task(kind="regression", classes=0)
        else:
            task = infer_task(
                labels,
                predictions.shape,
                from_logits=from_logits[output],
                multi_hot=multi_hot.get(output, False),
                one_class=one_class.get(output, False),
            )
        examples[output] = pair(labels, predictions, task=task)
    return examples


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one pass over the eval split gave; everything stands in the same order."""

    labels: dict[str, NDArray[Any]]
    predictions: dict[str, NDArray[Any]]
    """By the model's output, as the labels."""
    slices: dict[str, NDArray[Any]]


def ask_model(
    model: Path,
    dataset: AnyDataset,
    transform: AnyTransform,
    *,
    inputs: Sequence[AnyColumn],
    slices: Sequence[str],
) -> Asked:
    """The answers of an exported model to the raw rows of the eval split, asked as a server asks it.

    Args:
        model: The SavedModel.
        dataset: Its split `eval` is read once: a user's own may have another order next time.
        transform: Makes the labels.
        inputs: What the model takes.
        slices: Raw columns to keep beside the answers.

    Raises:
        ConfigError: the model's outputs are not those that have labels.
    """
    from stoker.export.signatures import SERVING_DEFAULT
    from stoker.registry.callpath import load_model

    needed = {column.name for column in (*inputs, *transform.label_columns)} | set(slices)
    columns = [column for column in dataset.columns if column.name in needed]
    images = any(column.dtype == "image" for column in inputs)
    labels: dict[str, list[NDArray[Any]]] = {name: [] for name in transform.labels}
    predictions: dict[str, list[NDArray[Any]]] = {name: [] for name in transform.labels}
    kept: dict[str, list[NDArray[Any]]] = {name: [] for name in slices}
    loaded = load_model(model)
    try:
        answered = _outputs(
            list(transform.labels), list(loaded.signatures[SERVING_DEFAULT].outputs)
        )
        for rows in eval_rows(dataset, columns, at_once=IMAGE_BATCH_ROWS if images else BATCH_ROWS):
            fed = {column.name: rows[column.name] for column in inputs}
            answers = loaded.call(SERVING_DEFAULT, fed)
            for output, true in labels_of(transform, rows).items():
                labels[output].append(true)
                predictions[output].append(answers[answered[output]])
            for name, values in kept.items():
                values.append(rows[name])
    finally:
        loaded.close()
    if not all(labels.values()):
        raise DataError("split 'eval' must hold at least one record", got=0)
    return Asked(labels=_joined(labels), predictions=_joined(predictions), slices=_joined(kept))


def _joined(parts: dict[str, list[NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate(values) for name, values in parts.items()}


def _outputs(labelled: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Output that has a label -> the name of the signature's."""
    if list(labelled) == [ONLY] and len(outputs) == 1:
        return {ONLY: outputs[0]}
    if set(labelled) != set(outputs):
        raise ConfigError(
            "evaluation needs a label for each of the model's outputs",
            got=Plain(f"outputs {', '.join(outputs)}; labels of {', '.join(labelled) or 'none'}"),
            fix="Write `label: {OUTPUT: COLUMN, ...}`, or return one output from build.",
        )
    return {output: output for output in labelled}


def _measure_baseline(
    experiment: Experiment,
    model: Path,
    dataset: AnyDataset,
    transform: AnyTransform,
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
        asked = ask_model(baseline.path, dataset, transform, inputs=wanted, slices=())
        examples = _examples(asked, theirs)
    except (UserError, KeyError) as error:
        reason = error.line().rstrip(".") if isinstance(error, UserError) else f"no {error}"
        return BaselineMetrics(version=version, error=reason)
    return measure_baseline(examples, config=experiment.evaluate, version=version)


def _baseline_columns(experiment: Experiment, model: Path) -> set[str]:
    baseline = find_baseline(experiment, model)
    if baseline is None or not (baseline.path / LINEAGE).is_file():
        return set()
    return set(read_json(baseline.path / LINEAGE).get("inputs", ()))


def labels_of(transform: AnyTransform, rows: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """By output the labels of raw rows, [rows, ...], as the transform makes them."""
    import tensorflow as tf

    raw = {
        column.name: tf.constant(rows[column.name], column.tensor_dtype)
        for column in transform.label_columns
    }
    labels = by_output(transform.apply_label(raw))
    return {output: np.asarray(values) for output, values in labels.items()}
