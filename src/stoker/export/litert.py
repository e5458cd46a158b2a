"""LiteRT (TensorFlow Lite) in three formats: float32, float16 weights, or int8 for all operators."""

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
from stoker.export.model_format import (
    INPUT_NAMES_FILE,
    Arrays,
    ModelFormat,
    UnsupportedOperationsError,
    converted_input_names,
    graph_input_names,
    rename_inputs,
)
from stoker.registry.exported_model import LoadedModel

FILE = "model.tflite"
"""The model's file."""

_UNSUPPORTED = re.compile(r"'tf\.(\w+)' op is neither")
"""The converter's error about an unsupported operation. Source: observed with TensorFlow 2.21."""

_OPERATOR = re.compile(r"^  Op#\d+ (\w+)\(.*\) -> \[(.*)\]$", re.MULTILINE)
_FLOAT = re.compile(r"^  (T#\d+)\(.*type:FLOAT32\b", re.MULTILINE)
"""Lines that list operators with their outputs, and lines that list float tensors. Source: output of
tf.lite.experimental.Analyzer."""

_CONVERSIONS = {"DEQUANTIZE", "CAST"}
"""Operators that only convert integers to floats."""


def _write(
    model: LoadedModel, signature: str, folder: Path, representative: Arrays, *, weights: str
) -> None:
    with _captured_stderr() as printed:
        converter = tf.lite.TFLiteConverter.from_saved_model(
            str(model.path), signature_keys=[signature]
        )
        _configure(converter, weights, representative)
        try:
            content = converter.convert()
        # The converter's ConverterError derives from Exception and has no public name; its quantizer raises
        # RuntimeError and ValueError. Only the message shows that an operation is unsupported; all other
        # errors are raised again.
        except Exception as error:
            unsupported = _UNSUPPORTED.findall(f"{error}\n{printed()}")
            if not unsupported:
                raise
            raise UnsupportedOperationsError("LiteRT", unsupported) from error
        floats = _float_operators(content) if weights == "int8" else []
    if floats:
        raise UnsupportedOperationsError("LiteRT in int8", floats)
    (folder / FILE).write_bytes(content)
    with _captured_stderr():
        present = list(_runner(folder, signature).get_input_details())
    names = converted_input_names(graph_input_names(model, signature), present)
    write_json(folder / INPUT_NAMES_FILE, names)


def _configure(converter: Any, weights: str, representative: Arrays) -> None:
    if weights == "float32":
        return
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if weights == "float16":
        converter.target_spec.supported_types = [tf.float16]
        return
    first = next(iter(representative.values()))

    def rows() -> Iterator[dict[str, NDArray[Any]]]:
        if not first.ndim:  # the inputs have no batch axis
            yield dict(representative)
            return
        for row in range(len(first)):
            yield {name: values[row : row + 1] for name, values in representative.items()}

    converter.representative_dataset = rows
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]


def _float_operators(content: bytes) -> list[str]:
    """Return the operators that still compute floats: the converter keeps operators without an int8 kernel."""
    listing = io.StringIO()
    with contextlib.redirect_stdout(listing):
        tf.lite.experimental.Analyzer.analyze(model_content=content)
    found = []
    for subgraph in listing.getvalue().split("\nSubgraph#")[1:]:
        floats = set(_FLOAT.findall(subgraph))
        for name, outputs in _OPERATOR.findall(subgraph):
            if floats & set(outputs.split(", ")) and name not in _CONVERSIONS:
                found.append(name)
    return found


def _run(folder: Path, signature: str, inputs: Arrays) -> dict[str, NDArray[Any]]:
    with _captured_stderr():
        feed = rename_inputs(inputs, read_json(folder / INPUT_NAMES_FILE))
        outputs = _runner(folder, signature)(**feed)
        return {name: np.asarray(values) for name, values in outputs.items()}


def _runner(folder: Path, signature: str) -> Any:
    return tf.lite.Interpreter(str(folder / FILE)).get_signature_runner(signature)


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Any]:
    """Capture the text that the converter's libraries print, so that it can be searched and the user does not see it.

    Yields:
        A function that returns the text printed so far.
    """
    with tempfile.TemporaryFile() as captured, warnings.catch_warnings():
        # The converter measures ranges with tf.lite.Interpreter. TensorFlow still has it, but warns that it
        # is deprecated in favor of ai_edge_litert, a separate package with versions of its own.
        warnings.simplefilter("ignore", UserWarning)
        stderr = os.dup(2)
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(captured.fileno(), 2)

        def printed() -> str:
            captured.seek(0)
            return captured.read().decode(errors="replace")

        try:
            yield printed
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _litert_format(name: str, weights: str, tolerance: float) -> ModelFormat:
    return ModelFormat(
        name=name,
        tolerance=tolerance,
        packages={},
        write=partial(_write, weights=weights),
        run=_run,
    )


FORMATS = {
    "litert": _litert_format("LiteRT", "float32", 1e-4),
    "litert-float16": _litert_format("LiteRT with float16 weights", "float16", 1e-2),
    "litert-int8": _litert_format("LiteRT in int8", "int8", 0.1),
}
"""Format name -> format. The tolerances allow for another order of summation (float32), for weights with 11
significant bits (float16), and for weights with 8 bits (int8)."""
