"""TensorFlow.js, by its own converter in a process of its own.

Checked by reading the written files back as TensorFlow.js does, graph and weights, and running that
graph by TensorFlow: what the files hold is what is asked. JavaScript itself is not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from numpy.typing import NDArray

from stoker.core.errors import CheckFailed, Plain, UserError
from stoker.core.files import read_json, write_json
from stoker.export.callpath import LoadedModel, first_line
from stoker.export.carried import (
    Arrays,
    Converted,
    NotCarriedError,
    argument_of,
    by_names_in_file,
    names_in_file,
)
from stoker.export.tfjs_process import UNSUPPORTED

FILE = "model.json"
"""The graph, and where its weights lie."""

NAMES = "inputs.json"
"""Input -> the name that the graph has for it."""

_NOT_CARRIED = re.compile(rf"{UNSUPPORTED} [\w ]+\n(.*)")
"""How the converter says it. Source: tensorflowjs 4.22, tf_saved_model_conversion_v2.py."""


def _write(model: LoadedModel, signature: str, folder: Path, _: Arrays) -> None:
    command = [sys.executable, "-m", "stoker.export.tfjs_process"]
    command += [str(model.path), signature, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    found = _NOT_CARRIED.search(done.stderr)
    if found:
        raise NotCarriedError("TensorFlow.js", re.findall(r"\w+", found.group(1)))
    if done.returncode or not (folder / FILE).is_file():
        raise UserError(
            "the TensorFlow.js converter must be able to convert the model",
            got=Plain((done.stderr.strip().splitlines() or ["no output"])[-1]),
        )
    # The process calls an input by its whole name in the graph.
    whole = {n: f"{signature}_{argument}" for n, argument in argument_of(model, signature).items()}
    write_json(folder / NAMES, names_in_file(whole, list(_tensors(read_json(folder / FILE)))))


def _ask(folder: Path, _: str, inputs: Arrays) -> dict[str, NDArray[Any]]:
    written = read_json(folder / FILE)
    graph_def = json_format.ParseDict(
        written["modelTopology"], tf.compat.v1.GraphDef(), ignore_unknown_fields=True
    )
    weights = _weights(folder, written["weightsManifest"])
    for node in graph_def.node:
        if node.name in weights:
            # TensorFlow.js has 32 bits for whole numbers; the graph still says how many it had.
            dtype = tf.dtypes.as_dtype(node.attr["dtype"].type).as_numpy_dtype
            values = weights[node.name].astype(dtype)
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(values))
    tensors = _tensors(written)
    fed = by_names_in_file(inputs, read_json(folder / NAMES))
    outputs = {name: info["name"] for name, info in written["signature"]["outputs"].items()}
    try:
        with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
            tf.graph_util.import_graph_def(graph_def, name="")
            feed = {graph.get_tensor_by_name(tensors[name]): v for name, v in fed.items()}
            found: dict[str, NDArray[Any]] = session.run(outputs, feed)
    except (ValueError, tf.errors.OpError) as error:
        raise CheckFailed(
            "the graph that was written for TensorFlow.js must run", got=Plain(first_line(error))
        ) from error
    return found


def _tensors(written: Any) -> dict[str, str]:
    """Name of an input's node -> its tensor; the keys beside have a ":0" or have not."""
    inputs = written["signature"]["inputs"].values()
    return {info["name"].partition(":")[0]: info["name"] for info in inputs}


def _weights(folder: Path, manifest: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Name -> values, read as TensorFlow.js reads them: one after the other from the joined files."""
    weights = {}
    for group in manifest:
        content = b"".join((folder / path).read_bytes() for path in group["paths"])
        place = 0
        for weight in group["weights"]:
            if weight["dtype"] == "string":
                raise CheckFailed("constants that are written for TensorFlow.js must be numbers")
            dtype, shape = np.dtype(weight["dtype"]), tuple(weight["shape"])
            count = int(np.prod(shape, dtype=np.int64))
            values = np.frombuffer(content, dtype, count, place)
            place += count * dtype.itemsize
            weights[weight["name"]] = values.reshape(shape)
    return weights


FORMATS = {
    "tfjs": Converted(
        name="TensorFlow.js",
        tolerance=1e-4,
        packages={"tensorflowjs": "tensorflowjs", "tf_keras": "tf-keras", "six": "six"},
        # Its own requirements name a TensorFlow of 2024, by way of decision forests.
        pip="pip install --no-deps tensorflowjs==4.22.0 tf-keras six",
        write=_write,
        ask=_ask,
    )
}
"""Form -> how it is written. Tolerance: other orders of summing."""
