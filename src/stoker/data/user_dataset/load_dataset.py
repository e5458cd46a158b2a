"""Call the user's dataset function, and check its datasets before they are read."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, DataError, Plain
from stoker.core.multi_output import by_output
from stoker.core.user_code import call, first_line, user_place
from stoker.data.dataset import Dataset
from stoker.data.feed.options import as_written
from stoker.data.user_dataset.config import OwnDatasetConfig, PipelineConfig
from stoker.data.user_dataset.description import (
    INPUTS,
    LABEL,
    SPLITS,
    Count,
    Description,
    TensorColumn,
)

Datasets = dict[str, "tf.data.Dataset[Any]"]
"""Split -> the user's dataset."""


@dataclass(frozen=True, kw_only=True)
class OwnDataset:
    """A user's datasets, one per split; has the interface of `stoker.data.dataset.Dataset` that later stages need.

    Attributes:
        what: `module:function`, for messages.
        description: Description of an element.
        datasets: Split -> the user's dataset.
        counts: Split -> its size; empty before the analysis.
        in_memory: Whether training keeps the batches of the first pass in memory and uses them in every epoch.
    """

    what: str
    description: Description
    datasets: Datasets
    counts: Mapping[str, Count] = field(default_factory=dict)
    in_memory: bool = False

    @property
    def columns(self) -> tuple[TensorColumn, ...]:
        """The features and the labels."""
        return self.description.columns

    def column(self, name: str) -> TensorColumn:
        """Return the column of that name."""
        return next(column for column in self.columns if column.name == name)

    def rows(self, split: str) -> int:
        """Number of records in a split."""
        return self.counts[split].rows

    def arrays(self, split: str, *, columns: Sequence[Any]) -> Iterator[dict[str, NDArray[Any]]]:
        """Read one pass over a split, batch by batch.

        Args:
            split: Name of the split.
            columns: The columns to return.

        Returns:
            Column -> [batch, ...]; strings are bytes.

        Raises:
            ConfigError: the user's pipeline raised an error.
            DataError: the parts of an element have different numbers of records.
        """
        names = [column.name for column in columns]
        for number, element in enumerate(self._elements(split), start=1):
            features, label, *_ = parts_of(element)
            labels = by_output(label)
            named = self.description.labels.items()
            parts = {**features, **{column.name: labels[output] for output, column in named}}
            sizes = {name: int(tf.shape(part)[0]) for name, part in parts.items()}
            if len(set(sizes.values())) > 1:
                raise DataError(
                    "all parts of an element must have the same number of records "
                    f"({self.what}, batch {number} of {split!r})",
                    got=Plain(", ".join(f"{name} {size}" for name, size in sizes.items())),
                    fix="Make batches with `.batch(32)`; the first dimension of every part must be the batch.",
                )
            yield {name: np.asarray(parts[name]) for name in names}

    def _elements(self, split: str) -> Iterator[Any]:
        elements = iter(as_written(self.datasets[split]))
        while True:
            try:
                element = next(elements)
            except StopIteration:
                return
            except tf.errors.OpError as error:
                raise ConfigError(
                    f"{self.what} must return all batches of {split!r} without an error{user_place(error)}",
                    got=Plain(first_line(error)),
                    fix="Run the command again with --debug to see the whole traceback.",
                ) from error
            yield element


AnyDataset = Dataset | OwnDataset
"""The input of later stages: shards, or the user's own dataset."""


def open_own_dataset(function: Callable[..., Any], config: OwnDatasetConfig) -> OwnDataset:
    """Call the user's function and check its datasets.

    Args:
        function: The function that `config.dataset` names.
        config: The experiment's `data` section.

    Returns:
        The datasets, without counts.

    Raises:
        ConfigError: the function raises an error; a split has no dataset or an endless one; the elements are not
            (features, label) or (features, label, weight); or the splits have different elements.
    """
    what = config.dataset
    datasets = _call_function(function, config)
    described = {
        split: describe_element(dataset.element_spec, what=f"{what}, split {split!r},")
        for split, dataset in datasets.items()
    }
    train, held_out = (described[split] for split in SPLITS)
    if train != held_out:
        raise ConfigError(
            f"{what} must return the same names, types and shapes for every split",
            got=Plain(_difference(train, held_out)),
            fix="Pad or cast the parts that differ.",
        )
    for split, dataset in datasets.items():
        _require_ends(dataset, what=f"{what}, split {split!r},")
    return OwnDataset(what=what, description=train, datasets=datasets)


def _call_function(function: Callable[..., Any], config: OwnDatasetConfig) -> Datasets:
    what, options = config.dataset, config.options
    if _takes_split(function, options):
        returned: Any = {
            split: call(function, split, what=what, options=options) for split in SPLITS
        }
    else:
        returned = call(function, what=what, options=options)
    if not isinstance(returned, Mapping):
        raise ConfigError(
            f'{what} without a parameter `split` must return {{"train": ..., "eval": ...}}',
            got=Plain(type(returned).__name__),
            fix="Return such a dict, or add a parameter for the split's name: `def dataset(split): ...`.",
        )
    for split in SPLITS:
        if not isinstance(returned.get(split), tf.data.Dataset):
            raise ConfigError(
                f"{what} must return a tf.data.Dataset for the split {split!r}",
                got=Plain(type(returned[split]).__name__ if split in returned else "no such split"),
                fix="Return datasets for the splits train and eval.",
            )
    return {split: returned[split] for split in SPLITS}


def _takes_split(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return whether the first parameter is the split: its name is `split`, or no option or default sets it."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return False
    first = parameters[0]
    return first.name == "split" or (
        first.name not in options and first.default is inspect.Parameter.empty
    )


def _require_ends(dataset: tf.data.Dataset[Any], *, what: str) -> None:
    batches = int(dataset.cardinality())
    if batches == tf.data.INFINITE_CARDINALITY:
        raise ConfigError(
            f"{what} must end, because an epoch is one pass over it",
            got=Plain("an endless dataset"),
            fix="Leave out `.repeat()`, or set the number of batches of an epoch: `.take(BATCHES)`.",
        )
    if batches == 0:
        raise empty_split(what)


def empty_split(what: str) -> DataError:
    """Return the error for a split without records."""
    return DataError(f"{what} must hold at least one record", got=0)


def _difference(train: Description, held_out: Description) -> str:
    ours = {column.name: column for column in train.columns}
    theirs = {column.name: column for column in held_out.columns}
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            return f"{name!r}: {_type_text(ours.get(name))} in train, {_type_text(theirs.get(name))} in eval"
    return "a single tensor in one split, a dict in the other"


def _type_text(column: TensorColumn | None) -> str:
    if column is None:
        return "missing"
    sizes = ", ".join("any" if size is None else str(size) for size in column.shape)
    return f"{column.dtype} [{sizes}]"


def with_pipeline(
    dataset: OwnDataset, config: PipelineConfig, *, counts: Mapping[str, Count]
) -> OwnDataset:
    """Return the dataset with the changes that training and evaluation need.

    Args:
        dataset: The user's dataset.
        config: The changes.
        counts: Sizes of the splits, with batches of the size in `config`.
    """
    datasets, size = dataset.datasets, config.batch_size
    if size is not None:
        datasets = {split: each.rebatch(size) for split, each in datasets.items()}
    return dataclasses.replace(
        dataset, datasets=datasets, counts=counts, in_memory=config.cache == "memory"
    )


def counts_as_facts(counts: Mapping[str, Count]) -> dict[str, dict[str, int]]:
    """Return counts as JSON values."""
    return {split: dataclasses.asdict(count) for split, count in counts.items()}


_EXPECTED_FORM = (
    "Return batches of (features, label) or (features, label, weight), as model.fit takes them. If your "
    "train_step needs no label, return the features twice: .map(lambda x: (x, x))."
)

DTYPES = frozenset(
    ["bool", "string", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
"""Types that a feature or label may have: the types that REST requests support."""


def describe_element(spec: Any, *, what: str) -> Description:
    """Return the description of a dataset's elements.

    Args:
        spec: `tf.data.Dataset.element_spec`.
        what: Name of the dataset, for the message.

    Raises:
        ConfigError: an element is not a batch of (features, label) or (features, label, weight) of tensors.
    """
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise ConfigError(
            f"{what} must return (features, label) or (features, label, weight)",
            got=Plain(_spec_text(spec)),
            fix=_EXPECTED_FORM,
        )
    features, label = spec[:2]
    named = isinstance(features, Mapping)
    parts = dict(features) if named else {INPUTS: features}
    if not parts or not all(isinstance(name, str) and name for name in parts):
        raise ConfigError(
            f"{what} must return features as a dict with names as keys, or as a single tensor",
            got=Plain(f"a dict with the keys {list(parts)}"),
            fix="Use a string that is not empty as the name of each feature.",
        )
    described = Description(
        features=tuple(_column(name, part, what=what) for name, part in parts.items()),
        labels=_labels(label, parts, what=what),
        named=named,
    )
    if any(column.dtype == "string" for column in described.labels.values()):
        raise ConfigError(
            f"{what} must return numeric labels",
            got=Plain("strings"),
            fix="Return class ids, e.g. with tf.keras.layers.StringLookup(vocabulary=...) in a map.",
        )
    for weight in spec[2:]:
        _require_weight(weight, what=what)
    return described


def _labels(label: Any, features: Mapping[str, Any], *, what: str) -> dict[str, TensorColumn]:
    """Return output of the model -> the column of its label; a dict of labels is for several outputs."""
    several = isinstance(label, Mapping)
    if several and (len(label) < 2 or not all(isinstance(name, str) and name for name in label)):
        raise ConfigError(
            f"a dict of labels from {what} must have the names of two or more outputs of the model as keys",
            got=Plain(f"a dict with the keys {list(label)}"),
            fix="If the model has a single output, return its label as a tensor.",
        )
    columns: dict[str, TensorColumn] = {}
    used = set(features)
    for output, part in by_output(label).items():
        name = _unused_name(output or LABEL, used)
        used.add(name)
        columns[output] = _column(name, part, what=what)
    return columns


def parts_of(element: Any) -> tuple[Any, ...]:
    """Return an element as ({name: feature}, label) or ({name: feature}, label, weight)."""
    features, *rest = element
    return (features if isinstance(features, Mapping) else {INPUTS: features}, *rest)


def _column(name: str, part: Any, *, what: str) -> TensorColumn:
    if not isinstance(part, tf.TensorSpec):
        nested = isinstance(part, Mapping | tuple | list)
        raise ConfigError(
            f"{what} must return {name!r} as a dense tensor",
            got=Plain(_spec_text(part)),
            fix="Return a flat dict of tensors as features, and a tensor or a flat dict of tensors as label."
            if nested
            else "Use to_tensor() or tf.sparse.to_dense.",
        )
    if part.shape.rank is None:
        raise ConfigError(
            f"{what} must return {name!r} with a known number of dimensions",
            got=Plain("an unknown shape"),
            fix="Set the shape with output_signature of from_generator, or with tf.ensure_shape in a map.",
        )
    if part.shape.rank == 0:
        raise ConfigError(
            f"{what} must return batches",
            got=Plain(f"{name!r} without a batch dimension"),
            fix="Add .batch(32) at the end of the dataset.",
        )
    if part.dtype.name not in DTYPES:
        raise ConfigError(
            f"{what} must return {name!r} as numbers or strings",
            got=Plain(part.dtype.name),
            fix="Cast it, e.g. to tf.float32.",
        )
    return TensorColumn(name=name, dtype=part.dtype.name, shape=tuple(part.shape[1:]))


def _require_weight(weight: Any, *, what: str) -> None:
    is_number = isinstance(weight, tf.TensorSpec) and weight.dtype.is_floating
    if not is_number or weight.shape.rank != 1:
        raise ConfigError(
            f"{what} must return the weight as one float per record, [batch]",
            got=Plain(_spec_text(weight)),
            fix=_EXPECTED_FORM,
        )


def _unused_name(name: str, used: Collection[str]) -> str:
    while name in used:
        name += "_"
    return name


def _spec_text(spec: Any) -> str:
    if isinstance(spec, Mapping):
        return "a dict"
    if isinstance(spec, tuple | list):
        return f"{len(spec)} parts"
    if isinstance(spec, tf.TensorSpec):
        return f"a {spec.dtype.name} tensor of shape {spec.shape}"
    kind = type(spec).__name__.removesuffix("Spec")
    return f"a {kind.removesuffix('Tensor').lower()} tensor" if "Tensor" in kind else kind
