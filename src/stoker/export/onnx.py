"""ONNX, by tf2onnx in a process of its own, asked by ONNX Runtime."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import Plain, UserError
from stoker.core.files import read_json, write_json
from stoker.export.callpath import SERVE_TAG, LoadedModel
from stoker.export.carried import (
    Arrays,
    Converted,
    NotCarriedError,
    argument_of,
    by_names_in_file,
    names_in_file,
)

FILE = "model.onnx"
"""The model's file."""

NAMES = "inputs.json"
"""Input -> the name that the file has for it."""

OPSET = 18
"""The newest that tf2onnx 1.17 writes."""

_NOT_CARRIED = re.compile(r"Tensorflow op \[.*?: (\w+)\] is not supported")
"""How tf2onnx says it. Source: tf2onnx 1.17, tfonnx.py."""


def _write(model: LoadedModel, signature: str, folder: Path, _: Arrays) -> None:
    # In its own process: it takes TensorFlow's logging and warnings for its own.
    command = [sys.executable, "-m", "tf2onnx.convert", "--saved-model", str(model.path)]
    command += ["--signature_def", signature, "--tag", SERVE_TAG, "--opset", str(OPSET)]
    command += ["--output", str(folder / FILE)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    found = _NOT_CARRIED.findall(done.stderr)
    if "lookup tables" in done.stderr:
        found.append("lookup tables")
    if found:
        raise NotCarriedError("ONNX", found)
    if done.returncode or not (folder / FILE).is_file():
        raise UserError(
            "tf2onnx must be able to convert the model",
            got=Plain((done.stderr.strip().splitlines() or ["no output"])[-1].rstrip(".")),
        )
    taken = [one.name for one in _session(folder).get_inputs()]
    write_json(folder / NAMES, names_in_file(argument_of(model, signature), taken))


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
