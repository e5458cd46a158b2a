"""The description of a transform: names, types, vocabularies, constants. Does not import TensorFlow."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stoker.core.config import build, nearest
from stoker.core.errors import ConfigError, DataError, Plain
from stoker.core.multi_output import alone
from stoker.data.columns import Column

Described = TypeVar("Described")

SPEC = "spec.json"
"""File name of a transform's description, next to its graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSpec:
    """One output of the transform."""

    name: str
    """Its key in the dict that the user's function returns."""

    dtype: str
    """TensorFlow's name of the output's type, e.g. `float32`."""

    shape: tuple[int | None, ...]
    """Shape of the output, without the batch dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSpec:
    """The label of one of the model's outputs."""

    name: str
    """The output of the user's function, or the raw column."""

    dtype: str
    """`int64` or `float32`."""

    shape: tuple[int | None, ...]
    """Shape of the label, without the batch dimension."""

    classes: tuple[str, ...] | None
    """Class names, in the order of their ids; None for a label of numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdSpec:
    """The ids in an integer output."""

    num_buckets: int
    """Ids are below this, and at least 0."""

    vocabulary: str | None = None
    """The vocabulary of the ids; None for buckets and hashes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularySpec:
    """One learned vocabulary."""

    file: str
    """File with one term per line; the path is relative to the transform's folder."""

    terms: int
    """Number of terms, without out-of-vocabulary buckets."""

    escaped: bool = False
    """Whether the file escapes a term's line breaks as `\\n` or `\\r`, and doubles backslashes."""

    def read(self, root: Path) -> list[bytes]:
        """Return the terms in the order of their ids.

        Args:
            root: The transform's folder.
        """
        lines = (root / self.file).read_bytes().split(b"\n")[: self.terms]
        return [unescaped(line) for line in lines] if self.escaped else lines


def escaped(term: bytes) -> bytes:
    """Return a term as one line of a file: line breaks and backslashes are escaped."""
    return term.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def unescaped(line: bytes) -> bytes:
    """Return the term from which `escaped` made the line."""
    return _ESCAPE.sub(lambda found: _ESCAPED[found[0]], line)


_ESCAPED = {b"\\\\": b"\\", b"\\n": b"\n", b"\\r": b"\r"}
_ESCAPE = re.compile(rb"\\[\\nr]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformSpec:
    """Complete description of a transform, without its graph."""

    features: tuple[FeatureSpec, ...]
    """The model's inputs, in the order in which the function returns them."""

    labels: dict[str, LabelSpec]
    """Output of the model -> its label; empty without a label."""

    serving_columns: tuple[Column, ...]
    """Raw columns that the features need, in the dataset's order."""

    label_columns: tuple[Column, ...]
    """Raw columns that the labels need, in the dataset's order."""

    weight: str | None
    """The output or raw column with each row's weight; None if all rows have equal weight."""

    weight_columns: tuple[Column, ...]
    """Raw columns that the weight needs, in the dataset's order."""

    vocabularies: dict[str, VocabularySpec]
    """File name of a vocabulary -> its description."""

    ids: dict[str, IdSpec]
    """Integer output -> its ids; only outputs that hold ids are listed."""

    analyzers: tuple[dict[str, Any], ...]
    """Analyzer calls and their results, for people only."""


class TransformOutput:
    """The argument `transform` of the user's `build(features, transform)`."""

    def __init__(self, spec: TransformSpec) -> None:
        """Wrap a transform's description."""
        self._spec = spec

    def vocabulary_size(self, name: str) -> int:
        """Return the number of terms of a vocabulary, without out-of-vocabulary buckets.

        Args:
            name: An output that holds ids of the vocabulary, or the `vocab_filename`.

        Raises:
            ConfigError: the vocabulary does not exist.

        Source: `tft.TFTransformOutput.vocabulary_size_by_name`.
        """
        ids = self._spec.ids.get(name)
        vocabulary = ids.vocabulary if ids is not None and ids.vocabulary else name
        if vocabulary not in self._spec.vocabularies:
            outputs = [output for output, ids in self._spec.ids.items() if ids.vocabulary]
            known = dict.fromkeys([*outputs, *self._spec.vocabularies])
            raise ConfigError(
                "vocabulary_size needs an output with ids of a vocabulary, or a vocab_filename",
                got=name,
                fix=nearest(name, known),
            )
        return self._spec.vocabularies[vocabulary].terms

    def num_buckets(self, name: str) -> int:
        """Return the number of ids of an output, which is the size of an embedding: terms and buckets.

        Args:
            name: An output with ids of a vocabulary, of buckets, or of `hash_strings`.

        Raises:
            ConfigError: the output does not exist, or its ids are unknown.

        Source: `tft.TFTransformOutput.num_buckets_for_transformed_feature`.
        """
        if name not in self._spec.ids:
            raise ConfigError(
                "num_buckets needs an output with ids of a vocabulary, of buckets or of hash_strings",
                got=name,
                fix=nearest(name, self._spec.ids),
            )
        return self._spec.ids[name].num_buckets

    @property
    def classes(self) -> tuple[str, ...] | dict[str, tuple[str, ...] | None] | None:
        """The names of the label's classes; None for a label of numbers.

        If `label` names several labels: output of the model -> the names.
        """
        return alone({output: label.classes for output, label in self._spec.labels.items()}) or None

    @property
    def num_classes(self) -> int | dict[str, int | None] | None:
        """The number of classes of the label, if known: of strings, or of ids; else None.

        If `label` names several labels: output of the model -> the number.
        """
        labels = self._spec.labels
        return alone({name: self._classes_of(label) for name, label in labels.items()}) or None

    def _classes_of(self, label: LabelSpec) -> int | None:
        if label.classes is not None:
            return len(label.classes)
        ids = self._spec.ids.get(label.name)
        return ids.num_buckets if ids else None


def to_json(spec: TransformSpec) -> dict[str, Any]:
    """Return the description as JSON values."""
    # A list keeps the order of the outputs, which the user chooses; the keys of a JSON file are sorted.
    labels = [{"output": name, **dataclasses.asdict(each)} for name, each in spec.labels.items()]
    return dataclasses.asdict(spec) | {"labels": labels}


def from_json(raw: Any) -> TransformSpec:
    """Convert the JSON values of `to_json` back to a description.

    Raises:
        DataError: the values do not describe a transform.
    """
    labels = raw.get("labels") if isinstance(raw, dict) else None
    if isinstance(labels, list) and all(isinstance(each, dict) for each in labels):
        raw = raw | {"labels": {each.pop("output", ""): each for each in map(dict, labels)}}
    return read_as(TransformSpec, raw, f"{SPEC} must describe a transform")


def read_as(cls: type[Described], raw: Any, rule: str) -> Described:
    """Build a dataclass from the JSON values that `dataclasses.asdict` made of it.

    Raises:
        DataError: the values do not fit the dataclass; the message begins with `rule`.
    """
    try:
        return build(cls, raw)
    except ConfigError as error:
        fix = "Run `stoker analyze` again."
        raise DataError(rule, got=Plain(error.rule), fix=fix) from error


def json_number(value: float) -> float | int | str | None:
    """Return a number in a form that JSON allows: NaN becomes null, infinity becomes "inf" or "-inf"."""
    if isinstance(value, int) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)
