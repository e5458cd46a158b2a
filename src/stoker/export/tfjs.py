"""TensorFlow.js: its converter writes the model in a process of its own.

To compare the answers, the graph and the weights are read from the written files, as TensorFlow.js does, and
TensorFlow runs that graph. No JavaScript runs.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from numpy.typing import NDArray

from stoker.core.errors import CheckFailed, Plain
from stoker.core.files import read_json, write_json
from stoker.export import tfjs_process
from stoker.export.model_format import (
    INPUT_NAMES_FILE,
    Arrays,
    ModelFormat,
    converted_input_names,
    graph_input_names,
    rename_inputs,
    run_converter,
)
from stoker.registry.exported_model import LoadedModel, first_line

FILE = "model.json"
"""File with the graph and the paths of the files with its weights."""

PINNED = ("tensorflowjs==4.22.0", "tf-keras==2.21.0", "six==1.17.0")
"""The converter, and the packages that it imports except TensorFlow; the same as in requirements-tfjs.lock."""

_UNSUPPORTED = re.compile(rf"{tfjs_process.UNSUPPORTED} [\w ]+\n(.*)")
"""The converter's list of unsupported operations. Source: tensorflowjs 4.22, tf_saved_model_conversion_v2.py."""


def tfjs_format(python: Path | None = None) -> ModelFormat:
    """Return the format TensorFlow.js; `python` is the interpreter for its converter (default: the current one)."""
    pip = f"{python or sys.executable} -m pip install"
    return ModelFormat(
        name="TensorFlow.js",
        tolerance=1e-4,  # another order of summation
        packages={
            "tensorflow": f"tensorflow=={tf.__version__}",
            "tensorflowjs": PINNED[0],
            "tf_keras": PINNED[1],
            "six": PINNED[2],
        },
        # --no-deps: tensorflowjs depends on TensorFlow Decision Forests, which requires a TensorFlow release
        # from 2024.
        install_command=f"{pip} --no-deps {' '.join(PINNED)}"
        + ("" if python is None else f"`, after `{pip} tensorflow=={tf.__version__}"),
        write=partial(_write, python=python),
        run=_run,
        python=python,
    )


def _unsupported(stderr: str) -> list[str]:
    found = _UNSUPPORTED.search(stderr)
    return re.findall(r"\w+", found.group(1)) if found else []


def _write(
    model: LoadedModel, signature: str, folder: Path, _: Arrays, *, python: Path | None
) -> None:
    # Pass the file's path, not the module's name: Stoker may not be installed for the other interpreter.
    # _START removes the current folder from sys.path: the converter must not import from it.
    command = [str(python or sys.executable), "-c", _START, tfjs_process.__file__]
    command += [str(model.path.absolute()), signature, str(folder.absolute())]
    run_converter(
        command, folder / FILE, format_name="TensorFlow.js", find_unsupported=_unsupported
    )
    # The converter calls an input by its full name in the graph.
    full = {n: f"{signature}_{name}" for n, name in graph_input_names(model, signature).items()}
    names = converted_input_names(full, list(_tensors(read_json(folder / FILE))))
    write_json(folder / INPUT_NAMES_FILE, names)


_START = (
    "import runpy, sys; sys.path = [path for path in sys.path if path]; "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


def _run(folder: Path, _: str, inputs: Arrays) -> dict[str, NDArray[Any]]:
    written = read_json(folder / FILE)
    graph_def = json_format.ParseDict(
        written["modelTopology"], tf.compat.v1.GraphDef(), ignore_unknown_fields=True
    )
    weights = _weights(folder, written["weightsManifest"])
    for node in graph_def.node:
        if node.name in weights:
            # TensorFlow.js stores integers in 32 bits; the graph keeps the original dtype.
            dtype = tf.dtypes.as_dtype(node.attr["dtype"].type).as_numpy_dtype
            values = weights[node.name].astype(dtype)
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(values))
    tensors = _tensors(written)
    fed = rename_inputs(inputs, read_json(folder / INPUT_NAMES_FILE))
    outputs = {name: info["name"] for name, info in written["signature"]["outputs"].items()}
    try:
        with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
            tf.graph_util.import_graph_def(graph_def, name="")
            feed = {graph.get_tensor_by_name(tensors[name]): v for name, v in fed.items()}
            answers: dict[str, NDArray[Any]] = session.run(outputs, feed)
    except (ValueError, tf.errors.OpError) as error:
        raise CheckFailed(
            "TensorFlow must be able to run the graph written for TensorFlow.js",
            got=Plain(first_line(error)),
        ) from error
    return answers


def _tensors(written: Any) -> dict[str, str]:
    """Name of an input's node -> name of its tensor, which may or may not end with ":0"."""
    inputs = written["signature"]["inputs"].values()
    return {info["name"].partition(":")[0]: info["name"] for info in inputs}


def _weights(folder: Path, manifest: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Name of a weight -> its values, read from the concatenated files as TensorFlow.js does."""
    weights = {}
    for group in manifest:
        content = b"".join((folder / path).read_bytes() for path in group["paths"])
        offset = 0
        for weight in group["weights"]:
            if weight["dtype"] == "string":
                raise CheckFailed(
                    "every constant written for TensorFlow.js must consist of numbers"
                )
            dtype, shape = np.dtype(weight["dtype"]), tuple(weight["shape"])
            count = int(np.prod(shape, dtype=np.int64))
            values = np.frombuffer(content, dtype, count, offset)
            offset += count * dtype.itemsize
            weights[weight["name"]] = values.reshape(shape)
    return weights


FORMATS = {"tfjs": tfjs_format()}
"""Format name -> format."""
