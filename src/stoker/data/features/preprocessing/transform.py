"""A saved transform, as later stages use it: from raw columns it computes features, labels and weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2

from stoker.core.errors import DataError, Plain
from stoker.core.files import hash_folder, read_json
from stoker.core.multi_output import alone
from stoker.data.columns import Column
from stoker.data.features.spec import (
    SPEC,
    FeatureSpec,
    LabelSpec,
    TransformOutput,
    TransformSpec,
    from_json,
)

FILES = "files.json"
"""File with the hash of every other file of the folder; it is written last."""


def identifiers(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Return raw name -> a name that is valid in a graph (raw names may contain spaces)."""
    return {name: f"{prefix}{index}" for index, name in enumerate(names)}


class Transform:
    """A saved transform.

    The graph is loaded once, when it is first needed.
    """

    def __init__(self, root: Path, spec: TransformSpec) -> None:
        """Use the transform in folder `root`; call `load_transform`, which also checks the files."""
        self.root = root
        self.spec = spec
        self.output = TransformOutput(spec)
        self._loaded: Any = None

    @property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The model's inputs."""
        return self.spec.features

    @property
    def labels(self) -> dict[str, LabelSpec]:
        """Output of the model -> the label that it learns."""
        return self.spec.labels

    @property
    def serving_columns(self) -> tuple[Column, ...]:
        """Raw columns that the features need, in the dataset's order."""
        return self.spec.serving_columns

    @property
    def label_columns(self) -> tuple[Column, ...]:
        """Raw columns that the labels need, in the dataset's order."""
        return self.spec.label_columns

    @property
    def columns(self) -> tuple[Column, ...]:
        """Raw columns that features, labels or weight need, in this order."""
        needed = (*self.serving_columns, *self.label_columns, *self.spec.weight_columns)
        return tuple({column.name: column for column in needed}.values())

    @property
    def target_columns(self) -> tuple[Column, ...]:
        """Raw columns that labels or weight need."""
        needed = (*self.label_columns, *self.spec.weight_columns)
        return tuple({column.name: column for column in needed}.values())

    def module(self) -> Any:
        """Return the part of the graph that computes the features, for an export to track."""
        return self._root().serving

    # AutoGraph has nothing to convert in a loaded graph, but takes long to find that out.
    @tf.autograph.experimental.do_not_convert
    def apply_features(self, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Compute the features.

        Args:
            inputs: Raw column -> [batch] or [batch, length], as `stoker.data.columns` says (lists of
                varying length padded to the longest); other columns are ignored.

        Returns:
            Feature -> [batch, ...], with its static shape. Works eagerly, in `tf.data`, in a
            `tf.function` and in the endpoint of an export.

        Raises:
            DataError: a column is missing.
        """
        return self._features_of(self.module(), inputs)

    @tf.autograph.experimental.do_not_convert
    def apply_decoded(self, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Compute the features from images that a feed has decoded.

        Args:
            inputs: As for `apply_features`, but image column -> [batch, height, width, channels]
                uint8, as `decode_images` returns it.

        Returns:
            The features, as `apply_features` returns them.

        Raises:
            DataError: a column is missing, or the dataset has no images.
        """
        part = self._root().decoded
        if part is None:
            raise DataError(
                "a transform must have an image column to take decoded images", got=str(self.root)
            )
        return self._features_of(part, inputs)

    def _features_of(self, part: Any, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        found = _computed(part, self.serving_columns, inputs)
        keys = identifiers((feature.name for feature in self.features), "f")
        return {
            feature.name: _shaped(found[keys[feature.name]], feature) for feature in self.features
        }

    @tf.autograph.experimental.do_not_convert
    def apply_label(self, inputs: Mapping[str, tf.Tensor]) -> Any:
        """Compute the label, or the labels of a model with several outputs.

        Args:
            inputs: Raw column -> [batch] or [batch, length].

        Returns:
            [batch, ...] int64 or float32; -1 for a class that the training split does not have. For a
            model with several outputs, output -> such a tensor.

        Raises:
            DataError: a column is missing, or the transform has no label.
        """
        if not self.labels:
            raise DataError(
                "a transform must have a label, so that labels can be computed", got=str(self.root)
            )
        found = _computed(self._root().labeling, self.label_columns, inputs)
        keys = identifiers(dict.fromkeys(label.name for label in self.labels.values()), "f")
        return alone(
            {
                output: _shaped(found[keys[label.name]], label)
                for output, label in self.labels.items()
            }
        )

    @tf.autograph.experimental.do_not_convert
    def apply_weight(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Compute the weight of each row.

        Args:
            inputs: Raw column -> [batch] or [batch, length].

        Returns:
            [batch] float32.

        Raises:
            DataError: a column is missing, or the transform has no weight.
        """
        if self.spec.weight is None:
            raise DataError(
                "a transform must have a sample weight, so that weights can be computed",
                got=str(self.root),
            )
        found = _computed(self._root().weighing, self.spec.weight_columns, inputs)
        return tf.ensure_shape(found["f0"], [None])

    @tf.autograph.experimental.do_not_convert
    def apply_targets(self, inputs: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
        """Compute what a batch has besides features: (label,), or (label, weight).

        Raises:
            DataError: as in `apply_label` and `apply_weight`.
        """
        label = self.apply_label(inputs)
        return (label,) if self.spec.weight is None else (label, self.apply_weight(inputs))

    def nan_checked_label_columns(self) -> set[str]:
        """Return the columns that the graph of the labels checks for missing values (NaN)."""
        return _nan_checked_columns(self._root().labeling, self.label_columns)

    def nan_checked_weight_columns(self) -> set[str]:
        """Return the columns that the graph of the weight checks for missing values (NaN)."""
        return _nan_checked_columns(self._root().weighing, self.spec.weight_columns)

    def _root(self) -> Any:
        if self._loaded is None:
            with tf.init_scope():
                self._loaded = tf.saved_model.load(str(self.root))
        return self._loaded


def load_transform(root: Path) -> Transform:
    """Read a transform's description and check every file's hash; the graph is loaded later.

    Raises:
        DataError: a file is missing, was changed, or was added.
    """
    wanted = read_json(root / FILES)
    found = {name: value for name, value in hash_folder(root).items() if name != FILES}
    wrong = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if wrong:
        raise DataError(
            f"{root / wrong[0]} must not have changed since it was written",
            got=Plain("different content" if wrong[0] in found else "no such file"),
            fix="Run `stoker analyze` again; it builds the transform again.",
        )
    return Transform(root, from_json(read_json(root / SPEC)))


def _nan_checked_columns(part: Any, columns: Sequence[Column]) -> set[str]:
    keys = {key: name for name, key in identifiers((c.name for c in columns), "c").items()}
    made = part.compute.concrete_functions
    return {keys[key] for concrete in made for key in nan_checked_inputs(concrete)}


def _computed(part: Any, columns: Sequence[Column], inputs: Mapping[str, tf.Tensor]) -> Any:
    """Run a part of the graph on the columns that it needs."""
    keys = identifiers((column.name for column in columns), "c")
    for name in keys:
        if name not in inputs:
            raise DataError(
                f"the transform must be given column {name!r}",
                got=Plain(", ".join(inputs) or "none"),
            )
    return part.compute({key: inputs[name] for name, key in keys.items()})


def _shaped(tensor: tf.Tensor, spec: FeatureSpec | LabelSpec) -> tf.Tensor:
    tensor.set_shape([None, *spec.shape])
    return tensor


_NAN_CHECKS = frozenset(("IsNan", "IsFinite"))

_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))

Functions = Mapping[str, function_pb2.FunctionDef]


def nan_checked_inputs(concrete: Any) -> set[str]:
    """Return the inputs that reach `tf.math.is_nan` or `is_finite`, directly or through computed values.

    Args:
        concrete: A `tf.types.experimental.ConcreteFunction` whose only argument is a dictionary.

    Returns:
        Keys of the dictionary.
    """
    graph = concrete.graph.as_graph_def()
    (inputs,), _ = concrete.structured_input_signature
    keys = sorted(inputs)  # as `tf.nest` flattens them
    names = {tensor.op.name: key for tensor, key in zip(concrete.inputs, keys, strict=False)}
    functions = {function.signature.name: function for function in graph.library.function}
    nan_checked = _FunctionBody(graph.node, list(names), functions).nan_checked()
    return {names[name] for name in nan_checked}


class _FunctionBody:
    """The nodes of a graph or a function."""

    def __init__(
        self, nodes: Sequence[node_def_pb2.NodeDef], inputs: Sequence[str], functions: Functions
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._functions = functions
        self._origins: dict[str, set[str]] = {name: {name} for name in inputs}

    def nan_checked(self) -> set[str]:
        """Return the names of the inputs that are checked for NaN."""
        found: set[str] = set()
        for node in self._nodes.values():
            for name in self._nan_checked_by(node):
                found |= self._origin(name)
        return found

    def _nan_checked_by(self, node: node_def_pb2.NodeDef) -> list[str]:
        inputs_of_node = [name for name in node.input if not name.startswith("^")]
        if node.op in _NAN_CHECKS:
            return inputs_of_node
        if node.op in _CALLS:
            called = self._functions[node.attr["f"].func.name]
            nan_checked = _nan_checked_arguments(called, self._functions)
            return [
                name for name, argument in zip(inputs_of_node, nan_checked, strict=True) if argument
            ]
        inner = [value.func.name for value in node.attr.values() if value.func.name]
        inner += [f.name for value in node.attr.values() for f in value.list.func]
        if any(
            any(_nan_checked_arguments(self._functions[name], self._functions)) for name in inner
        ):
            return (
                inputs_of_node  # a branch or loop: it is not known which of its inputs are checked
            )
        return []

    def _origin(self, name: str) -> set[str]:
        """Return the inputs that a tensor is computed from."""
        name_of_node = name.partition(":")[0]
        if name_of_node not in self._origins:
            self._origins[name_of_node] = set()
            node = self._nodes[name_of_node]
            for inputs_of_node in node.input:
                if not inputs_of_node.startswith("^"):
                    self._origins[name_of_node] |= self._origin(inputs_of_node)
        return self._origins[name_of_node]


def _nan_checked_arguments(function: function_pb2.FunctionDef, functions: Functions) -> list[Any]:
    """Return, for each argument of a function, whether it is checked for NaN."""
    arguments = [argument.name for argument in function.signature.input_arg]
    nan_checked = _FunctionBody(function.node_def, arguments, functions).nan_checked()
    return [name in nan_checked for name in arguments]
