"""Checks a SavedModel before a push: loads it as a server does and runs its signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorflow.core.protobuf import saved_model_pb2

from stoker.core.errors import CheckFailed, Plain
from stoker.data.user_dataset.description import AnyColumn
from stoker.export.signatures import (
    EXAMPLES_INPUT,
    SERVING_DEFAULT,
    SERVING_EXAMPLES,
    make_examples,
)
from stoker.registry.exported_model import load_model

MAX_DIFFERENCE = 1e-6
"""Maximum difference between the answers of the two signatures, relative and absolute."""

PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""Operations that call a Python function by a number that only the process that saved the model knows. So the
model loads and runs in that process, but in no other. Source: `tf.py_function`, `tf.numpy_function`."""


def vet_model(
    folder: Path, columns: Sequence[AnyColumn], rows: Mapping[str, NDArray[Any]]
) -> dict[str, Any]:
    """Load a SavedModel with TensorFlow's session loader and run its signatures on real rows.

    Args:
        folder: The SavedModel.
        columns: The raw columns that it takes.
        rows: Column -> [rows] values of some rows of the eval split.

    Returns:
        The facts found: signatures, number of rows, names of the outputs.

    Raises:
        CheckFailed: the model calls Python, does not load or run, gives an answer that is not finite, or its
            signatures give different answers.
    """
    _require_no_python(folder)
    loaded = load_model(folder)
    try:
        plain = loaded.call(SERVING_DEFAULT, {c.name: rows[c.name] for c in columns})
        signatures = sorted(loaded.signatures)
        parsed = plain
        if SERVING_EXAMPLES in signatures:
            serialized = make_examples(columns, rows)
            parsed = loaded.call(SERVING_EXAMPLES, {EXAMPLES_INPUT: serialized})
    finally:
        loaded.close()
    count = len(next(iter(rows.values())))
    for name, answer in plain.items():
        _check_answer(folder, name, answer, parsed[name], count)
    return {"signatures": signatures, "rows": count, "outputs": sorted(plain)}


def _require_no_python(folder: Path) -> None:
    saved = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    for meta_graph in saved.meta_graphs:
        graph = meta_graph.graph_def
        nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
        for node in nodes:
            if node.op in PYTHON_OPS:
                raise CheckFailed(
                    f"{folder}: a served model must use TensorFlow operations only",
                    got=Plain(f"{node.op}, which calls Python, as {node.name}"),
                    fix="Replace tf.py_function and tf.numpy_function in build and "
                    "preprocessing_fn.",
                )


def _check_answer(
    folder: Path, name: str, answer: NDArray[Any], parsed: NDArray[Any], rows: int
) -> None:
    if answer.shape[:1] != (rows,):
        raise CheckFailed(
            f"{folder}: output {name!r} must have one answer per row",
            got=Plain(f"shape {answer.shape} for {rows} rows"),
            fix="Keep the batch as the first dimension in build.",
        )
    if answer.dtype.kind == "f" and not np.isfinite(answer).all():
        bad = int((~np.isfinite(answer.reshape(rows, -1)).all(axis=1)).nonzero()[0][0])
        raise CheckFailed(
            f"{folder}: output {name!r} must be finite for every row of the eval split",
            got=Plain(f"{answer[bad]} for row {bad + 1}"),
            fix="Missing numbers reach preprocessing_fn as NaN: replace them there, e.g. "
            "tf.where(tf.math.is_nan(x), 0.0, x).",
        )
    same = answer.shape == parsed.shape and np.allclose(
        answer.astype(np.float64), parsed.astype(np.float64), MAX_DIFFERENCE, MAX_DIFFERENCE
    )
    if not same:
        raise CheckFailed(
            f"{folder}: {SERVING_DEFAULT} and {SERVING_EXAMPLES} must give the same answer for output {name!r}",
            got=Plain("different answers"),
        )
