"""The transform as the rest of the chain uses it: raw columns in, features and label out."""

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
"""Hash of every other file of the folder; written last."""


def identifiers(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Raw name -> a name that every graph allows: raw names may hold spaces."""
    return {name: f"{prefix}{index}" for index, name in enumerate(names)}


class Transform:
    """A saved transform.

    The graph is loaded when it is first needed, once.
    """

    def __init__(self, root: Path, spec: TransformSpec) -> None:
        """Stand for the folder `root`; see `load_transform`."""
        self.root = root
        self.spec = spec
        self.output = TransformOutput(spec)
        self._loaded: Any = None

    @property
    def features(self) -> tuple[FeatureSpec, ...]:
        """What the model sees."""
        return self.spec.features

    @property
    def labels(self) -> dict[str, LabelSpec]:
        """What the model learns, by its output."""
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
        """Raw columns that anything needs, the features' first."""
        needed = (*self.serving_columns, *self.label_columns, *self.spec.weight_columns)
        return tuple({column.name: column for column in needed}.values())

    @property
    def target_columns(self) -> tuple[Column, ...]:
        """Raw columns that labels or weight need."""
        needed = (*self.label_columns, *self.spec.weight_columns)
        return tuple({column.name: column for column in needed}.values())

    def module(self) -> Any:
        """The features' part of the graph, for an export to track: nothing of the label is in it."""
        return self._root().serving

    # AutoGraph has nothing to convert in a graph that was loaded, and takes a while to find that out.
    @tf.autograph.experimental.do_not_convert
    def apply_features(self, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Compute the features.

        Args:
            inputs: Raw column -> [batch] or [batch, length], as `stoker.data.columns` says (lists of
                varying length padded to the longest); others are not looked at.

        Returns:
            Feature -> [batch, ...], its static shape set. Works eagerly, in `tf.data`, in a
            `tf.function` and in the endpoint of an export.

        Raises:
            DataError: a column is not there.
        """
        return self._features_of(self.module(), inputs)

    @tf.autograph.experimental.do_not_convert
    def apply_decoded(self, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Compute the features where a feed has decoded the images.

        Args:
            inputs: As for `apply_features`, but image column -> [batch, height, width, channels]
                uint8, as `decode_images` gives it.

        Returns:
            The same features.

        Raises:
            DataError: a column is not there; the dataset has no images.
        """
        part = self._root().decoded
        if part is None:
            raise DataError("a transform must have images to take them decoded", got=str(self.root))
        return self._features_of(part, inputs)

    def _features_of(self, part: Any, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        found = _computed(part, self.serving_columns, inputs)
        keys = identifiers((feature.name for feature in self.features), "f")
        return {
            feature.name: _shaped(found[keys[feature.name]], feature) for feature in self.features
        }

    @tf.autograph.experimental.do_not_convert
    def apply_label(self, inputs: Mapping[str, tf.Tensor]) -> Any:
        """Compute the label, or of a model of several outputs the labels.

        Args:
            inputs: Raw column -> [batch] or [batch, length].

        Returns:
            [batch, ...] int64 or float32, -1 where a class is not one of the label's; where there
            are several, such a tensor by output.

        Raises:
            DataError: a column is not there; the transform has no label.
        """
        if not self.labels:
            raise DataError("a transform must have a label to compute it", got=str(self.root))
        found = _computed(self._root().labelling, self.label_columns, inputs)
        keys = identifiers(dict.fromkeys(label.name for label in self.labels.values()), "f")
        return alone(
            {
                output: _shaped(found[keys[label.name]], label)
                for output, label in self.labels.items()
            }
        )

    @tf.autograph.experimental.do_not_convert
    def apply_weight(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Compute how much each row counts.

        Args:
            inputs: Raw column -> [batch] or [batch, length].

        Returns:
            [batch] float32.

        Raises:
            DataError: a column is not there; the transform has no weight.
        """
        if self.spec.weight is None:
            raise DataError("a transform must have a weight to compute it", got=str(self.root))
        found = _computed(self._root().weighing, self.spec.weight_columns, inputs)
        return tf.ensure_shape(found["f0"], [None])

    @tf.autograph.experimental.do_not_convert
    def apply_targets(self, inputs: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
        """What stands beside the features in a batch: the label, and the weight where there is one.

        Raises:
            DataError: as `apply_label` and `apply_weight`.
        """
        label = self.apply_label(inputs)
        return (label,) if self.spec.weight is None else (label, self.apply_weight(inputs))

    def label_columns_asked(self) -> set[str]:
        """The columns of which the labels' graph asks itself whether they are missing (NaN)."""
        return _asked(self._root().labelling, self.label_columns)

    def weight_columns_asked(self) -> set[str]:
        """The columns of which the weight's graph does."""
        return _asked(self._root().weighing, self.spec.weight_columns)

    def _root(self) -> Any:
        if self._loaded is None:
            with tf.init_scope():
                self._loaded = tf.saved_model.load(str(self.root))
        return self._loaded


def load_transform(root: Path) -> Transform:
    """Read a transform's description; every file's hash is checked, the graph is loaded later.

    Raises:
        DataError: a file is missing, or is not what was written.
    """
    wanted = read_json(root / FILES)
    found = {name: value for name, value in hash_folder(root).items() if name != FILES}
    wrong = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if wrong:
        raise DataError(
            f"{root / wrong[0]} must be what was written",
            got=Plain("another content" if wrong[0] in found else "no such file"),
            fix="Run `stoker analyze` again: the transform is made anew.",
        )
    return Transform(root, from_json(read_json(root / SPEC)))


def _asked(part: Any, columns: Sequence[Column]) -> set[str]:
    keys = {key: name for name, key in identifiers((c.name for c in columns), "c").items()}
    made = part.compute.concrete_functions
    return {keys[key] for concrete in made for key in asked_for_missing(concrete)}


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


_ASKS = frozenset(("IsNan", "IsFinite"))

_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))

Functions = Mapping[str, function_pb2.FunctionDef]


def asked_for_missing(concrete: Any) -> set[str]:
    """The inputs that `tf.math.is_nan` or `is_finite` is asked about, or what is computed of them.

    Args:
        concrete: A `tf.types.experimental.ConcreteFunction` of one dictionary.

    Returns:
        Keys of the dictionary.
    """
    graph = concrete.graph.as_graph_def()
    (inputs,), _ = concrete.structured_input_signature
    keys = sorted(inputs)  # as `tf.nest` flattens them
    names = {tensor.op.name: key for tensor, key in zip(concrete.inputs, keys, strict=False)}
    functions = {function.signature.name: function for function in graph.library.function}
    asked = _Body(graph.node, list(names), functions).asked()
    return {names[name] for name in asked}


class _Body:
    """The nodes of a graph or a function."""

    def __init__(
        self, nodes: Sequence[node_def_pb2.NodeDef], inputs: Sequence[str], functions: Functions
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._functions = functions
        self._origins: dict[str, set[str]] = {name: {name} for name in inputs}

    def asked(self) -> set[str]:
        """Names of its inputs."""
        found: set[str] = set()
        for node in self._nodes.values():
            for name in self._asked_of(node):
                found |= self._origin(name)
        return found

    def _asked_of(self, node: node_def_pb2.NodeDef) -> list[str]:
        given = [name for name in node.input if not name.startswith("^")]
        if node.op in _ASKS:
            return given
        if node.op in _CALLS:
            called = self._functions[node.attr["f"].func.name]
            asked = _asked_inside(called, self._functions)
            return [name for name, argument in zip(given, asked, strict=True) if argument]
        inner = [value.func.name for value in node.attr.values() if value.func.name]
        inner += [f.name for value in node.attr.values() for f in value.list.func]
        if any(any(_asked_inside(self._functions[name], self._functions)) for name in inner):
            return given  # a branch or a loop: which of them is not looked at
        return []

    def _origin(self, name: str) -> set[str]:
        """The inputs that a tensor is computed of."""
        own = name.partition(":")[0]
        if own not in self._origins:
            self._origins[own] = set()
            node = self._nodes[own]
            for given in node.input:
                if not given.startswith("^"):
                    self._origins[own] |= self._origin(given)
        return self._origins[own]


def _asked_inside(function: function_pb2.FunctionDef, functions: Functions) -> list[Any]:
    """For each argument whether it is asked about."""
    arguments = [argument.name for argument in function.signature.input_arg]
    asked = _Body(function.node_def, arguments, functions).asked()
    return [name in asked for name in arguments]
