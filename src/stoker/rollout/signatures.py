"""Checks whether clients of one version can call another version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import tensorflow as tf
from tensorflow.core.framework import tensor_shape_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from stoker.core.errors import Plain, UserError
from stoker.serve.loading.saved_model import read_saved_model

_INTERNAL = "__saved_model_init_op"


def check_compatible(baseline: Path, candidate: Path) -> None:
    """Check that the candidate accepts every request that the baseline accepts.

    Args:
        baseline: Folder of the version that serves.
        candidate: Folder of the other version.

    Raises:
        UserError: a signature, an input or an output is missing or of another type or shape.
        DataError: a SavedModel is damaged.
    """
    served, new = signatures_of(baseline), signatures_of(candidate)
    differences = [
        difference
        for name, signature in sorted(served.items())
        for difference in _differences(name, signature, new.get(name))
    ]
    if differences:
        raise UserError(
            f"Clients of version {baseline.name} must be able to call version {candidate.name}",
            got=Plain("; ".join(differences)),
            fix="Export the candidate with the same signatures, or push it as another model.",
        )


def signatures_of(folder: Path) -> Mapping[str, meta_graph_pb2.SignatureDef]:
    """Return name -> signature of a version.

    Raises:
        DataError: its SavedModel is damaged.
    """
    graphs = read_saved_model(folder).meta_graphs
    serving = next((graph for graph in graphs if "serve" in graph.meta_info_def.tags), None)
    if serving is None:
        return {}
    return {
        name: signature for name, signature in serving.signature_def.items() if name != _INTERNAL
    }


def _differences(
    name: str,
    served: meta_graph_pb2.SignatureDef,
    new: meta_graph_pb2.SignatureDef | None,
) -> Iterator[str]:
    if new is None:
        yield f"no signature {name!r}"
        return
    for key in sorted(served.inputs.keys() | new.inputs.keys()):
        if key not in new.inputs:
            yield f"{name}: no input {key!r}"
        elif key not in served.inputs:
            if key not in new.defaults:
                yield f"{name}: a further input {key!r}"
        elif (was := served.inputs[key]).dtype != (now := new.inputs[key]).dtype:
            types = [tf.dtypes.as_dtype(each.dtype).name for each in (was, now)]
            yield f"{name}: input {key!r} is {types[1]}, was {types[0]}"
        elif not _takes(now.tensor_shape, was.tensor_shape):
            yield f"{name}: input {key!r} has a narrower shape"
    for key in sorted(served.outputs.keys() - new.outputs.keys()):
        yield f"{name}: no output {key!r}"


def _takes(
    new: tensor_shape_pb2.TensorShapeProto, served: tensor_shape_pb2.TensorShapeProto
) -> bool:
    """Return whether the new input accepts every shape that the old one accepts."""
    if new.unknown_rank:
        return True
    if served.unknown_rank or len(new.dim) != len(served.dim):
        return False
    return all(
        now.size < 0 or now.size == was.size for now, was in zip(new.dim, served.dim, strict=True)
    )
