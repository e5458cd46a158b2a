"""What a transform says about itself: names, types, vocabularies, constants. No TensorFlow here."""

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
"""The transform's own description, beside its graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSpec:
    """One output of the transform."""

    name: str
    """As the user's function calls it."""

    dtype: str
    """TensorFlow's name of its type, e.g. `float32`."""

    shape: tuple[int | None, ...]
    """Without the batch dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSpec:
    """What one of the model's outputs learns."""

    name: str
    """The output of the user's function, or the raw column."""

    dtype: str
    """`int64` or `float32`."""

    shape: tuple[int | None, ...]
    """Without the batch dimension."""

    classes: tuple[str, ...] | None
    """The strings that its ids stand for; None for a label of numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdSpec:
    """Which ids an integer output holds."""

    num_buckets: int
    """Ids go from 0 to this, exclusive."""

    vocabulary: str | None = None
    """The vocabulary that they come from; None for buckets and hashes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularySpec:
    """One learned vocabulary."""

    file: str
    """Its file, relative to the transform's folder: a term a line."""

    terms: int
    """Number of terms, out-of-vocabulary buckets not counted."""

    escaped: bool = False
    """Whether the file escapes a term's line breaks as `\\n` or `\\r`, and doubles backslashes."""

    def read(self, root: Path) -> list[bytes]:
        """The terms in the order of their IDs.

        Args:
            root: The transform's folder.
        """
        lines = (root / self.file).read_bytes().split(b"\n")[: self.terms]
        return [unescaped(line) for line in lines] if self.escaped else lines


def escaped(term: bytes) -> bytes:
    """A term as one line of a file."""
    return term.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def unescaped(line: bytes) -> bytes:
    """The term for a line made by `escaped`."""
    return _ESCAPE.sub(lambda found: _ESCAPED[found[0]], line)


_ESCAPED = {b"\\\\": b"\\", b"\\n": b"\n", b"\\r": b"\r"}
_ESCAPE = re.compile(rb"\\[\\nr]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformSpec:
    """Everything about a transform but its graph."""

    features: tuple[FeatureSpec, ...]
    """What the model sees, in the order in which the function gave it."""

    labels: dict[str, LabelSpec]
    """What it learns, by the model's output; empty where there is no label."""

    serving_columns: tuple[Column, ...]
    """Raw columns that the features need, in the dataset's order."""

    label_columns: tuple[Column, ...]
    """Raw columns that the labels need, in the dataset's order."""

    weight: str | None
    """The output or raw column that says how much a row counts; None where all count alike."""

    weight_columns: tuple[Column, ...]
    """Raw columns that the weight needs, in the dataset's order."""

    vocabularies: dict[str, VocabularySpec]
    """By their file names."""

    ids: dict[str, IdSpec]
    """By output; only outputs whose ids are known."""

    analyzers: tuple[dict[str, Any], ...]
    """What was asked of the data, and the answers: for reading, nothing depends on them."""


class TransformOutput:
    """What `build(features, transform)` may ask while it makes the model."""

    def __init__(self, spec: TransformSpec) -> None:
        """Answer from a transform's description."""
        self._spec = spec

    def vocabulary_size(self, name: str) -> int:
        """How many terms a vocabulary has, out-of-vocabulary buckets not counted.

        Args:
            name: An output that came from the vocabulary, or its `vocab_filename`.

        Raises:
            ConfigError: there is no such vocabulary.

        Source: `tft.TFTransformOutput.vocabulary_size_by_name`.
        """
        ids = self._spec.ids.get(name)
        vocabulary = ids.vocabulary if ids is not None and ids.vocabulary else name
        if vocabulary not in self._spec.vocabularies:
            outputs = [output for output, ids in self._spec.ids.items() if ids.vocabulary]
            known = dict.fromkeys([*outputs, *self._spec.vocabularies])
            raise ConfigError(
                "vocabulary_size needs an output of a vocabulary, or a vocab_filename",
                got=name,
                fix=nearest(name, known),
            )
        return self._spec.vocabularies[vocabulary].terms

    def num_buckets(self, name: str) -> int:
        """How many different ids an output can have: terms and buckets; the size of an embedding.

        Args:
            name: An output of a vocabulary, of buckets, or of `hash_strings`.

        Raises:
            ConfigError: there is no such output, or its ids are not known.

        Source: `tft.TFTransformOutput.num_buckets_for_transformed_feature`.
        """
        if name not in self._spec.ids:
            raise ConfigError(
                "num_buckets needs an output of a vocabulary, of buckets or of hash_strings",
                got=name,
                fix=nearest(name, self._spec.ids),
            )
        return self._spec.ids[name].num_buckets

    @property
    def classes(self) -> tuple[str, ...] | dict[str, tuple[str, ...] | None] | None:
        """The strings that the label's ids stand for; None for a label of numbers.

        Where `label` names several, this is a dict by the model's output.
        """
        return alone({output: label.classes for output, label in self._spec.labels.items()}) or None

    @property
    def num_classes(self) -> int | dict[str, int | None] | None:
        """How many classes the label has, where that is known: strings, or ids of a vocabulary.

        Where `label` names several, this is a dict by the model's output.
        """
        labels = self._spec.labels
        return alone({name: self._classes_of(label) for name, label in labels.items()}) or None

    def _classes_of(self, label: LabelSpec) -> int | None:
        if label.classes is not None:
            return len(label.classes)
        ids = self._spec.ids.get(label.name)
        return ids.num_buckets if ids else None


def to_json(spec: TransformSpec) -> dict[str, Any]:
    """The description as JSON's own types."""
    # A list, as the order of the outputs is the user's, and a file has its keys sorted.
    labels = [{"output": name, **dataclasses.asdict(each)} for name, each in spec.labels.items()]
    return dataclasses.asdict(spec) | {"labels": labels}


def from_json(raw: dict[str, Any]) -> TransformSpec:
    """Read back what `to_json` made.

    Raises:
        DataError: it is something else.
    """
    labels = raw.get("labels")
    if isinstance(labels, list) and all("output" in each for each in labels):
        by_output = {each["output"]: dict(each) for each in labels}
        for each in by_output.values():
            del each["output"]
        raw = raw | {"labels": by_output}
    return read_as(TransformSpec, raw, f"{SPEC} must describe a transform")


def read_as(cls: type[Described], raw: dict[str, Any], rule: str) -> Described:
    """Build a dataclass from the JSON values that `dataclasses.asdict` made of one.

    Raises:
        DataError: they are something else; begins with the rule.
    """
    try:
        return build(cls, raw)
    except ConfigError as error:
        fix = "Run `stoker analyze` again."
        raise DataError(rule, got=Plain(error.rule), fix=fix) from error


def json_number(value: float) -> float | int | str | None:
    """A number as JSON can hold it: NaN becomes null, an infinity its name."""
    if isinstance(value, int) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)
