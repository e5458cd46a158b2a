"""The stages of the chain for data in files: the inputs and the work of each stage.

A stage reads the outputs of earlier stages and writes its own folder; nothing else passes between them.
TensorFlow is imported only inside the stages that need it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.app.context import (
    CHECKPOINTS,
    RESOLVED,
    AnalyzeResult,
    Context,
    Done,
    EvaluateResult,
    ExportResult,
    IngestResult,
    PushResult,
    Stage,
    TransformResult,
)
from stoker.app.evaluation import LINEAGE, evaluate_export, find_baseline, slices_of
from stoker.app.experiment import Experiment
from stoker.app.identity import code_fingerprints, pipeline_settings, training_settings
from stoker.app.release import alias_of_push
from stoker.app.stage_outputs import split_rows
from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain
from stoker.core.files import read_json, write_json
from stoker.core.fingerprint import library_versions
from stoker.core.multi_output import alone
from stoker.core.user_code import load_function
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.features.analysis.label_summary import labels_as_facts
from stoker.data.ingest import (
    REACH_KEYS,
    Consumer,
    ingest,
)
from stoker.evaluate.evaluation import evaluation_to_json
from stoker.registry.repository import Repository

if TYPE_CHECKING:
    from stoker.data.features.analysis.anomalies import Anomaly
    from stoker.data.features.analysis.leaks import ComputedLabels
    from stoker.data.features.preprocessing.transform import Transform

_LOG = logging.getLogger(__name__)

VETTED_ROWS = 64
"""Number of rows of the eval split on which the exported model is called, as a check before it can be pushed."""


def _ingest_inputs(context: Context) -> dict[str, Any]:
    experiment = context.experiment
    settings = asdict(experiment.files)
    for key in ("source", "prepare", *REACH_KEYS):
        del settings[key]
    return {
        "source": context.source,
        "settings": settings,
        "label": experiment.label,
        "epochs": experiment.train.epochs if _store_depends_on_epochs(experiment) else None,
    }


def _store_depends_on_epochs(experiment: Experiment) -> bool:
    """Return whether `data.images.store: auto` may choose another store for more epochs."""
    images = experiment.files.images
    return images.store == "auto" and images.allow_lossy


def _ingest(context: Context, folder: Path) -> Done:
    experiment = context.experiment
    dataset = ingest(
        experiment.files,
        folder,
        label=experiment.label,
        consumer=Consumer(
            epochs=experiment.train.epochs,
            check_columns=functools.partial(_require_columns, experiment),
        ),
        listing=context.listing,
        progress=_row_rate_progress(context),
    )
    result: IngestResult = {
        "rows": {split: dataset.rows(split) for split in dataset.splits},
        "columns": len(dataset.columns),
        "bad_rows": len(dataset.bad_rows),
        "copies_dropped": dataset.copies_dropped,
        "fingerprint": dataset.fingerprint,
        "image_store": dataset.image_store,
        "warnings": list(dataset.warnings),
    }
    return Done(result=result)


def _require_columns(experiment: Experiment, columns: Sequence[Column]) -> None:
    """Reject settings that name missing columns; called before the rest of the data is read."""
    names = [column.name for column in columns]
    for label in experiment.labels.values():
        if experiment.preprocessing is None and label not in names:
            raise ConfigError(
                "label must be a column of the data, or an output of preprocessing_fn",
                got=label,
                fix=nearest(label, names),
            )
    weight = experiment.train.sample_weight
    if experiment.preprocessing is None and weight is not None and weight not in names:
        raise ConfigError(
            "train.sample_weight must be a column of the data, or an output of preprocessing_fn",
            got=weight,
            fix=nearest(weight, names),
        )
    if experiment.train.augment is not None and all(c.dtype != "image" for c in columns):
        raise ConfigError(
            "train.augment needs a column of images",
            got=Plain(f"{len(names)} columns without an image"),
            fix="Remove train.augment.",
        )


def _analyze_inputs(context: Context) -> dict[str, Any]:
    experiment = context.experiment
    return {
        "label": experiment.label,
        "label_only": experiment.label_only,
        "columns": _column_types(context),
        "dealt": [getattr(experiment.files, key) for key in ("splits", "split_by", "duplicates")],
    }


def _column_types(context: Context) -> list[tuple[str, str, bool, int | None]]:
    """Return the types of all columns, without their values."""
    return [(c.name, c.dtype, c.whole, c.length) for c in context.shards().columns]


def _analyze(context: Context, folder: Path) -> Done:
    from stoker.data.features.analysis.analyze import analyze

    experiment, dataset = context.experiment, context.shards()
    statistics, _, anomalies = analyze(
        dataset,
        folder,
        labels=_raw_labels(context, dataset),
        label_only=experiment.label_only,
        config=experiment.files,
        progress=_row_progress(context),
    )
    result = anomaly_facts(anomalies)
    for line in result["warnings"]:
        _LOG.warning("%s", line)
    result["distinct"] = statistics.distinct
    result["splits"] = {split: asdict(each) for split, each in statistics.split_facts.items()}
    return Done(result=result, columns=tuple(column.name for column in dataset.columns))


def anomaly_facts(anomalies: Sequence[Anomaly]) -> AnalyzeResult:
    """Return the facts that the stage `analyze` records about anomalies."""
    from stoker.data.features.analysis.input_checks import anomalies_as_facts
    from stoker.data.features.analysis.splits import KINDS

    return {
        "anomalies": [f"{a.column}: {a.message}" for a in anomalies],
        "warnings": [f"split {a.split!r}: {a.message}" for a in anomalies if a.kind in KINDS],
        "of_columns": anomalies_as_facts(anomalies),
        "refused": [f"{a.column}: {a.message}" for a in anomalies if a.severity == "error"],
    }


def _transform_inputs(context: Context) -> dict[str, Any]:
    experiment = context.experiment
    return {
        "preprocessing": None
        if experiment.preprocessing is None
        else experiment.source_fingerprint(experiment.preprocessing),
        "label": experiment.label,
        "label_only": experiment.label_only,
        "columns": _column_types(context),
        **_weight_inputs(experiment),
    }


def _weight_inputs(experiment: Experiment) -> dict[str, str]:
    """Return the setting `sample_weight` as an input; empty if it is not set, so that older records stay valid."""
    name = experiment.train.sample_weight
    return {} if name is None else {"sample_weight": name}


def _transform(context: Context, folder: Path) -> Done:
    from stoker.data.features.analysis.input_checks import anomalies_as_facts, vocabulary_losses
    from stoker.data.features.analysis.labels import ignore_labels, require_known_labels
    from stoker.data.features.analysis.leaks import ComputedLabels
    from stoker.data.features.analysis.statistics import TRAIN
    from stoker.data.features.preprocessing.build import ColumnRoles, build_transform

    experiment = context.experiment
    function = None
    if experiment.preprocessing is not None:
        function = load_function(experiment.folder, experiment.preprocessing, where="preprocessing")
    dataset = context.shards()
    slices_of(experiment, dataset.columns)
    transform = build_transform(
        dataset,
        function,
        folder,
        label=experiment.label,
        roles=ColumnRoles(
            label_only=experiment.label_only, sample_weight=experiment.train.sample_weight
        ),
        progress=_row_progress(context),
    )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with contextlib.closing(ComputedLabels(Path(scratch), transform.labels.values())) as made:
            seen = {} if function is None else {TRAIN: made.add}
            labels = {
                split: require_known_labels(
                    transform, dataset, split, on_labels=seen.get(split, ignore_labels)
                )
                for split in dataset.splits
            }
        leaks = () if function is None else _leaks(context, transform, made)
        found = anomalies_as_facts(tuple(leaks))
    losses = vocabulary_losses(dataset, transform.spec, transform.root)
    result: TransformResult = {
        "labels": labels_as_facts(labels),
        "of_columns": found,
        "vocabulary_losses": [asdict(loss) for loss in losses],
        "features": [feature.name for feature in transform.features],
        "serving_columns": [column.name for column in transform.serving_columns],
    }
    return Done(result=result, columns=tuple(column.name for column in transform.columns))


def _leaks(context: Context, transform: Transform, made: ComputedLabels) -> Iterator[Anomaly]:
    from stoker.data.features.analysis.statistics import load_statistics

    return made.leaks(
        context.shards(),
        load_statistics(context.outputs["analyze"] / "statistics.json"),
        computed_from=transform.label_columns,
        served=transform.serving_columns,
    )


def _train_inputs(context: Context) -> dict[str, Any]:
    experiment = context.experiment
    return {
        "transform": context.identities["transform"],
        "code": code_fingerprints(experiment),
        "train": training_settings(experiment),
        **pipeline_settings(experiment),
    }


def _train(context: Context, folder: Path) -> Done:
    from stoker.app.training.stage import train

    return train(context, folder)


def _export_inputs(context: Context) -> dict[str, Any]:
    return {"train": context.identities["train"]}


def _export(context: Context, folder: Path) -> Done:
    import tensorflow as tf

    from stoker.export.saved_model import export_saved_model
    from stoker.export.vetting import vet_model
    from stoker.train.checkpoints.state import restore_model
    from stoker.train.checkpoints.store import best
    from stoker.train.config import ResolvedTraining
    from stoker.train.loop.run import AVERAGE
    from stoker.train.setup.build_model import build_model, prepare_process
    from stoker.train.setup.label_checks import answers_one_class

    experiment, transform = context.experiment, context.transform()
    resolved = ResolvedTraining(**read_json(context.outputs["train"] / RESOLVED))
    prepare_process(precision=resolved.precision, seed=experiment.train.seed, deterministic=False)
    build = load_function(experiment.folder, experiment.model, where="model")
    built = build_model(build, transform, what=experiment.model)
    columns = transform.serving_columns
    some = next(split_rows(context.dataset(), "eval", columns, batch_rows=VETTED_ROWS))
    rows = {name: values[:VETTED_ROWS] for name, values in some.items()}
    # A subclassed model creates its variables in the first call.
    first = {
        c.name: tf.constant(rows[c.name][:1], c.tensor_dtype) for c in transform.serving_columns
    }
    built.model(built.adapt(transform.apply_features(first)), training=False)
    arrays = best(context.outputs["train"] / CHECKPOINTS).arrays()
    restore_model(built.model, arrays, average=AVERAGE)
    export_saved_model(built.model, built.adapt, transform, folder)
    vetted = vet_model(folder, transform.serving_columns, rows)
    labels = transform.labels
    facts: ExportResult = {
        "from_logits": alone({output: built.from_logits(output) for output in labels}),
        # A float label with a regression loss is not a class, even if all values of a split are 0 or 1.
        "is_regression": alone(
            {
                output: built.is_regression(output) and label.dtype.startswith("float")
                for output, label in labels.items()
            }
        ),
        "multi_hot": alone(dict.fromkeys(labels, False) | _multi_hot(context)),
        "one_class": alone({output: answers_one_class(built, output) for output in labels}),
        "classes": alone({output: label.classes for output, label in labels.items()}),
        "outputs": vetted["outputs"],
        "signatures": vetted["signatures"],
        "inputs": {c.name: c.dtype for c in transform.serving_columns},
        "vetted_rows": vetted["rows"],
    }
    write_json(folder / LINEAGE, {**_lineage(context), **facts})
    _write_training_statistics(context, folder, set(facts["inputs"]))
    return Done(result=facts, columns=context.hashed(transform.serving_columns))


def _write_training_statistics(context: Context, folder: Path, served: set[str]) -> None:
    """Add the statistics of the model's input columns to the exported model, for a server's skew metrics."""
    from stoker.data.features.analysis.statistics import TRAIN, load_statistics
    from stoker.registry.training_statistics import write_training_statistics

    found = load_statistics(context.outputs["analyze"] / "statistics.json")
    columns = found.splits.get(TRAIN, ())
    write_training_statistics(folder, [column for column in columns if column.name in served])


def _multi_hot(context: Context) -> dict[str, bool]:
    """Return output -> whether a row of any split has no class or several classes."""
    found: dict[str, bool] = {}
    for by_output in context.labels().values():
        for output, summary in by_output.items():
            found[output] = found.get(output, False) or summary.multi_hot
    return found


def _lineage(context: Context) -> dict[str, Any]:
    experiment = context.experiment
    return {
        "experiment": experiment.name,
        "run": context.run_id,
        "data": context.results["ingest"]["fingerprint"],
        "stages": dict(context.identities),
        "settings": experiment.to_json(),
        "versions": library_versions(),
        "training": context.results["train"],
    }


def _evaluate_inputs(context: Context) -> dict[str, Any]:
    experiment = context.experiment
    baseline = find_baseline(experiment, context.outputs["export"])
    return {
        "export": context.identities["export"],
        "evaluate": asdict(experiment.evaluate),
        "baseline": None if baseline is None else baseline.content_hash,
    }


def _evaluate(context: Context, folder: Path) -> Done:
    evaluation, columns = evaluate_export(
        context.experiment,
        context.dataset(),
        context.transform(),
        context.outputs["export"],
        folder,
    )
    result: EvaluateResult = {
        "rows": evaluation.rows,
        "metrics": evaluation_to_json(evaluation)["metrics"],
        "main_metric": evaluation.main_metric,
        "verdicts": [asdict(verdict) for verdict in evaluation.verdicts],
        "refused": [
            f"{verdict.key}: {verdict.subject} must be {verdict.rule}, it is {verdict.reason}"
            for verdict in evaluation.verdicts
            if not verdict.passed
        ],
    }
    return Done(result=result, columns=context.hashed(columns))


def _push_inputs(context: Context) -> dict[str, Any]:
    return {"evaluate": context.identities["evaluate"], "model": context.experiment.model_name}


def _push(context: Context, folder: Path) -> Done:
    experiment, model = context.experiment, context.outputs["export"]
    pushed = Repository(experiment.models_root).push(
        model,
        experiment.model_name,
        alias=alias_of_push(experiment),
        lineage=read_json(model / LINEAGE),
    )
    result: PushResult = {
        "version": pushed.version,
        "path": str(pushed.path),
        "already": pushed.already,
    }
    write_json(folder / "push.json", result)
    return Done(result=result)


def _raw_labels(context: Context, dataset: Dataset) -> list[str]:
    columns = {column.name for column in dataset.columns}
    return [label for label in context.experiment.labels.values() if label in columns]


def _row_rate_progress(context: Context) -> Callable[[int, int | None], None]:
    began_s, began_at = time.monotonic(), 0

    def report(done: int, total: int | None) -> None:
        nonlocal began_s, began_at
        if done < began_at or not began_at:
            # A new pass, or the first report: rows that an earlier process finished do not count in the rate.
            began_s, began_at = time.monotonic(), done
        passed_s = time.monotonic() - began_s
        rate = f", {(done - began_at) / passed_s:,.0f}/s" if done > began_at and passed_s else ""
        context.progress(f"{done:,} rows{rate}", done / total if total else None)

    return report


def _row_progress(context: Context) -> Callable[[int, int, str], None]:
    def report(done: int, total: int, what: str) -> None:
        context.progress(f"{done:,} of {total:,}: {what}", done / total if total else None)

    return report


model_stage = functools.partial(Stage, tensorflow=True, runs_user_code=True)
"""Creates a stage that calls the user's functions and needs TensorFlow."""

STAGES = (
    Stage(name="ingest", folder="data", inputs=_ingest_inputs, work=_ingest, resumable=True),
    Stage(name="analyze", folder="analysis", inputs=_analyze_inputs, work=_analyze),
    model_stage(name="transform", folder="transform", inputs=_transform_inputs, work=_transform),
    model_stage(name="train", folder="train", inputs=_train_inputs, work=_train, in_place=True),
    model_stage(name="export", folder="model", inputs=_export_inputs, work=_export),
    model_stage(name="evaluate", folder="evaluation", inputs=_evaluate_inputs, work=_evaluate),
    Stage(name="push", folder="push", inputs=_push_inputs, work=_push, always=True),
)
"""The chain, in order."""
