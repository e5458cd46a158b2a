"""Compare the splits of a dataset: their shares, label rates and common rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ibis
import ibis.expr.types as ir

from stoker.cluster.limits import usable_cores
from stoker.core.statistics.columns import ColumnStatistics
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.features import engine
from stoker.data.features.analysis.anomalies import Anomaly, find_skew
from stoker.data.features.analysis.statistics import TRAIN, SplitFacts, Statistics
from stoker.data.sources.config import Duplicates, IngestConfig

CHANCE = 4.0
"""A difference of up to this many standard deviations may be chance; by chance, one in 16,000 is larger."""

MIN_DIFFERENCE = 0.05
"""Minimum difference between an actual and an expected share that is reported, relative to the expected share (or to
1 minus this share, if that is smaller): for 20 %, it is 1 %."""

NEARLY_DISTINCT = 0.9
"""Copies of training rows are reported only if at least this share of the rows is distinct."""

COPIED_SHARE, COPIED_ROWS = 0.01, 5
"""Copies of training rows are reported only if a split has more than this share, and at least this number."""

OPPOSED_SHARE = 0.1
"""A split is reported if more than this share of its rows has the features of a training row, but another
label. Checked only if equal rows stay in one split or are dropped."""

KINDS = ("split_share", "label_rate", "copies", "label_splits")
"""Kinds of the anomalies that this module finds."""


def relate_splits(
    statistics: Statistics,
    dataset: Dataset,
    *,
    labels: Collection[str],
    label_only: Collection[str],
) -> Statistics:
    """Return the statistics with facts about each split: share, label rates, rows shared with training.

    Args:
        statistics: Statistics of the dataset.
        dataset: The dataset; its shards were verified before.
        labels: Raw columns that are labels.
        label_only: Other columns that are not features.
    """
    filled = [split for split, count in statistics.rows.items() if count]
    if TRAIN not in filled:
        return statistics
    images = [column for column in dataset.columns if column.dtype == "image"]
    rows = images or dataset.columns
    features = [c for c in rows if c.name not in {*labels, *label_only}]
    with engine.connection(threads=usable_cores()) as backend:
        hashes = ibis.union(
            *(
                _hashes(engine.read_split(backend, dataset, split), index, rows, features)
                for index, split in enumerate(filled)
            ),
        )
        by_row = _counted(hashes, "row", filled)
        by_features = by_row
        if features != list(rows):
            by_features = _counted(hashes, "features", filled) if features else {}
    # Training images whose original bytes are not stored cannot be compared.
    comparable = not images or (dataset.image_store or "original").startswith("original")
    total = sum(statistics.rows.values())
    facts = {
        split: SplitFacts(
            share=statistics.rows[split] / total,
            distinct=by_row[f"distinct_{index}"],
            label_rates={
                column.name: _rates(column)
                for column in statistics.splits[split]
                if column.name in labels
            },
            copies_of_train=by_row.get(f"shared_{index}") if comparable else None,
            features_in_train=by_features.get(f"shared_{index}") if comparable else None,
        )
        for index, split in enumerate(filled)
    }
    return replace(
        statistics, distinct=by_row["distinct"] if comparable else None, split_facts=facts
    )


def _hashes(
    split: engine.Split, index: int, rows: Sequence[Column], features: Sequence[Column]
) -> ir.Table:
    # Without features, the hash is not used; any constant will do.
    return split.table.select(
        split=ibis.literal(index),
        row=_hash(split, rows),
        features=_hash(split, features) if features else ibis.literal(0, "int64"),
    )


def _hash(split: engine.Split, columns: Sequence[Column]) -> ir.IntegerValue:
    values = {f"c{place}": split.value(column.name) for place, column in enumerate(columns)}
    return ibis.struct(values).hash()


def _counted(hashes: ir.Table, key: str, splits: Sequence[str]) -> dict[str, int]:
    """Count distinct values, overall and by split, and each split's rows whose value is also in training."""
    train = splits.index(TRAIN)
    counts = {f"n{index}": (hashes.split == index).sum() for index in range(len(splits))}
    groups = hashes.group_by(key).aggregate(**counts)
    counts_by_name = {"distinct": groups.count()}
    for index in range(len(splits)):
        counts_by_name[f"distinct_{index}"] = (groups[f"n{index}"] > 0).sum()
        if index != train:
            shared = groups[f"n{index}"].sum(where=groups[f"n{train}"] > 0)
            counts_by_name[f"shared_{index}"] = shared.fill_null(0)
    found: dict[str, Any] = groups.aggregate(**counts_by_name).to_pyarrow().to_pylist()[0]
    return {name: int(value) for name, value in found.items()}


def _rates(column: ColumnStatistics) -> dict[str, float]:
    if not _is_counted(column):
        return {}
    return {top.value: top.count / column.count for top in column.top}


def _is_counted(column: ColumnStatistics) -> bool:
    """Whether the column has one value per row, and `top` holds all of its distinct values."""
    return bool(column.top) and len(column.top) == column.distinct and column.length is None


def find_split_anomalies(
    statistics: Statistics, *, labels: Collection[str], config: IngestConfig
) -> list[Anomaly]:
    """Find shares and label rates that chance does not explain, and copies of training rows.

    Args:
        statistics: Result of `relate_splits`.
        labels: Raw columns that are labels.
        config: How the records were split.
    """
    found: list[Anomaly] = []
    for split in statistics.split_facts:
        if split != TRAIN:
            found += _share(statistics, split, config)
            found += _copies(statistics, split, config)
            found += _label_splits(statistics, split, labels, config)
            for label in labels:
                found += _label_rate(statistics, split, label, config)
    return found


def _share(statistics: Statistics, split: str, config: IngestConfig) -> Iterator[Anomaly]:
    total, expected = sum(statistics.rows.values()), config.splits[split]
    variance = total * expected * (1 - expected)
    if _differs(statistics.rows[split], total, share=expected, variance=variance):
        text = (
            f"it holds {statistics.split_facts[split].share:.1%} of the rows instead of the "
            f"{expected:.1%} in data.splits, which chance does not explain: {_why(statistics, config)}"
        )
        yield _make(split, "", "split_share", text)


def _label_rate(
    statistics: Statistics, split: str, label: str, config: IngestConfig
) -> Iterator[Anomaly]:
    column, training = statistics.column(split, label), statistics.column(TRAIN, label)
    others = [statistics.column(name, label) for name in statistics.split_facts]
    if not all(map(_is_counted, others)):
        for skew in find_skew(split, column, training) if column.length is None else ():
            text = f"{skew.message}, which chance does not explain: {_why(statistics, config)}"
            yield _make(split, label, "label_rate", text)
        return
    total = sum(other.count for other in others)
    here = _counts(column)
    for value, count in _counts(*others).items():
        share = count / total
        # Source: the hypergeometric distribution, because a split is a random sample of all rows.
        variance = column.count * share * (1 - share) * (1 - column.count / total)
        if _differs(here[value], column.count, share=share, variance=variance):
            rate, in_train = (counts.get(value, 0) for counts in (_rates(column), _rates(training)))
            text = (
                f"{value[:40]!r} is {rate:.1%} of its labels but {in_train:.1%} of the training "
                f"split's, which chance does not explain: {_why(statistics, config)}"
            )
            yield _make(split, label, "label_rate", text)
            return


def _counts(*columns: ColumnStatistics) -> Counter[str]:
    total: Counter[str] = Counter()
    for column in columns:
        total.update({top.value: top.count for top in column.top})
    return total


def _differs(count: int, rows: int, *, share: float, variance: float) -> bool:
    """Return whether a count differs from its expected share by more than chance, and enough to matter.

    Source: Bernstein's inequality, which holds for few rows and rare values too.
    """
    by_chance = CHANCE * math.sqrt(variance) + CHANCE**2 / 3
    small = MIN_DIFFERENCE * min(share, 1 - share) * rows
    return abs(count - share * rows) > max(by_chance, small)


def _duplicates(statistics: Statistics, config: IngestConfig) -> Duplicates:
    return config.duplicates_for(column.dtype for column in statistics.splits[TRAIN])


def _why(statistics: Statistics, config: IngestConfig) -> str:
    if config.split_by is not None:
        return (
            f"rows with the same {config.split_by!r} stay in one split, and these groups are few or "
            "differ from each other"
        )
    match _duplicates(statistics, config):
        case "together":
            return "equal rows stay in one split; data.duplicates: spread splits them row by row"
        case "drop":
            return "only one of equal rows was kept; data.duplicates: spread keeps all of them"
    return "with a different data.seed, the split is different"


def _copies(statistics: Statistics, split: str, config: IngestConfig) -> Iterator[Anomaly]:
    """Report copies of training rows if nearly all rows of the data are distinct: metrics on copies are too good."""
    facts, rows = statistics.split_facts[split], statistics.rows[split]
    copies, distinct = facts.copies_of_train, statistics.distinct
    if copies is None or distinct is None or copies < COPIED_ROWS or copies <= COPIED_SHARE * rows:
        return
    if distinct >= NEARLY_DISTINCT * sum(statistics.rows.values()):
        # Only the key decides the split: a copy in a different split has a different key, so `drop` keeps it.
        remedy = "Set data.duplicates: together (or drop)"
        if config.split_by is not None:
            remedy = (
                f"The copies differ in {config.split_by!r}: split by a column in which they are equal, or "
                "delete them"
            )
        text = (
            f"{copies:,} of its {rows:,} rows are exact copies of training rows, though nearly all "
            f"rows are distinct: metrics will be too good. {remedy}"
        )
        yield _make(split, "", "copies", text)


def _label_splits(
    statistics: Statistics, split: str, labels: Collection[str], config: IngestConfig
) -> Iterator[Anomaly]:
    """Find splits whose rows have the features of training rows, but never their labels.

    This happens because equal rows, label included, stay in one split: the label decides the split.
    """
    facts, rows = statistics.split_facts[split], statistics.rows[split]
    classes = [statistics.column(TRAIN, label) for label in labels]
    if not classes or not all(map(_is_counted, classes)) or config.split_by is not None:
        return
    if _duplicates(statistics, config) == "spread" or facts.features_in_train is None:
        return
    if facts.features_in_train > max(COPIED_ROWS, OPPOSED_SHARE * rows):
        text = (
            f"{facts.features_in_train:,} of its {rows:,} rows have the features of training rows, "
            "but never with the same label: the label decides the split, and metrics will be too "
            "bad. Leave out data.duplicates"
        )
        yield _make(split, "", "label_splits", text)


def _make(split: str, column: str, kind: str, message: str) -> Anomaly:
    return Anomaly(split=split, column=column, kind=kind, severity="warning", message=message)
