"""A SavedModel that calls back into Python answers here, and nowhere else.

`tf.py_function` and `tf.numpy_function` save the number of a function of this process. So loading
the model in the process that made it proves nothing about them.
"""

from __future__ import annotations

from pathlib import Path

from tensorflow.core.protobuf import saved_model_pb2

from stoker.core.errors import CheckFailed, Plain

PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""Operations that call a Python function by number."""


def require_no_python(folder: Path) -> None:
    """Refuse a model whose graph calls Python.

    Args:
        folder: The SavedModel.

    Raises:
        CheckFailed: it holds such an operation; the first is named.
    """
    saved = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    for meta_graph in saved.meta_graphs:
        graph = meta_graph.graph_def
        nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
        for node in nodes:
            if node.op in PYTHON_OPS:
                raise CheckFailed(
                    f"{folder}: a model that is served must hold TensorFlow's operations only",
                    got=Plain(f"{node.op}, which calls Python, as {node.name}"),
                    fix="Write without tf.py_function and tf.numpy_function what build and "
                    "preprocessing_fn do.",
                )
