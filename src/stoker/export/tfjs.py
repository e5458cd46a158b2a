"""TensorFlow.js, by its own converter in a process of its own.

Checked by reading the written files back as TensorFlow.js does, graph and weights, and running that
graph by TensorFlow: what the files hold is what is asked. JavaScript itself is not run.
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
from stoker.export.carried import (
    NAMES,
    Arrays,
    Converted,
    argument_of,
    by_names_in_file,
    names_in_file,
)
from stoker.export.converter import run_converter
from stoker.registry.callpath import LoadedModel, first_line

FILE = "model.json"
"""The graph, and where its weights lie."""

PINNED = ("tensorflowjs==4.22.0", "tf-keras==2.21.0", "six==1.17.0")
"""The converter, and what it imports beside TensorFlow; as in requirements-tfjs.lock."""

_NOT_CARRIED = re.compile(rf"{tfjs_process.UNSUPPORTED} [\w ]+\n(.*)")
"""How the converter says it. Source: tensorflowjs 4.22, tf_saved_model_conversion_v2.py."""


def form(python: Path | None = None) -> Converted:
    """TensorFlow.js, written by the interpreter that has its converter; by ours if None."""
    pip = f"{python or sys.executable} -m pip install"
    return Converted(
        name="TensorFlow.js",
        tolerance=1e-4,  # other orders of summing
        packages={
            "tensorflow": f"tensorflow=={tf.__version__}",
            "tensorflowjs": PINNED[0],
            "tf_keras": PINNED[1],
            "six": PINNED[2],
        },
        # Its own requirements name a TensorFlow of 2024, by way of decision forests.
        pip=f"{pip} --no-deps {' '.join(PINNED)}"
        + ("" if python is None else f"`, after `{pip} tensorflow=={tf.__version__}"),
        write=partial(_write, python=python),
        ask=_ask,
        python=python,
    )


def _refusals(said: str) -> list[str]:
    found = _NOT_CARRIED.search(said)
    return re.findall(r"\w+", found.group(1)) if found else []


def _write(
    model: LoadedModel, signature: str, folder: Path, _: Arrays, *, python: Path | None
) -> None:
    # By its file, not by its name: the other interpreter need not have Stoker. Without the folder
    # that Python looks in first, the present one: what lies there is not the converter's.
    command = [str(python or sys.executable), "-c", _START, tfjs_process.__file__]
    command += [str(model.path.absolute()), signature, str(folder.absolute())]
    run_converter(command, folder / FILE, form="TensorFlow.js", refusals=_refusals)
    # The process calls an input by its whole name in the graph.
    whole = {n: f"{signature}_{argument}" for n, argument in argument_of(model, signature).items()}
    write_json(folder / NAMES, names_in_file(whole, list(_tensors(read_json(folder / FILE)))))


_START = (
    "import runpy, sys; sys.path = [path for path in sys.path if path]; "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


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


FORMATS = {"tfjs": form()}
"""Form -> how it is written."""
