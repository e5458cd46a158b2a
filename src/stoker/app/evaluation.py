"""The stage `evaluate`: compares the exported model with the one in the repository on the same rows."""

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
from stoker.app.stage_outputs import split_rows
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
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.state import FOLDER, state_of

if TYPE_CHECKING:
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.data.user_dataset.load_dataset import AnyDataset

BATCH_ROWS, IMAGE_BATCH_ROWS = 1024, 64
"""Number of rows per call of the exported model. Fewer for images, whose activations are large."""

LINEAGE = "lineage.json"
"""File in the folder of an exported model: its run, its settings and facts about its signatures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The version with which the gate `max_drop` compares."""

    version: int
    path: Path
    content_hash: str


def find_baseline(experiment: Experiment, model: Path) -> Baseline | None:
    """Return the version that takes the traffic, or without a rollout the newest; None if there is none.

    Versions with the same content as this model are skipped: then a model that was already pushed is compared with the
    version before it, and a repeated evaluation gives the same result. Versions that were rolled back are also skipped.
    """
    repository = Repository(experiment.models_root)
    own = _content_hash(model)
    for version in _by_preference(repository, experiment.model_name):
        path = repository.path(experiment.model_name, version)
        content = _content_hash(path)
        if content != own:
            return Baseline(version=version, path=path, content_hash=content)
    return None


def _by_preference(repository: Repository, model: str) -> list[int]:
    """Return the versions to compare with: the one that takes the traffic, then the newest first."""
    newest_first = repository.versions(model)[::-1]
    stored = StateFiles(repository.base(model) / FOLDER).latest_whole()
    if stored is None:
        return newest_first
    state = state_of(stored.content["state"])
    accepted = [each for each in newest_first if each not in state.rejected]
    return sorted(accepted, key=lambda version: version != state.stable)


def _content_hash(model: Path) -> str:
    """Return the hash of a SavedModel's graph, variables and assets."""
    parts = {
        name: digest
        for name, digest in hash_folder(model).items()
        if name == "saved_model.pb" or name.startswith(("variables/", "assets/"))
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def evaluate_export(
    experiment: Experiment, dataset: AnyDataset, transform: AnyTransform, model: Path, folder: Path
) -> tuple[Evaluation, tuple[AnyColumn, ...]]:
    """Evaluate the SavedModel on raw rows, and apply the gates.

    Args:
        experiment: Metrics, slices and gates.
        dataset: Raw rows; its split `eval` is read.
        transform: Computes the label.
        model: The exported SavedModel.
        folder: Receives `evaluation.json` and `report.html`.

    Returns:
        The evaluation, and the raw columns that it read.

    Raises:
        UserError: the outputs of the model do not match the labels, or a slice is not a column.
    """
    config = experiment.evaluate
    slices = slices_of(experiment, dataset.columns)
    predicted = predict_eval_split(
        model, dataset, transform, inputs=transform.serving_columns, slices=slices
    )
    lineage = read_json(model / LINEAGE)
    evaluation = evaluate(
        _examples(predicted, lineage),
        slice_columns=predicted.slices,
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
    return evaluation, tuple(column for column in dataset.columns if column.name in read)


def slices_of(experiment: Experiment, columns: Sequence[AnyColumn]) -> tuple[str, ...]:
    """Return the raw columns that the evaluation slices by.

    Raises:
        ConfigError: a column does not exist, or holds vectors.
    """
    names = slice_columns(experiment.evaluate, [column.name for column in columns])
    for column in columns:
        if column.name in names and column.shape:
            kind = "vectors of length" if len(column.shape) == 1 else "tensors of shape"
            shape = " x ".join(map(str, column.shape))
            raise ConfigError(
                "evaluate.slices must name raw columns that hold one value per record",
                got=Plain(
                    f"{column.name!r}, which holds "
                    + ("lists of varying length" if column.shape == (None,) else f"{kind} {shape}")
                ),
                fix="Remove it, or add a column with the value to slice by.",
            )
    return names


def _examples(predicted: Predicted, lineage: dict[str, Any]) -> dict[str, Examples]:
    """Return the labels and predictions of each output, with the task that the model's lineage declares."""
    is_regression = by_output(lineage.get("is_regression", False))
    from_logits = by_output(lineage["from_logits"])
    multi_hot = by_output(lineage.get("multi_hot", False))
    one_class = by_output(lineage.get("one_class", False))
    examples: dict[str, Examples] = {}
    for output, labels in predicted.labels.items():
        predictions = predicted.predictions[output]
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
class Predicted:
    """Result of one pass over the eval split; all arrays have the same order."""

    labels: dict[str, NDArray[Any]]
    predictions: dict[str, NDArray[Any]]
    """Output of the model -> predictions."""
    slices: dict[str, NDArray[Any]]


def predict_eval_split(
    model: Path,
    dataset: AnyDataset,
    transform: AnyTransform,
    *,
    inputs: Sequence[AnyColumn],
    slices: Sequence[str],
) -> Predicted:
    """Call an exported model on the raw rows of the eval split, as a server does.

    Args:
        model: The SavedModel.
        dataset: Its split `eval` is read once, because a user-defined dataset may have another order next time.
        transform: Computes the labels.
        inputs: Inputs of the model.
        slices: Raw columns to return with the predictions.

    Raises:
        ConfigError: the outputs of the model do not match the labels.
    """
    from stoker.export.signatures import SERVING_DEFAULT
    from stoker.registry.exported_model import load_model

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
        batch_rows = IMAGE_BATCH_ROWS if images else BATCH_ROWS
        for rows in split_rows(dataset, "eval", columns, batch_rows=batch_rows):
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
    return Predicted(labels=_joined(labels), predictions=_joined(predictions), slices=_joined(kept))


def _joined(parts: dict[str, list[NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate(values) for name, values in parts.items()}


def _outputs(labels: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Return output of the model -> output of the signature, for each output that has a label."""
    if list(labels) == [ONLY] and len(outputs) == 1:
        return {ONLY: outputs[0]}
    if set(labels) != set(outputs):
        raise ConfigError(
            "evaluation needs a label for each of the model's outputs",
            got=Plain(f"outputs {', '.join(outputs)}; labels of {', '.join(labels) or 'none'}"),
            fix="Write `label: {OUTPUT: COLUMN, ...}`, or return one output from build.",
        )
    return {output: output for output in labels}


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
        predicted = predict_eval_split(baseline.path, dataset, transform, inputs=wanted, slices=())
        examples = _examples(predicted, theirs)
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
    """Return output -> labels of raw rows, [rows, ...], as the transform computes them."""
    import tensorflow as tf

    raw = {
        column.name: tf.constant(rows[column.name], column.tensor_dtype)
        for column in transform.label_columns
    }
    labels = by_output(transform.apply_label(raw))
    return {output: np.asarray(values) for output, values in labels.items()}
