"""In the shadow process: loads the candidate as a server does, calls it with copies, and compares the answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tensorflow as tf
from tensorflow.core.framework import tensor_shape_pb2

from stoker.core.errors import DataError, UserError
from stoker.registry.exported_model import first_line
from stoker.rollout.shadow.channel import CopiedRequest, ShadowTarget
from stoker.rollout.shadow.compare import Comparison, Shapes, compare, failed
from stoker.rollout.signatures import signatures_of
from stoker.serve.batching.config import BatchingConfig
from stoker.serve.servables.servable import LoadOptions, Servable

_THREADS = 1
"""Intra-op and inter-op threads of a call: it uses at most one core."""


class ShadowModel:
    """The candidate, loaded in the shadow process."""

    def __init__(self, target: ShadowTarget) -> None:
        """Load the version; `failure` tells why this failed."""
        folder = Path(target.candidate)
        options = LoadOptions(
            batching=BatchingConfig(enabled=False),
            allow_ops=frozenset(target.allow_ops),
            saved_model_tags=target.saved_model_tags,
            session=tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=_THREADS, inter_op_parallelism_threads=_THREADS
            ),
        )
        self._servable = Servable(int(folder.name), folder, options, model_name=target.model)
        self._tolerance = target.tolerance
        self._declared = _declared(Path(target.baseline))
        self.failure = "" if self._servable.load() else self._servable.reason or "unknown reason"
        """Why the version cannot be called; empty if it can."""

    def compare(self, request: CopiedRequest) -> Comparison:
        """Call the version with a copy, and compare its answer with the baseline's."""
        model, began_s = self._servable.hold(), time.monotonic()
        if model is None:
            return failed(request.outputs, "the version is not loaded")
        try:
            outputs = model.call(request.signature, request.inputs)
        except UserError as error:
            return failed(request.outputs, error.line())
        except tf.errors.OpError as error:
            return failed(request.outputs, first_line(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, a client would have received an error
            return failed(request.outputs, f"{type(error).__name__}: {error}")
        finally:
            took_s = time.monotonic() - began_s
            self._servable.release()
        found = compare(
            request.outputs,
            outputs,
            tolerance=self._tolerance,
            declared=self._declared.get(request.signature, {}),
        )
        return replace(found, took_s=took_s)


def _declared(folder: Path) -> Mapping[str, Shapes]:
    """Signature -> the shapes of its outputs; empty for a version without a SavedModel."""
    try:
        found = signatures_of(folder)
    except (DataError, OSError):
        return {}
    return {
        name: {key: _shape(info.tensor_shape) for key, info in signature.outputs.items()}
        for name, signature in found.items()
    }


def _shape(shape: tensor_shape_pb2.TensorShapeProto) -> tuple[int | None, ...] | None:
    if shape.unknown_rank:
        return None
    return tuple(None if dim.size < 0 else dim.size for dim in shape.dim)
