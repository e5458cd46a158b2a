"""ONNX, by tf2onnx in a process of its own, asked by ONNX Runtime."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.files import read_json, write_json
from stoker.export.carried import (
    NAMES,
    Arrays,
    Converted,
    argument_of,
    by_names_in_file,
    names_in_file,
)
from stoker.export.converter import run_converter
from stoker.registry.callpath import SERVE_TAG, LoadedModel

FILE = "model.onnx"
"""The model's file."""

OPSET = 18
"""The newest that tf2onnx 1.17 writes."""

_NOT_CARRIED = re.compile(r"Tensorflow op \[.*?: (\w+)\] is not supported")
"""How tf2onnx says it. Source: tf2onnx 1.17, tfonnx.py."""


def _write(model: LoadedModel, signature: str, folder: Path, _: Arrays) -> None:
    # In its own process: it takes TensorFlow's logging and warnings for its own. -P: what lies in
    # the present folder is not the converter's.
    command = [sys.executable, "-P", "-m", "tf2onnx.convert", "--saved-model", str(model.path)]
    command += ["--signature_def", signature, "--tag", SERVE_TAG, "--opset", str(OPSET)]
    command += ["--output", str(folder / FILE)]
    run_converter(command, folder / FILE, form="ONNX", refusals=_refusals)
    taken = [one.name for one in _session(folder).get_inputs()]
    write_json(folder / NAMES, names_in_file(argument_of(model, signature), taken))


def _refusals(said: str) -> list[str]:
    return _NOT_CARRIED.findall(said) + (["lookup tables"] if "lookup tables" in said else [])


def _ask(folder: Path, _: str, inputs: Arrays) -> dict[str, NDArray[Any]]:
    session = _session(folder)
    names = [one.name for one in session.get_outputs()]
    found = session.run(names, by_names_in_file(inputs, read_json(folder / NAMES)))
    return {name: np.asarray(values) for name, values in zip(names, found, strict=True)}


def _session(folder: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; it warns of constants that it folds
    return onnxruntime.InferenceSession(
        str(folder / FILE), options, providers=["CPUExecutionProvider"]
    )


FORMATS = {
    "onnx": Converted(
        name="ONNX",
        tolerance=1e-4,
        packages={"tf2onnx": "tf2onnx", "onnx": "onnx", "onnxruntime": "onnxruntime"},
        pip="pip install 'stoker[convert]'",
        write=_write,
        ask=_ask,
    )
}
"""Form -> how it is written. Tolerance: other orders of summing."""
