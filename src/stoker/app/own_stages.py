"""The stages before `train` for a user-defined dataset, which is neither copied nor transformed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from stoker.app.context import (
    Context,
    Done,
    IngestResult,
    Stage,
    TransformResult,
)
from stoker.app.evaluation import slices_of
from stoker.app.experiment import Experiment
from stoker.app.stage_outputs import call_own_dataset
from stoker.app.stages import STAGES, anomaly_facts, model_stage
from stoker.core.files import sha256_file
from stoker.data.features.analysis.label_summary import labels_as_facts
from stoker.data.user_dataset.config import OwnDatasetConfig
from stoker.data.user_dataset.description import DESCRIPTION, read_description, write_description
from stoker.evaluate.config import require_metrics_of


def stages_of(experiment: Experiment) -> tuple[Stage, ...]:
    """Return the chain for the experiment's kind of data, in order."""
    return STAGES if experiment.own_dataset is None else OWN_STAGES


def _config(context: Context) -> OwnDatasetConfig:
    config = context.experiment.own_dataset
    if config is None:
        raise RuntimeError("these stages are for a user-defined dataset")
    return config


def _ingest_inputs(context: Context) -> dict[str, Any]:
    return {"data": context.source}


def _ingest(context: Context, folder: Path) -> Done:
    dataset = call_own_dataset(context.experiment, _config(context))
    write_description(folder / DESCRIPTION, dataset.description)
    result: IngestResult = {
        "rows": {},
        "columns": len(dataset.columns),
        "bad_rows": 0,
        "fingerprint": context.source,
    }
    return Done(result=result, content=sha256_file(folder / DESCRIPTION))


def _analyze_inputs(context: Context) -> dict[str, Any]:
    return {"ingest": context.identities["ingest"]}


def _analyze(context: Context, folder: Path) -> Done:
    dataset = call_own_dataset(context.experiment, _config(context))
    from stoker.data.user_dataset.analysis import analyze_own_dataset
    from stoker.data.user_dataset.load_dataset import counts_as_facts

    def report(done: int, total: int, what: str) -> None:
        context.progress(f"{done:,} {what}", min(1.0, done / total) if total else None)

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        found = analyze_own_dataset(
            dataset,
            folder,
            scratch=Path(scratch),
            fingerprint=context.results["ingest"]["fingerprint"],
            progress=report,
        )
    result = anomaly_facts(found.anomalies)
    result["counts"] = counts_as_facts(found.counts)
    result["bytes"] = found.byte_forms
    result["labels"] = labels_as_facts(found.labels)
    # The function may read data outside the experiment folder. If these data change, the hash of the statistics
    # changes, too.
    return Done(result=result, content=sha256_file(folder / "statistics.json"))


def _transform_inputs(context: Context) -> dict[str, Any]:
    return {"analyze": context.identities["analyze"]}


def _transform(context: Context, folder: Path) -> Done:
    description = read_description(context.outputs["ingest"] / DESCRIPTION)
    slices_of(context.experiment, description.columns)
    require_metrics_of(context.experiment.evaluate, list(description.labels), any_label=True)
    write_description(folder / DESCRIPTION, description)
    names = [column.name for column in description.features]
    result: TransformResult = {"features": names, "serving_columns": names}
    return Done(result=result)


OWN_STAGES = (
    model_stage(name="ingest", folder="data", inputs=_ingest_inputs, work=_ingest),
    model_stage(name="analyze", folder="analysis", inputs=_analyze_inputs, work=_analyze),
    Stage(name="transform", folder="transform", inputs=_transform_inputs, work=_transform),
    *STAGES[3:],
)
"""The chain for a user-defined dataset; from `train` on, its stages are the same as for files."""
