"""The stages of the chain: what each depends on, and what it does.

A stage reads the outputs of those before it and writes its own folder; nothing else passes between
them. TensorFlow is imported only inside the stages that need it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.app.evaluation import LINEAGE, evaluate_export, find_baseline, slices_of
from stoker.app.experiment import Experiment
from stoker.app.opening import eval_rows, open_dataset, open_transform
from stoker.cluster.devices import find_devices
from stoker.core.errors import ConfigError, Plain
from stoker.core.files import hash_folder, read_json, write_json
from stoker.core.fingerprint import library_versions
from stoker.core.user_code import first_line, load_function
from stoker.data.dataset import Dataset, load_dataset
from stoker.data.ingest import (
    REACH_KEYS,
    IngestConfig,
    ServiceConfig,
    ingest,
    source_fingerprint,
)
from stoker.evaluate.evaluation import evaluation_to_json
from stoker.export.repository import Repository

if TYPE_CHECKING:
    from stoker.cluster.devices import Devices
    from stoker.data.features.anomalies import Anomaly
    from stoker.data.own.description import AnyColumn
    from stoker.data.own.features import AnyTransform
    from stoker.data.own.opening import AnyDataset
    from stoker.train.config import ResolvedTraining

VETTED_ROWS = 64
"""Rows of the eval split that the exported model must answer before it may be pushed."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a stage may know: the experiment, the outputs before it, and whom to tell."""

    experiment: Experiment
    run_id: str
    outputs: dict[str, Path]
    """Stage -> where its output lies."""
    identities: dict[str, str]
    """Stage -> identity of its record."""
    results: dict[str, dict[str, Any]]
    """Stage -> the facts that it recorded."""
    progress: Callable[[str, float | None], None]
    """Told a line of what is going on and how far it is, a share or None."""

    def shards(self) -> Dataset:
        """The ingested dataset."""
        return load_dataset(self.outputs["ingest"])

    def dataset(self) -> AnyDataset:
        """The dataset, ingested or the user's own."""
        return open_dataset(
            self.experiment, self.outputs["ingest"], analysis=self.results["analyze"]
        )

    def transform(self) -> AnyTransform:
        """What makes features of it."""
        return open_transform(self.experiment, self.outputs["transform"])

    def hashed(self, columns: Iterable[AnyColumn]) -> tuple[str, ...]:
        """The names of columns whose values ingest has hashed: none of a user's own dataset."""
        return () if self.experiment.own_dataset else tuple(column.name for column in columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a stage reports when it has written its output."""

    result: dict[str, Any]
    """Facts for later stages and the summary. A list under `refused` that is not empty ends the
    chain here, with its reasons, once the output is published."""

    columns: tuple[str, ...] = ()
    """Raw columns that it read."""

    content: str = ""
    """Fingerprint of what equal inputs do not settle; see `StageRecord.content`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One link of the chain."""

    name: str
    """The verb."""

    folder: str
    """Where its output lies inside a run."""

    inputs: Callable[[Context], Mapping[str, Any]]
    """Everything it depends on other than the raw columns that it reads."""

    work: Callable[[Context, Path], Done]
    """Does it: writes the given empty folder."""

    in_place: bool = False
    """Writes at its final place, so that others can watch; else it appears whole."""

    resumable: bool = False
    """Its work goes on from what a killed one has left in the folder."""

    tensorflow: bool = False
    """Its work needs TensorFlow, which takes seconds to import."""

    always: bool = False
    """Looks at the world outside the run, and so is asked every time."""


def _ingest_inputs(context: Context) -> dict[str, Any]:
    experiment = context.experiment
    settings = asdict(experiment.files)
    for key in ("source", "prepare", *REACH_KEYS):
        del settings[key]
    return {
        "source": source_fingerprint(experiment.files),
        "settings": settings,
        "label": experiment.label,
        "epochs": experiment.train.epochs if _store_depends_on_epochs(experiment) else None,
    }


def _store_depends_on_epochs(experiment: Experiment) -> bool:
    """Whether `data.images.store: auto` may choose otherwise for more epochs."""
    images = experiment.files.images
    return images.store == "auto" and images.allow_lossy


def _ingest(context: Context, folder: Path) -> Done:
    experiment = context.experiment
    dataset = ingest(
        experiment.files,
        folder,
        label=experiment.label,
        epochs=experiment.train.epochs,
        progress=_rate_of(context),
    )
    return Done(
        result={
            "rows": {split: dataset.rows(split) for split in dataset.splits},
            "columns": len(dataset.columns),
            "bad_rows": len(dataset.bad_rows),
            "fingerprint": dataset.fingerprint,
            "image_store": dataset.image_store,
        }
    )


def _analyze_inputs(context: Context) -> dict[str, Any]:
    return {"label": context.experiment.label, "columns": _column_types(context)}


def _column_types(context: Context) -> list[tuple[str, str, bool, int | None]]:
    """Which columns there are: a new one is no change of those that an earlier stage read."""
    return [(c.name, c.dtype, c.whole, c.length) for c in context.shards().columns]


def _analyze(context: Context, folder: Path) -> Done:
    from stoker.data.features.analyze import analyze

    dataset = context.shards()
    _, _, anomalies = analyze(
        dataset, folder, label=_raw_label(context, dataset), progress=_rows_of(context)
    )
    return Done(
        result=anomaly_facts(anomalies),
        columns=tuple(column.name for column in dataset.columns),
    )


def anomaly_facts(anomalies: Sequence[Anomaly]) -> dict[str, Any]:
    """The facts that the stage `analyze` records: what was found, and what ends the chain."""
    return {
        "anomalies": [f"{a.column}: {a.message}" for a in anomalies],
        "refused": [f"{a.column}: {a.message}" for a in anomalies if a.severity == "error"],
    }


def _transform_inputs(context: Context) -> dict[str, Any]:
    experiment = context.experiment
    return {
        "preprocessing": None
        if experiment.preprocessing is None
        else experiment.code_fingerprint(experiment.preprocessing),
        "label": experiment.label,
        "label_only": experiment.label_only,
        "columns": _column_types(context),
    }


def _transform(context: Context, folder: Path) -> Done:
    from stoker.data.features.build import build_transform
    from stoker.data.features.labels import require_known_labels

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
        label_only=experiment.label_only,
        progress=_rows_of(context),
    )
    for split in dataset.splits:
        require_known_labels(transform, dataset, split)
    return Done(
        result={
            "features": [feature.name for feature in transform.features],
            "serving_columns": [column.name for column in transform.serving_columns],
        },
        columns=tuple(column.name for column in transform.columns),
    )


def _train_inputs(context: Context) -> dict[str, Any]:
    experiment = context.experiment
    return {
        "transform": context.identities["transform"],
        "build": experiment.code_fingerprint(experiment.model),
        "train": asdict(experiment.train),
    }


def _train(context: Context, folder: Path) -> Done:
    import tensorflow as tf

    from stoker.telemetry.writers import Everywhere
    from stoker.telemetry.writers.jsonl import JsonLines
    from stoker.telemetry.writers.tensorboard import TensorBoard
    from stoker.train.checkpoint import STATE
    from stoker.train.loop import BEST, Progress, fit
    from stoker.train.model import build_model, prepare_process

    experiment, transform = context.experiment, context.transform()
    devices = find_devices()
    resolved = _resolved(context, transform, devices)
    write_json(folder / "resolved.json", asdict(resolved))
    prepare_process(
        precision=resolved.precision,
        seed=experiment.train.seed,
        deterministic=experiment.train.deterministic,
    )
    # After the seeds are set, which a user's own dataset may draw from.
    dataset = context.dataset()
    build = load_function(experiment.folder, experiment.model, where="model")
    built = build_model(build, transform, what=experiment.model)

    def tell(progress: Progress) -> None:
        shown = {n: v for n, v in progress.scalars.items() if n in ("loss", "val_loss")}
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        context.progress(f"epoch {progress.epoch}, {numbers}", progress.step / progress.steps)

    writer = Everywhere([JsonLines(folder / "metrics.jsonl"), TensorBoard(folder / "tensorboard")])
    try:
        result = fit(
            built,
            dataset,
            transform,
            config=experiment.train,
            resolved=resolved,
            memory_bytes=devices.memory_bytes,
            checkpoints=folder / "checkpoints",
            writer=writer,
            on_progress=tell,
            service=_service(experiment),
            work_dir=folder.parent / "cache",
        )
    except tf.errors.OpError as error:
        raise ConfigError(
            "a training step must not fail",
            got=Plain(first_line(error)),
            fix="An id may lie outside its Embedding, or a label outside the classes. Run it again "
            "with --debug for the whole traceback.",
        ) from error
    finally:
        writer.close()
    return Done(
        result={
            "steps": result.steps,
            "epochs": result.epochs,
            "best_epoch": result.best_epoch,
            "metrics": result.metrics,
            "busy_fraction": result.busy.busy_fraction,
            "input_wait": result.busy.input_wait,
            "step_time_s": result.busy.real_step_s,
            "ceiling_step_time_s": result.busy.ceiling_step_s,
            "samples_per_s": result.samples_per_s,
            "parameters": built.model.count_params(),
            "resolved": asdict(resolved),
        },
        columns=context.hashed(transform.columns),
        content=hash_folder(folder / "checkpoints" / BEST)[STATE],
    )


def _resolved(context: Context, transform: AnyTransform, devices: Devices) -> ResolvedTraining:
    from stoker.train.config import resolve

    settings = context.experiment.train
    if context.experiment.own_dataset is None:
        rows = context.shards().rows("train")
    else:
        # A step is one of the user's batches, whatever its size.
        count = context.results["analyze"]["counts"]["train"]
        settings = replace(settings, batch_size=count["batch_size"])
        rows = count["batches"] * count["batch_size"]
    return resolve(
        settings,
        devices=devices,
        rows=rows,
        string_features=any(feature.dtype == "string" for feature in transform.features),
    )


def _export_inputs(context: Context) -> dict[str, Any]:
    return {"train": context.identities["train"]}


def _export(context: Context, folder: Path) -> Done:
    import tensorflow as tf

    from stoker.export.saved_model import export_saved_model
    from stoker.export.vetting import vet_model
    from stoker.train.checkpoint import restore_checkpoint
    from stoker.train.config import ResolvedTraining
    from stoker.train.loop import BEST
    from stoker.train.model import build_model, prepare_process

    experiment, transform = context.experiment, context.transform()
    resolved = ResolvedTraining(**read_json(context.outputs["train"] / "resolved.json"))
    prepare_process(precision=resolved.precision, seed=experiment.train.seed, deterministic=False)
    build = load_function(experiment.folder, experiment.model, where="model")
    built = build_model(build, transform, what=experiment.model)
    some = next(eval_rows(context.dataset(), transform.serving_columns, at_once=VETTED_ROWS))
    rows = {name: values[:VETTED_ROWS] for name, values in some.items()}
    # A subclassed model has no variables before it is called.
    first = {
        c.name: tf.constant(rows[c.name][:1], c.tensor_dtype) for c in transform.serving_columns
    }
    built.model(built.adapt(transform.apply_features(first)), training=False)
    restore_checkpoint(context.outputs["train"] / "checkpoints" / BEST, built.model.variables)
    export_saved_model(built.model, built.adapt, transform, folder)
    vetted = vet_model(folder, transform.serving_columns, rows)
    facts = {
        "from_logits": built.from_logits,
        # A float label under a loss for numbers is a number, even where all of a split are 0 or 1.
        "is_regression": built.is_regression and _is_float_label(transform),
        "classes": transform.classes,
        "outputs": vetted["outputs"],
        "signatures": vetted["signatures"],
        "inputs": {c.name: c.dtype for c in transform.serving_columns},
        "vetted_rows": vetted["rows"],
    }
    write_json(folder / LINEAGE, _lineage(context) | facts)
    return Done(result=facts, columns=context.hashed(transform.serving_columns))


def _is_float_label(transform: AnyTransform) -> bool:
    return transform.label is not None and transform.label.dtype.startswith("float")


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
    judged = evaluate_export(
        context.experiment,
        context.dataset(),
        context.transform(),
        context.outputs["export"],
        folder,
    )
    evaluation = judged.evaluation
    return Done(
        result={
            "rows": evaluation.rows,
            "metrics": evaluation_to_json(evaluation)["metrics"],
            "main_metric": evaluation.main_metric,
            "verdicts": [asdict(verdict) for verdict in evaluation.verdicts],
            "refused": [
                f"{verdict.key}: {verdict.subject} must be {verdict.rule}, it is {verdict.reason}"
                for verdict in evaluation.verdicts
                if not verdict.passed
            ],
        },
        columns=context.hashed(judged.columns),
    )


def _push_inputs(context: Context) -> dict[str, Any]:
    return {"evaluate": context.identities["evaluate"], "model": context.experiment.model_name}


def _push(context: Context, folder: Path) -> Done:
    experiment, model = context.experiment, context.outputs["export"]
    pushed = Repository(experiment.models_root).push(
        model, experiment.model_name, lineage=read_json(model / LINEAGE)
    )
    facts = {"version": pushed.version, "path": str(pushed.path), "already": pushed.already}
    write_json(folder / "push.json", facts)
    return Done(result=facts)


def _service(experiment: Experiment) -> ServiceConfig | None:
    """Who makes the training batches, None where this process does."""
    if not isinstance(experiment.data, IngestConfig) or experiment.data.service is None:
        return None
    if experiment.train.deterministic:
        raise ConfigError(
            "train.deterministic needs the local feed: a tf.data service promises no order",
            got=Plain("both train.deterministic and data.service"),
            fix="Leave one of them out.",
        )
    return experiment.data.service


def _raw_label(context: Context, dataset: Dataset) -> str | None:
    label = context.experiment.label
    return label if any(column.name == label for column in dataset.columns) else None


def _rate_of(context: Context) -> Callable[[int, int | None], None]:
    began_s, began_at = time.monotonic(), 0

    def tell(done: int, total: int | None) -> None:
        nonlocal began_s, began_at
        if done < began_at or not began_at:
            # The first look is over, or a killed ingest goes on: what was done then has no rate.
            began_s, began_at = time.monotonic(), done
        passed_s = time.monotonic() - began_s
        rate = f", {(done - began_at) / passed_s:,.0f}/s" if done > began_at and passed_s else ""
        context.progress(f"{done:,} rows{rate}", done / total if total else None)

    return tell


def _rows_of(context: Context) -> Callable[[int, int, str], None]:
    def tell(done: int, total: int, what: str) -> None:
        context.progress(f"{done:,} of {total:,}: {what}", done / total if total else None)

    return tell


STAGES = (
    Stage(name="ingest", folder="data", inputs=_ingest_inputs, work=_ingest, resumable=True),
    Stage(name="analyze", folder="analysis", inputs=_analyze_inputs, work=_analyze),
    Stage(
        name="transform",
        folder="transform",
        inputs=_transform_inputs,
        work=_transform,
        tensorflow=True,
    ),
    Stage(
        name="train",
        folder="train",
        inputs=_train_inputs,
        work=_train,
        tensorflow=True,
        in_place=True,
    ),
    Stage(name="export", folder="model", inputs=_export_inputs, work=_export, tensorflow=True),
    Stage(
        name="evaluate",
        folder="evaluation",
        inputs=_evaluate_inputs,
        work=_evaluate,
        tensorflow=True,
    ),
    Stage(name="push", folder="push", inputs=_push_inputs, work=_push, always=True),
)
"""The chain, in its order."""
