"""LiteRT (TensorFlow Lite): float32, float16 weights, or int8 throughout."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.files import read_json, write_json
from stoker.export.carried import (
    NAMES,
    Arrays,
    Converted,
    NotCarriedError,
    argument_of,
    by_names_in_file,
    names_in_file,
)
from stoker.registry.callpath import LoadedModel

FILE = "model.tflite"
"""The model's file."""

_NOT_CARRIED = re.compile(r"'tf\.(\w+)' op is neither")
"""How the converter says it. Source: TensorFlow 2.21, seen."""

_OPERATOR = re.compile(r"^  Op#\d+ (\w+)\(.*\) -> \[(.*)\]$", re.MULTILINE)
_FLOAT = re.compile(r"^  (T#\d+)\(.*type:FLOAT32\b", re.MULTILINE)
"""Operators with what they make, and tensors of floats. Source: tf.lite.experimental.Analyzer."""

_AT_THE_EDGE = {"DEQUANTIZE", "CAST"}
"""What makes floats of integers, and works out nothing."""


def _write(
    model: LoadedModel, signature: str, folder: Path, representative: Arrays, *, weights: str
) -> None:
    with _hushed() as said:
        converter = tf.lite.TFLiteConverter.from_saved_model(
            str(model.path), signature_keys=[signature]
        )
        _ask_for(converter, weights, representative)
        try:
            content = converter.convert()
        # Its own ConverterError derives from Exception alone and has no public name, and its
        # quantiser raises RuntimeError and ValueError: only the words tell. What is not an
        # operation without a word is raised on as it came.
        except Exception as error:
            found = _NOT_CARRIED.findall(f"{error}\n{said()}")
            if not found:
                raise
            raise NotCarriedError("LiteRT", found) from error
        left = _left_in_floats(content) if weights == "int8" else []
    if left:
        raise NotCarriedError("LiteRT in int8", left)
    (folder / FILE).write_bytes(content)
    with _hushed():
        taken = _runner(folder, signature).get_input_details()
    write_json(folder / NAMES, names_in_file(argument_of(model, signature), list(taken)))


def _ask_for(converter: Any, weights: str, representative: Arrays) -> None:
    if weights == "float32":
        return
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if weights == "float16":
        converter.target_spec.supported_types = [tf.float16]
        return
    first = next(iter(representative.values()))

    def rows() -> Iterator[dict[str, NDArray[Any]]]:
        if not first.ndim:  # a model without rows
            yield dict(representative)
            return
        for row in range(len(first)):
            yield {name: values[row : row + 1] for name, values in representative.items()}

    converter.representative_dataset = rows
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]


def _left_in_floats(content: bytes) -> list[str]:
    """Operators that still work in floats: the converter leaves what has no int8 kernel as it is."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        tf.lite.experimental.Analyzer.analyze(model_content=content)
    left = []
    for subgraph in told.getvalue().split("\nSubgraph#")[1:]:
        floats = set(_FLOAT.findall(subgraph))
        for name, made in _OPERATOR.findall(subgraph):
            if floats & set(made.split(", ")) and name not in _AT_THE_EDGE:
                left.append(name)
    return left


def _ask(folder: Path, signature: str, inputs: Arrays) -> dict[str, NDArray[Any]]:
    with _hushed():
        fed = by_names_in_file(inputs, read_json(folder / NAMES))
        found = _runner(folder, signature)(**fed)
        return {name: np.asarray(values) for name, values in found.items()}


def _runner(folder: Path, signature: str) -> Any:
    return tf.lite.Interpreter(str(folder / FILE)).get_signature_runner(signature)


@contextlib.contextmanager
def _hushed() -> Iterator[Any]:
    """Without what the converter's libraries print: they say by lines for themselves what is raised.

    Yields:
        A function that gives what was printed so far.
    """
    with tempfile.TemporaryFile() as printed, warnings.catch_warnings():
        # The interpreter, by which the converter measures ranges, too, is deprecated for
        # ai_edge_litert: a package more, of versions of its own. Stoker's TensorFlow has it.
        warnings.simplefilter("ignore", UserWarning)
        stderr = os.dup(2)
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(printed.fileno(), 2)

        def said() -> str:
            printed.seek(0)
            return printed.read().decode(errors="replace")

        try:
            yield said
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _form(name: str, weights: str, tolerance: float) -> Converted:
    return Converted(
        name=name,
        tolerance=tolerance,
        packages={},
        write=partial(_write, weights=weights),
        ask=_ask,
    )


FORMATS = {
    "litert": _form("LiteRT", "float32", 1e-4),
    "litert-float16": _form("LiteRT with float16 weights", "float16", 1e-2),
    "litert-int8": _form("LiteRT in int8", "int8", 0.1),
}
"""Form -> how it is written. Tolerances: other orders of summing; 11 bits of a weight; 8 bits."""
