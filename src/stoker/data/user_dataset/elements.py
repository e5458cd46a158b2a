"""What an element of a user's dataset may be, and each other thing that it is refused for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.core.multi_output import by_output
from stoker.data.user_dataset.description import INPUTS, LABEL, Description, TensorColumn

_FORM = (
    "Give batches of (features, label) or (features, label, weight), as model.fit takes them; where "
    "train_step needs no label, the features twice: .map(lambda x: (x, x))."
)

DTYPES = frozenset(
    ["bool", "string", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
"""Types of a feature or label; the others cannot be asked for over REST."""


def describe_element(spec: Any, *, what: str) -> Description:
    """Read off what a dataset's `element_spec` gives.

    Args:
        spec: `tf.data.Dataset.element_spec`.
        what: Whose it is, for the message.

    Raises:
        ConfigError: it is no batch of (features, label) or (features, label, weight) of tensors.
    """
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise ConfigError(
            f"{what} must give (features, label) or (features, label, weight)",
            got=Plain(_form(spec)),
            fix=_FORM,
        )
    features, label = spec[:2]
    named = isinstance(features, Mapping)
    parts = dict(features) if named else {INPUTS: features}
    if not parts or not all(isinstance(name, str) and name for name in parts):
        raise ConfigError(
            f"{what} must give features by name, or a single tensor",
            got=Plain(f"a dict with the keys {list(parts)}"),
            fix="Name each feature by a text.",
        )
    described = Description(
        features=tuple(_column(name, part, what=what) for name, part in parts.items()),
        labels=_labels(label, parts, what=what),
        named=named,
    )
    if any(column.dtype == "string" for column in described.labels.values()):
        raise ConfigError(
            f"{what} must give a label of numbers",
            got=Plain("texts"),
            fix="Give class ids, e.g. by tf.keras.layers.StringLookup(vocabulary=...) in a map.",
        )
    for weight in spec[2:]:
        _require_weight(weight, what=what)
    return described


def _labels(label: Any, features: Mapping[str, Any], *, what: str) -> dict[str, TensorColumn]:
    """Label -> its column, by the model's output; a dict of labels is one for several outputs."""
    several = isinstance(label, Mapping)
    if several and (len(label) < 2 or not all(isinstance(name, str) and name for name in label)):
        raise ConfigError(
            f"{what} must give a dict of labels with the names of the model's outputs",
            got=Plain(f"a dict with the keys {list(label)}"),
            fix="Give the label of a model with one output as a tensor.",
        )
    columns: dict[str, TensorColumn] = {}
    taken = set(features)
    for output, part in by_output(label).items():
        name = _free_name(output or LABEL, taken)
        taken.add(name)
        columns[output] = _column(name, part, what=what)
    return columns


def parts_of(element: Any) -> tuple[Any, ...]:
    """An element as ({name: feature}, label) or ({name: feature}, label, weight)."""
    features, *rest = element
    return (features if isinstance(features, Mapping) else {INPUTS: features}, *rest)


def _column(name: str, part: Any, *, what: str) -> TensorColumn:
    if not isinstance(part, tf.TensorSpec):
        nested = isinstance(part, Mapping | tuple | list)
        raise ConfigError(
            f"{what} must give {name!r} as a dense tensor",
            got=Plain(_form(part)),
            fix="Give a flat dict of tensors as features, and one tensor or such a dict as label."
            if nested
            else "Use to_tensor() or tf.sparse.to_dense.",
        )
    if part.shape.rank is None:
        raise ConfigError(
            f"{what} must know how many dimensions {name!r} has",
            got=Plain("a shape that is not known"),
            fix="Say it: output_signature of from_generator, or tf.ensure_shape in a map.",
        )
    if part.shape.rank == 0:
        raise ConfigError(
            f"{what} must give batches",
            got=Plain(f"{name!r} without a batch dimension"),
            fix="End it with .batch(32).",
        )
    if part.dtype.name not in DTYPES:
        raise ConfigError(
            f"{what} must give {name!r} as numbers or texts",
            got=Plain(part.dtype.name),
            fix="Cast it, e.g. to tf.float32.",
        )
    return TensorColumn(name=name, dtype=part.dtype.name, shape=tuple(part.shape[1:]))


def _require_weight(weight: Any, *, what: str) -> None:
    is_number = isinstance(weight, tf.TensorSpec) and weight.dtype.is_floating
    if not is_number or weight.shape.rank != 1:
        raise ConfigError(
            f"{what} must give the weight as one float a record, [batch]",
            got=Plain(_form(weight)),
            fix=_FORM,
        )


def _free_name(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _form(spec: Any) -> str:
    if isinstance(spec, Mapping):
        return "a dict"
    if isinstance(spec, tuple | list):
        return f"{len(spec)} parts"
    if isinstance(spec, tf.TensorSpec):
        return f"a {spec.dtype.name} tensor of shape {spec.shape}"
    kind = type(spec).__name__.removesuffix("Spec")
    return f"a {kind.removesuffix('Tensor').lower()} tensor" if "Tensor" in kind else kind
