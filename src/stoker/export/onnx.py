"""ONNX: tf2onnx writes the model in a process of its own, and ONNX Runtime runs it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.files import read_json, write_json
from stoker.export.model_format import (
    INPUT_NAMES_FILE,
    Arrays,
    ModelFormat,
    converted_input_names,
    graph_input_names,
    rename_inputs,
    run_converter,
)
from stoker.registry.exported_model import SERVE_TAG, LoadedModel

FILE = "model.onnx"
"""The model's file."""

OPSET = 18
"""Version of ONNX's operator set: the newest that tf2onnx 1.17 writes."""

_UNSUPPORTED = re.compile(r"Tensorflow op \[.*?: (\w+)\] is not supported")
"""tf2onnx's error about an unsupported operation. Source: tf2onnx 1.17, tfonnx.py."""


def _write(model: LoadedModel, signature: str, folder: Path, _: Arrays) -> None:
    # tf2onnx runs in a process of its own: it changes TensorFlow's logging and warnings. -P keeps Python
    # from importing from the current folder.
    command = [sys.executable, "-P", "-m", "tf2onnx.convert", "--saved-model", str(model.path)]
    command += ["--signature_def", signature, "--tag", SERVE_TAG, "--opset", str(OPSET)]
    command += ["--output", str(folder / FILE)]
    run_converter(command, folder / FILE, format_name="ONNX", find_unsupported=_unsupported)
    present = [tensor.name for tensor in _session(folder).get_inputs()]
    names = converted_input_names(graph_input_names(model, signature), present)
    write_json(folder / INPUT_NAMES_FILE, names)


def _unsupported(stderr: str) -> list[str]:
    tables = ["lookup tables"] if "lookup tables" in stderr else []
    return _UNSUPPORTED.findall(stderr) + tables


def _run(folder: Path, _: str, inputs: Arrays) -> dict[str, NDArray[Any]]:
    session = _session(folder)
    names = [tensor.name for tensor in session.get_outputs()]
    outputs = session.run(names, rename_inputs(inputs, read_json(folder / INPUT_NAMES_FILE)))
    return {name: np.asarray(values) for name, values in zip(names, outputs, strict=True)}


def _session(folder: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only, without warnings about constant folding
    return onnxruntime.InferenceSession(
        str(folder / FILE), options, providers=["CPUExecutionProvider"]
    )


FORMATS = {
    "onnx": ModelFormat(
        name="ONNX",
        tolerance=1e-4,
        packages={"tf2onnx": "tf2onnx", "onnx": "onnx", "onnxruntime": "onnxruntime"},
        install_command="pip install 'stoker[convert]'",
        write=_write,
        run=_run,
    )
}
"""Format name -> format. The tolerance allows for another order of summation."""
