"""The stage `analyze`: writes statistics, schema, anomalies and the data report."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path

from stoker.core.files import write_atomic, write_json
from stoker.data.dataset import Dataset
from stoker.data.features.analysis.anomalies import Anomaly, find_anomalies
from stoker.data.features.analysis.leaks import find_leaks
from stoker.data.features.analysis.measure import compute_statistics
from stoker.data.features.analysis.report import render_report
from stoker.data.features.analysis.splits import find_split_anomalies, relate_splits
from stoker.data.features.analysis.statistics import Schema, Statistics, infer_schema
from stoker.data.features.engine import Progress, no_progress
from stoker.data.sources.config import IngestConfig


def analyze(
    dataset: Dataset,
    out_dir: Path,
    *,
    labels: Collection[str] = (),
    label_only: Collection[str] = (),
    config: IngestConfig | None = None,
    progress: Progress = no_progress,
) -> tuple[Statistics, Schema, list[Anomaly]]:
    """Compute the statistics of all records; write them, the schema, the anomalies and a report.

    Writes `statistics.json`, `schema.json`, `anomalies.json`, and last `report.html`. The same data
    gives the same bytes.

    Args:
        dataset: The dataset; every shard's hash is checked first.
        out_dir: Folder for the files.
        labels: The labels that are raw columns; their anomalies are more severe.
        label_only: Other columns that are not features.
        config: How the records were split; it is needed to find differences between splits that chance
            does not explain. None: these differences are not checked.
        progress: Called with columns done, number of columns, and the split.

    Returns:
        The statistics of every split, the schema of the training split, and the anomalies, errors
        first.

    Raises:
        DataError: a shard is damaged, or the training split is empty.
    """
    statistics = compute_statistics(dataset, progress=progress)
    statistics = relate_splits(statistics, dataset, labels=labels, label_only=label_only)
    leaks = find_leaks(dataset, statistics, labels)
    schema, anomalies = write_analysis(
        statistics, out_dir, labels=labels, config=config, leaks=leaks
    )
    return statistics, schema, anomalies


def write_analysis(
    statistics: Statistics,
    out_dir: Path,
    *,
    labels: Collection[str],
    config: IngestConfig | None = None,
    leaks: Iterable[Anomaly] = (),
) -> tuple[Schema, list[Anomaly]]:
    """Write statistics, schema, anomalies and report; return schema and anomalies. See `analyze`."""
    schema = infer_schema(statistics, labels=labels)
    anomalies = [*find_anomalies(statistics, schema), *leaks]
    if config is not None:
        anomalies += find_split_anomalies(statistics, labels=schema.labels, config=config)
    write_json(out_dir / "statistics.json", asdict(statistics))
    write_json(out_dir / "schema.json", asdict(schema))
    write_json(out_dir / "anomalies.json", [asdict(anomaly) for anomaly in anomalies])
    write_atomic(out_dir / "report.html", render_report(statistics, schema, anomalies))
    return schema, anomalies
