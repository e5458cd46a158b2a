"""One pass over a user's dataset to compute its size and statistics.

Single values and short vectors are written to a temporary table, which is analyzed like any other table. For larger
tensors, only moments and limits are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stoker.core.files import sha256_file
from stoker.core.statistics.columns import ColumnStatistics, LengthStatistics, NumberStatistics
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard
from stoker.data.features.analysis.analyze import write_analysis
from stoker.data.features.analysis.anomalies import Anomaly
from stoker.data.features.analysis.label_summary import LabelCounter, LabelSummary
from stoker.data.features.analysis.leaks import find_leaks
from stoker.data.features.analysis.measure import compute_statistics
from stoker.data.features.analysis.statistics import Statistics
from stoker.data.features.engine import Progress
from stoker.data.feed.config import ByteForm
from stoker.data.user_dataset.byte_features import ByteForms
from stoker.data.user_dataset.description import Count, TensorColumn
from stoker.data.user_dataset.load_dataset import OwnDataset, empty_split

TABLE_VALUES = 64
"""Maximum length of a vector that is written to the temporary table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAnalysis:
    """Results of one pass over a user's dataset."""

    counts: dict[str, Count]
    """Split -> its size."""

    anomalies: list[Anomaly]
    """Problems with the splits, errors first."""

    byte_forms: dict[str, ByteForm]
    """Feature whose numbers, in all splits, were made from bytes -> how they were made."""

    labels: dict[str, dict[str, LabelSummary]]
    """Split -> output of the model -> summary of its labels."""


def analyze_own_dataset(
    dataset: OwnDataset, folder: Path, *, scratch: Path, fingerprint: str, progress: Progress
) -> OwnAnalysis:
    """Read every record of every split once, and write the analysis.

    Args:
        dataset: The user's dataset.
        folder: Folder for the files of `stoker.data.features.analysis.analyze.analyze`.
        scratch: An empty folder for the temporary table.
        fingerprint: The dataset's fingerprint, for the statistics.
        progress: Called after each batch with the number of batches done, the total number (0: unknown), and a
            text that names the split.

    Raises:
        ConfigError: the user's pipeline raised an error.
        DataError: a split is empty, or the parts of an element have different numbers of records.
    """
    counts: dict[str, Count] = {}
    summaries: dict[str, dict[str, LabelSummary]] = {}
    moments: dict[str, dict[str, Moments]] = {}
    shards: dict[str, tuple[Shard, ...]] = {}
    columns: dict[str, Column] | None = None
    forms = {column.name: ByteForms() for column in dataset.description.features}
    for split in dataset.datasets:
        split_pass = _SplitPass(dataset, split, scratch / f"{split}.parquet", columns, forms)
        counts[split] = split_pass.run(progress)
        summaries[split] = split_pass.labels()
        columns, moments[split] = split_pass.columns, split_pass.moments
        shards[split] = split_pass.shards(counts[split].rows)
    table = Dataset(
        root=scratch,
        columns=tuple((columns or {}).values()),
        splits=shards,
        column_hashes={split: dict.fromkeys(columns or {}, fingerprint) for split in shards},
    )
    table_statistics = compute_statistics(table).splits if columns else dict.fromkeys(counts, ())
    statistics = Statistics(
        fingerprint=fingerprint,
        rows={split: count.rows for split, count in counts.items()},
        splits={
            split: _in_order(dataset, table_statistics[split], moments[split]) for split in counts
        },
    )
    labels = dataset.description.labels.values()
    # Labels that are vectors are left out, because a number in a vector is not a class.
    named = [label.name for label in labels if label.shape in ((), (1,))]
    leaks = find_leaks(table, statistics, named) if columns else ()
    _, anomalies = write_analysis(statistics, folder, labels=named, leaks=leaks)
    found = {name: each.form for name, each in forms.items()}
    return OwnAnalysis(
        counts=counts,
        anomalies=anomalies,
        byte_forms={name: form for name, form in found.items() if form is not None},
        labels=summaries,
    )


def _in_order(
    dataset: OwnDataset,
    table_statistics: tuple[ColumnStatistics, ...],
    moments: Mapping[str, Moments],
) -> tuple[ColumnStatistics, ...]:
    by_name = {column.name: column for column in table_statistics}
    return tuple(
        by_name[column.name] if column.name in by_name else moments[column.name].statistics(column)
        for column in dataset.columns
    )


class _SplitPass:
    """One pass over one split."""

    def __init__(
        self,
        dataset: OwnDataset,
        split: str,
        path: Path,
        columns: dict[str, Column] | None,
        forms: Mapping[str, ByteForms],
    ) -> None:
        self._dataset, self._split, self._path = dataset, split, path
        self._forms = forms
        # The first batch of the first split decides which columns of strings hold text.
        self._known_columns = columns
        self.columns: dict[str, Column] = columns or {}
        self.moments: dict[str, Moments] = {}
        self._labels = {output: LabelCounter() for output in dataset.description.labels}

    def labels(self) -> dict[str, LabelSummary]:
        """Return output of the model -> summary of the labels that were read."""
        return {output: counter.summary() for output, counter in self._labels.items()}

    def run(self, progress: Progress) -> Count:
        batches = rows = largest = 0
        total = max(0, int(self._dataset.datasets[self._split].cardinality()))
        writer: pq.ParquetWriter | None = None
        try:
            for parts in self._dataset.arrays(self._split, columns=self._dataset.columns):
                writer = writer or self._open(parts)
                size = len(parts[self._dataset.columns[0].name])
                batches, rows, largest = batches + 1, rows + size, max(largest, size)
                self._add(parts, writer)
                progress(batches, total, f"batches of {self._split}")
        finally:
            if writer is not None:
                writer.close()
        if rows == 0:
            raise empty_split(f"{self._dataset.what}, split {self._split!r},")
        return Count(batches=batches, rows=rows, batch_size=largest)

    def shards(self, rows: int) -> tuple[Shard, ...]:
        facts = self._path.stat()
        return (
            Shard(
                file=self._path.name,
                rows=rows,
                size_bytes=facts.st_size,
                sha256=sha256_file(self._path),
            ),
        )

    def _open(self, parts: Mapping[str, NDArray[Any]]) -> pq.ParquetWriter:
        if self._known_columns is None:
            made = {c.name: _tabular(c, parts[c.name]) for c in self._dataset.columns}
            self.columns = {name: column for name, column in made.items() if column is not None}
        self.moments = {
            column.name: Moments()
            for column in self._dataset.columns
            if column.name not in self.columns
        }
        schema = pa.schema([(name, column.arrow_type) for name, column in self.columns.items()])
        return pq.ParquetWriter(self._path, schema)

    def _add(self, parts: Mapping[str, NDArray[Any]], writer: pq.ParquetWriter) -> None:
        for name, moments in self.moments.items():
            moments.add(parts[name])
        for name, forms in self._forms.items():
            forms.add(parts[name])
        for output, label in self._dataset.description.labels.items():
            self._labels[output].add(parts[label.name])
        cells = [_to_arrow(column, parts[name]) for name, column in self.columns.items()]
        if cells:
            writer.write_batch(pa.record_batch(cells, schema=writer.schema))


_TABLE_DTYPES = {"float16": "float32", "float32": "float32", "float64": "float64"}
"""Type of a feature -> type of its column in the temporary table; other types (whole numbers) become int64."""


def _tabular(column: TensorColumn, first: NDArray[Any]) -> Column | None:
    """Return the column for the temporary table; None if the tensor is too large, or its strings are not text."""
    length = column.shape[0] if len(column.shape) == 1 else None
    if len(column.shape) > 1 or (column.shape and not 1 <= (length or 0) <= TABLE_VALUES):
        return None
    if column.dtype == "uint64" or (column.dtype == "string" and not _is_text(first)):
        return None
    dtype: Any = "string" if column.dtype == "string" else _TABLE_DTYPES.get(column.dtype, "int64")
    return Column(name=column.name, dtype=dtype, length=length)


def _is_text(values: NDArray[Any]) -> bool:
    try:
        for value in values.flat:
            value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _to_arrow(column: Column, values: NDArray[Any]) -> pa.Array:
    flat = values.reshape(-1)
    if column.dtype == "string":
        cells = pa.array([value.decode(errors="replace") for value in flat], pa.string())
    else:
        # NaN becomes a missing value, as in a shard.
        cells = pa.array(flat.astype(column.dtype), from_pandas=True)
    if column.length is None:
        return cells
    return pa.FixedSizeListArray.from_arrays(cells, column.length)


@dataclass
class Moments:
    """Moments and limits of a tensor's numbers or, if it holds strings, of their lengths."""

    count: int = 0
    finite: int = 0
    missing: int = 0
    infinite: int = 0
    zeros: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, values: NDArray[Any]) -> None:
        """Add a batch.

        Source: Chan, Golub, LeVeque 1979, updating formulae for the sample variance.
        """
        if values.dtype == object:
            values = np.array([len(value) for value in values.flat])
        numbers = values.astype(np.float64).reshape(-1)
        kept = numbers[np.isfinite(numbers)]
        missing = int(np.isnan(numbers).sum())
        self.missing += missing
        self.count += numbers.size - missing
        self.infinite += numbers.size - missing - kept.size
        if not kept.size:
            return
        mean, together = float(kept.mean()), self.finite + kept.size
        away = mean - self.mean
        self.squares += float(((kept - mean) ** 2).sum())
        self.squares += away * away * self.finite * kept.size / together
        self.mean += away * kept.size / together
        self.finite = together
        self.zeros += int((kept == 0).sum())
        self.low, self.high = min(self.low, float(kept.min())), max(self.high, float(kept.max()))

    def statistics(self, column: TensorColumn) -> ColumnStatistics:
        """Return the moments and limits as statistics of a column."""
        is_bytes, has_values = column.dtype == "string", self.finite > 0
        numbers = NumberStatistics(
            mean=self.mean if has_values else None,
            std=math.sqrt(self.squares / self.finite) if has_values else None,
            min=self.low if has_values else None,
            max=self.high if has_values else None,
            zeros=self.zeros,
            infinite=self.infinite,
            quantiles=(),
            histogram=(),
        )
        lengths = LengthStatistics(
            mean=self.mean if has_values else None,
            min=int(self.low) if has_values else None,
            max=int(self.high) if has_values else None,
        )
        return ColumnStatistics(
            name=column.name,
            dtype=_kind(column),
            count=self.count,
            missing=self.missing,
            distinct=None,
            numbers=None if is_bytes else numbers,
            lengths=lengths if is_bytes else None,
            top=(),
        )


def _kind(column: TensorColumn) -> str:
    if column.shape:
        sizes = ", ".join("any" if size is None else str(size) for size in column.shape)
        return f"{column.dtype} tensor [{sizes}]"
    return "bytes" if column.dtype == "string" else column.dtype
