"""Warn, before the first step, about columns that the model cannot learn from or should not see."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ibis
import pyarrow as pa

from stoker.cluster.limits import usable_cores
from stoker.core.errors import Finding
from stoker.core.multi_output import ONLY
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.features import engine
from stoker.data.features.analysis.anomalies import Anomaly
from stoker.data.features.analysis.statistics import TRAIN
from stoker.data.features.spec import LabelSpec, TransformSpec
from stoker.data.sources.config import leaving_out

LOST_SHARE = 0.5
"""A split is reported if at least this share of a column's values is out of vocabulary."""

MIN_VALUES = 100
"""A split with fewer values is not reported: a share of `LOST_SHARE` may then be chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyLoss:
    """Number of values of a raw column that are not in its vocabulary."""

    vocabulary: str
    """The vocabulary's file name."""

    column: str
    """The raw column that the vocabulary was learned from."""

    split: str
    """The split that was counted."""

    values: int
    """Number of values in the split. Elements of vectors and lists count; missing values and padding ("") do not."""

    lost: int
    """Number of these values that are out of vocabulary."""


def vocabulary_losses(dataset: Dataset, spec: TransformSpec, root: Path) -> list[VocabularyLoss]:
    """For each vocabulary that was learned from a raw column, count the column's values outside it.

    Args:
        dataset: Shards whose hashes were checked.
        spec: Description of the transform.
        root: The transform's folder.

    Returns:
        The losses of every split but the training split; for vocabularies that were cut, of that too.
    """
    learned = [
        call for call in spec.analyzers if call["kind"] == "vocabulary" and call["is_raw_column"]
    ]
    found = []
    for call in learned:
        column, name = dataset.column(call["of"]), call["answer"]["file"]
        terms = pa.array(spec.vocabularies[name].read(root), pa.binary())
        is_cut = any(call["params"][key] for key in ("top_k", "frequency_threshold"))
        for split in dataset.splits:
            if dataset.rows(split) and (is_cut or split != TRAIN):
                engine.verify_split(dataset, split)
                values, lost = _count_lost(dataset, split, column, terms.cast(pa.string()))
                found.append(
                    VocabularyLoss(
                        vocabulary=name, column=column.name, split=split, values=values, lost=lost
                    )
                )
    return found


def _count_lost(dataset: Dataset, split: str, column: Column, terms: pa.Array) -> tuple[int, int]:
    """Return the number of a column's values, and how many of them are not in `terms`."""
    with engine.connection(threads=usable_cores()) as backend:
        values = engine.read_split(backend, dataset, split).present_values(column)
        tokens = values.select(term=values.value.cast("string"))
        lost = tokens.anti_join(ibis.memtable(pa.table({"term": terms})), "term")
        count, of_lost = (backend.to_pyarrow(each.count()).as_py() for each in (tokens, lost))
        return int(count), int(of_lost)


_KINDS = ("constant", "all_missing", "decides_label", "rounded")
"""Kinds of anomalies of the training split that matter to a model with this column as input."""


def anomalies_as_facts(anomalies: Sequence[Anomaly]) -> list[dict[str, Any]]:
    """Return, as JSON values, the anomalies that `input_findings` needs."""
    return [asdict(each) for each in anomalies if each.kind in _KINDS and each.split == TRAIN]


def input_findings(
    *,
    anomalies: Sequence[Mapping[str, Any]],
    losses: Sequence[Mapping[str, Any]],
    served: Mapping[str, tuple[int | None, ...]],
    labels: Mapping[str, LabelSpec],
    label_columns: Collection[str],
    own: bool,
) -> Iterator[Finding]:
    """Check the raw columns that the model sees; return at most one warning for each.

    Args:
        anomalies: Result of `anomalies_as_facts`.
        losses: `VocabularyLoss` as JSON values.
        served: Raw columns that the features need -> shape of one value.
        labels: Output of the model -> its label.
        label_columns: Raw columns that the labels need.
        own: Whether the data is the user's own dataset, which has no settings for columns.
    """
    reported: set[str] = set()
    for each in anomalies:
        name = each["column"]
        # Vectors of zeros and masks of ones are ordinary in elements made by code.
        is_relevant = name in served and (not served[name] or each["kind"] == "decides_label")
        if is_relevant and name not in reported:
            reported.add(name)
            yield _anomaly_finding(each, own=own)
    scalar = all(not label.shape for label in labels.values())
    # A label may be an element of a vector whose other elements are the features.
    whole = all(name in served and not served[name] for name in label_columns)
    if not own and label_columns and scalar and whole:
        yield Finding.warning(
            "label_from_features",
            f"the label is computed from columns that the model sees: {', '.join(label_columns)}",
            "List under label_only the columns that serving will not have.",
        )
    for output, label in labels.items():
        yield from _similar_classes(output, label.classes or ())
    for loss in losses:
        share, name = loss["lost"] / max(loss["values"], 1), loss["column"]
        is_high = share >= LOST_SHARE and loss["values"] >= MIN_VALUES
        if is_high and name in served and name not in reported:
            reported.add(name)
            yield Finding.warning(
                "vocabulary_loss",
                f"{share:.0%} of the values of {name!r} in {loss['split']} are not in its "
                "vocabulary",
                "Use hash_strings, or split, cut or round the values before the vocabulary.",
            )


def _anomaly_finding(anomaly: Mapping[str, Any], *, own: bool) -> Finding:
    name, kind = anomaly["column"], anomaly["kind"]
    message = f"column {name!r} of {TRAIN}: {anomaly['message']}"
    leave_out = "Leave it out of the elements" if own else f"Set {leaving_out(name)}"
    if kind == "decides_label":
        fix = f"{leave_out} if it is known only after the label; otherwise a simple rule can replace the model."
    elif kind == "rounded":
        fix = "Subtract an offset in the source" + (
            ", in float64."
            if own
            else f"; or set data.types: {{{name}: string}} and subtract it in preprocessing_fn from "
            f"tf.strings.to_number(inputs[{name!r}], tf.float64)."
        )
    else:
        message, fix = f"{message}, so the model learns nothing from it", f"{leave_out}."
    return Finding.warning(kind, message, fix)


def _similar_classes(output: str, classes: Sequence[str]) -> Iterator[Finding]:
    """Find classes of a text label that differ only in case or white space."""
    found: dict[str, list[str]] = {}
    for text in classes:
        found.setdefault(" ".join(text.split()).casefold(), []).append(text)
    alike = next((texts for texts in found.values() if len(texts) > 1), None)
    if alike is not None:
        subject = f"the label of output {output!r}" if output != ONLY else "the label"
        yield Finding.warning(
            "label_spelling",
            f"{subject} has the classes {', '.join(map(repr, alike))}, which differ only in case or "
            "white space but are learned as different classes",
            "Spell them the same way in the source, or change them in preprocessing_fn: "
            "tf.strings.lower(tf.strings.strip(label)).",
        )
