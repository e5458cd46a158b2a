"""Checks before the first step that ids and strings fit the model's Embedding and lookup layers.

For an id below 0, an Embedding fails on a CPU, returns zeros on a GPU, and returns its first row with XLA. A
model with a lookup layer whose vocabulary has none of the values trains without any warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Finding, Plain
from stoker.core.threads import Replaced
from stoker.data.columns import PADDING, to_numpy
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform
from stoker.train.setup.build_model import BuiltModel

UNKNOWN_SHARE = 0.5
"""If more than this share of a batch's values are unknown, a lookup layer's vocabulary does not fit the data."""

FEWEST_VALUES = 32
"""With fewer values in a batch, a high share may be chance: the layer is reported only if all values are unknown."""

FEWEST_UNKNOWN = 8
"""With fewer values in a batch, it may be chance even if all of them are unknown."""

_MAX_ROWS, _MAX_IMAGE_ROWS = 65_536, 256
"""Maximum number of rows of a split that are searched for a value out of vocabulary: without images, and with
images, of which a row takes about 100 KB."""

_ROWS_PER_READ = 1024
"""Number of rows per read: enough that the cost of a call does not matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lookup:
    """The values that a lookup layer received in the first batch."""

    layer: str
    column: str | None
    """Name of the feature with these values; None if the model changed the values before this layer."""

    values: int
    unknown: int

    @property
    def is_misfit(self) -> bool:
        """Whether so many values are unknown that it cannot be chance."""
        if self.values < FEWEST_VALUES:
            return self.unknown == self.values >= FEWEST_UNKNOWN
        return self.unknown > UNKNOWN_SHARE * self.values

    def warning(self) -> Finding:
        """Return what is wrong and how to fix it."""
        of = f"values of {self.column!r}" if self.column else "values"
        share = self.unknown / self.values
        return Finding.warning(
            "unknown_values",
            f"{share:.0%} of the {of} in the first batch are not in the vocabulary of layer "
            f"{self.layer!r}, which maps all of them to the same id",
            fix="Call the layer's adapt on this column of the training data, or give the layer a vocabulary "
            "with the values as in the data: case, white space and type (1 is not '1') matter.",
        )


@contextmanager
def checked_ids(features: Mapping[str, Any]) -> Iterator[list[Finding]]:
    """Check the Embedding and lookup layers that are called eagerly in the `with` block.

    Args:
        features: The features of the batch, to name the feature that a layer receives.

    Yields:
        A list; after the block, it contains a warning for each lookup layer that does not fit the data.

    Raises:
        ConfigError: An Embedding received an id for which it has no row.
    """
    warnings: list[Finding] = []
    lookups: dict[str, _Lookup] = {}
    embed, vectorize = keras.layers.Embedding.call, keras.layers.TextVectorization.call
    vectorizing: list[tuple[str, Any]] = []

    def checked_embedding(layer: Any, inputs: Any) -> Any:
        _require_rows(layer, inputs, features)
        return embed(layer, inputs)

    def watched_vectorization(layer: Any, inputs: Any) -> Any:
        # The layer calls a StringLookup with single words; report them as values of this layer.
        vectorizing.append((layer.name, inputs))
        try:
            return vectorize(layer, inputs)
        finally:
            vectorizing.pop()

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched_lookup(layer: Any, inputs: Any) -> Any:
            name, whole = vectorizing[-1] if vectorizing else (layer.name, inputs)
            found = _looked_up(layer, inputs, name=name, column=_column_of(whole, features))
            if found is not None:
                lookups.setdefault(name, found)
            return call(layer, inputs)

        return watched_lookup

    with ExitStack() as patches:
        patches.enter_context(Replaced(keras.layers.Embedding, call=checked_embedding))
        patches.enter_context(Replaced(keras.layers.TextVectorization, call=watched_vectorization))
        for kind in (keras.layers.StringLookup, keras.layers.IntegerLookup):
            patches.enter_context(Replaced(kind, call=watched(kind.call)))
        yield warnings
    warnings.extend(found.warning() for found in lookups.values() if found.is_misfit)


def _require_rows(layer: Any, inputs: Any, features: Mapping[str, Any]) -> None:
    ids = _flat(inputs)
    if ids is None or not ids.size:
        return
    wrong = (ids <= -1) | (ids >= layer.input_dim)
    if not wrong.any():
        return
    column = _column_of(inputs, features)
    least, most = int(ids.min()), int(ids.max())
    raise ConfigError(
        f"layer {layer.name!r}, an Embedding, has rows for the ids from 0 to {layer.input_dim - 1}",
        got=Plain(
            f"{least if least < 0 else most} in the first batch"
            f"{f' of {column!r}' if column else ''}, and {int(wrong.sum())} of {ids.size} ids like it"
        ),
        fix=_FOR_UNKNOWN
        if least < 0
        else f"Set input_dim={most + 1} or more, or cut the ids in preprocessing_fn.",
    )


_FOR_UNKNOWN = (
    "-1 is the id of a value out of vocabulary: set num_oov_buckets=1 in preprocessing_fn and add a row "
    "to the Embedding, or add 1 to the ids."
)


def _looked_up(layer: Any, inputs: Any, *, name: str, column: str | None) -> _Lookup | None:
    """Count a lookup layer's values, and those out of vocabulary; masked and empty values do not count."""
    values = _flat(inputs)
    if values is None or layer.invert:
        return None
    if values.dtype == object:
        values = values[(values != b"") & (values != str(layer.mask_token).encode())]
    elif layer.mask_token is not None:
        values = values[values != layer.mask_token]
    if not values.size:
        return None
    table = layer.lookup_table
    ids = table.lookup(tf.cast(tf.constant(values), table.key_dtype))
    unknown = int(np.sum(ids.numpy() == np.asarray(table.default_value)))
    return _Lookup(layer=name, column=column, values=values.size, unknown=unknown)


def _column_of(tensor: Any, features: Mapping[str, Any]) -> str | None:
    """Return the name of the feature that has the same values as a tensor; None if there is none."""
    values = _flat(tensor)
    for name, feature in features.items():
        found = _flat(feature)
        if values is not None and found is not None and np.array_equal(found, values):
            return name
    return None


def _flat(tensor: Any) -> NDArray[Any] | None:
    """Return the values of a tensor as a flat array; None while a graph is traced."""
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.flat_values
    elif isinstance(tensor, tf.SparseTensor):
        tensor = tensor.values
    if not tf.executing_eagerly() or not tf.is_tensor(tensor) or tf.is_symbolic_tensor(tensor):
        return None
    return np.asarray(tensor).reshape(-1)


def require_embedded_vocabularies(
    built: BuiltModel,
    dataset: Dataset,
    transform: Transform,
    losses: Sequence[Mapping[str, Any]],
) -> None:
    """Check that no value out of vocabulary reaches an Embedding as a negative id.

    The first batch may contain no such value, although the data does.

    Args:
        built: The compiled model, in the strategy's scope.
        dataset: The shards.
        transform: Converts raw columns to features.
        losses: `VocabularyLoss` as JSON values, counted over whole splits.

    Raises:
        ConfigError: Such a value reaches an Embedding; the error names the column and the share of values.
    """
    served = {column.name for column in transform.serving_columns}
    for loss in losses:
        if not loss["lost"] or loss["column"] not in served:
            continue
        features = _features_out_of_vocabulary(dataset, transform, loss)
        if features is None or not any(map(_has_negative, features.values())):
            continue
        try:
            with checked_ids(features):
                built.model(built.adapt(features), training=False)
        except ConfigError as error:
            share = loss["lost"] / loss["values"]
            raise ConfigError(
                f"{share:.1%} of the values of {loss['column']!r} in {loss['split']} are not in its "
                f"vocabulary, and {error.rule}",
                fix=_FOR_UNKNOWN,
            ) from error


def _has_negative(feature: Any) -> bool:
    values = _flat(feature)
    return values is not None and values.dtype.kind == "i" and bool((values < 0).any())


def _features_out_of_vocabulary(
    dataset: Dataset, transform: Transform, loss: Mapping[str, Any]
) -> dict[str, tf.Tensor] | None:
    """Return the features of the first row with a value out of vocabulary; None if no early row has one."""
    columns = transform.serving_columns
    own = next(column for column in columns if column.name == loss["column"])
    terms = transform.spec.vocabularies[loss["vocabulary"]].read(transform.root)
    known = {*terms, _as_term(PADDING.get(own.dtype, b""))}
    most = _MAX_IMAGE_ROWS if any(c.dtype == "image" for c in columns) else _MAX_ROWS
    names, rows, read = [column.name for column in columns], min(most, _ROWS_PER_READ), 0
    for batch in dataset.batches(loss["split"], columns=names, rows=rows, whole=False):
        values = to_numpy(own, batch.column(own.name)).reshape(batch.num_rows, -1)
        for row, of_row in enumerate(values):
            if any(_as_term(value) not in known for value in of_row):
                one = batch.slice(row, 1)
                raw = {c.name: tf.constant(to_numpy(c, one.column(c.name))) for c in columns}
                return transform.apply_features(raw)
        read += batch.num_rows
        if read >= most:
            return None
    return None


def _as_term(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
