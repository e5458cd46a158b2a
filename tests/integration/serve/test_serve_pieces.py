"""A model that is loaded in pieces is the model that was checked, and answers as TensorFlow's loader has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tests.integration.serve.conftest import export, half_plus

from stoker.core.errors import DataError, UserError
from stoker.registry.exported_model import LoadedModel, TensorSpec, load_model
from stoker.serve.loading import session as loading
from stoker.serve.loading.graph_reachability import in_order, nodes_by_name
from stoker.serve.loading.safety import check_model
from stoker.serve.loading.saved_model import read_saved_model
from stoker.serve.loading.session import load_checked
from stoker.serve.runtime.gil_yield import GilYield

v1 = tf.compat.v1


def written(path: Path, x: tf.Tensor, y: tf.Tensor, **more: Any) -> Path:
    """The default graph as TensorFlow 1 wrote it."""
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(path), {"x": x}, {"y": y}, **more)
    return path


def tied(path: Path) -> Path:
    """Nodes that only come together: by control inputs, a place that they share, and a ring."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None], name="x")
        variable = v1.get_variable("kept", initializer=3.0, use_resource=False)
        with v1.colocate_with(variable.op):
            y = x * variable
        for _ in range(60):  # more than one piece
            with tf.control_dependencies([tf.no_op()]):
                y = y + tf.constant(0.5)

        def twice(n: tf.Tensor, y: tf.Tensor) -> Any:
            for _ in range(30):  # a ring of more than one piece too
                y = y + 0.25
            return n + 1, y * 2.0

        v1.disable_control_flow_v2()
        try:
            _, y = v1.while_loop(lambda n, _: n < 4, twice, [0, y])
        finally:
            v1.enable_control_flow_v2()
        return written(path, x, y)


def looked_up(path: Path) -> Path:
    """A table from a file of the model's own, which an initializer reads."""
    words = path.parent / "words.txt"
    words.write_text("cash\ncard\n")
    rows = tf.lookup.TextFileInitializer(
        str(words),
        tf.string,
        tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64,
        tf.lookup.TextFileIndex.LINE_NUMBER,
    )
    module: Any = tf.Module()
    module.table = tf.lookup.StaticHashTable(rows, -1)
    spec = [tf.TensorSpec([None], tf.string, name="word")]
    return export(path, lambda word: {"id": module.table.lookup(word)}, spec, module)


def values_for(spec: TensorSpec) -> np.ndarray[Any, Any]:
    shape = [size or 3 for size in spec.shape or (3,)]
    if spec.dtype == "string":
        texts = [b"cash", b"card", b"else"]
        return np.resize(np.array(texts, dtype=object), shape)
    numbers = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    return numbers.astype(tf.dtypes.as_dtype(spec.dtype).as_numpy_dtype)


def answers(model: LoadedModel) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, signature in model.signatures.items():
        values = {key: values_for(spec) for key, spec in signature.inputs.items()}
        try:
            found[name] = model.call(name, values)
        except UserError as error:  # no image, and no Example
            found[name] = {"refused": np.array(error.rule)}
    return found


def assert_same(path: Path, *, yield_gil: Callable[[], None]) -> None:
    ours, theirs = load_checked(path, check_model(path), yield_gil=yield_gil), load_model(path)
    try:
        assert ours.signatures == theirs.signatures
        mine, others = answers(ours), answers(theirs)
        assert mine.keys() == others.keys()
        for signature, outputs in others.items():
            assert mine[signature].keys() == outputs.keys()
            for key, value in outputs.items():
                np.testing.assert_array_equal(mine[signature][key], value)
    finally:
        ours.close()
        theirs.close()


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[graph_pb2.GraphDef]:
    """All that is imported; what comes in one piece fails the test."""
    seen: list[graph_pb2.GraphDef] = []
    real = loading._import

    def recorded(graph: tf.Graph, piece: graph_pb2.GraphDef, meta_graph: Any) -> None:
        seen.append(piece)
        real(graph, piece, meta_graph)

    def refused(*_: Any) -> None:
        raise AssertionError("it is not loaded in pieces")

    monkeypatch.setattr(loading, "_import", recorded)
    monkeypatch.setattr(loading, "_fill", refused)
    return seen


def test_every_model_answers_as_by_tensorflow_s_own_loader(
    exported: dict[str, Path], tmp_path: Path, pieces: list[graph_pb2.GraphDef]
) -> None:
    looked = looked_up(tmp_path / "looked_up")
    (tmp_path / "words.txt").unlink()  # the model has its own
    for path in (*exported.values(), looked):
        assert_same(path, yield_gil=GilYield())
    assert all(len(piece.node) + len(piece.library.function) for piece in pieces)


def test_what_is_tied_together_comes_in_one_piece_and_the_rest_in_many(
    tmp_path: Path, pieces: list[graph_pb2.GraphDef]
) -> None:
    breaths: list[int] = []
    assert_same(tied(tmp_path / "tied"), yield_gil=lambda: breaths.append(len(pieces)))
    sizes = [len(piece.node) for piece in pieces]
    assert sum(sizes) > 100
    assert len(sizes) > 4, sizes
    assert set(range(1, len(sizes) + 1)) <= set(breaths), "no breath between two pieces"
    ring = [{n.op for n in p.node} & {"Merge", "NextIteration", "Switch"} for p in pieces]
    assert sum(map(bool, ring)) == 1, "a ring is in one piece"


def test_what_no_signature_reaches_is_not_imported(
    tmp_path: Path, pieces: list[graph_pb2.GraphDef]
) -> None:
    """A function of the same `api_implements` could take the place of one that was checked."""
    path = half_plus(tmp_path / "1", addend=2.0)
    saved = read_saved_model(path)
    library = saved.meta_graphs[0].graph_def.library
    twin = library.function.add()
    twin.CopyFrom(library.function[0])
    twin.signature.name = "twin"
    for function in library.function:
        function.attr["api_implements"].s = b"both"
    (path / "saved_model.pb").write_bytes(saved.SerializeToString())
    load_checked(path, check_model(path)).close()
    names = {f.signature.name for piece in pieces for f in piece.library.function}
    nodes = {node.op for piece in pieces for node in piece.node}
    assert names
    assert "twin" not in names
    assert {"StatefulPartitionedCall", "VarHandleOp"} <= nodes
    calls = [node for piece in pieces for node in piece.node if "Call" in node.op]
    assert all(call.attr["_disable_call_shape_inference"].b for call in calls)
    assert len(names) < len(library.function) - 1, "the function that saves is not needed"


def test_what_was_checked_is_what_is_run_whatever_the_file_becomes(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    path = half_plus(tmp_path / "1", addend=2.0)
    checked = check_model(path)
    (path / "saved_model.pb").write_bytes((exported["two"] / "saved_model.pb").read_bytes())
    model = load_checked(path, checked)
    assert set(model.signatures["serving_default"].inputs) == {"x"}
    x = np.ones((1, 1), np.float32)
    assert model.call("serving_default", {"x": x})["y"].tolist() == [[2.5]]
    model.close()


def test_a_gradient_that_does_more_than_compute_is_refused(tmp_path: Path) -> None:
    path = half_plus(tmp_path / "1", addend=2.0)
    saved = read_saved_model(path)
    graph = saved.meta_graphs[0].graph_def
    for function in list(graph.library.function):
        graph.library.gradient.add(function_name=function.signature.name, gradient_func="reads")
    reads = graph.library.function.add()
    reads.signature.name = "reads"
    reads.node_def.add(name="r", op="ReadFile", input=["name"])
    (path / "saved_model.pb").write_bytes(saved.SerializeToString())
    with pytest.raises(DataError, match="ReadFile in its function 'reads'"):
        check_model(path)


def without_saver(path: Path) -> Path:
    """Variables, and nothing that says how they are restored."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None], name="x")
        written(path, x, x * v1.get_variable("kept", initializer=3.0))
    saved = read_saved_model(path)
    saved.meta_graphs[0].ClearField("saver_def")
    (path / "saved_model.pb").write_bytes(saved.SerializeToString())
    return path


def test_what_only_tensorflow_knows_how_to_restore_comes_in_one_piece(tmp_path: Path) -> None:
    path = without_saver(tmp_path / "1")
    checked = check_model(path)
    (path / "saved_model.pb").write_bytes(b"another by now")
    model = load_checked(path, checked)
    values = {"x": np.ones(1, np.float32)}
    assert model.call("serving_default", values)["y"].tolist() == [3.0]
    model.close()


def test_nothing_that_comes_in_one_piece_takes_the_place_of_what_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = without_saver(tmp_path / "1")
    saved = read_saved_model(path)
    twin = saved.meta_graphs[0].graph_def.library.function.add()
    twin.signature.name = "twin"
    twin.attr["api_implements"].s = b"both"
    (path / "saved_model.pb").write_bytes(saved.SerializeToString())
    imported: list[Any] = []
    real = v1.train.import_meta_graph

    def recorded(whole: Any) -> Any:
        imported.append(whole)
        return real(whole)

    monkeypatch.setattr(v1.train, "import_meta_graph", recorded)
    load_checked(path, check_model(path)).close()
    (whole,) = imported
    (function,) = whole.graph_def.library.function
    assert (function.signature.name, dict(function.attr)) == ("twin", {})


def as_tensorflow_1_kept_them(path: Path, *, filename: str = "words.txt") -> Path:
    """The assets of a model in a collection, where they were before they had a field of their own."""
    saved = read_saved_model(path)
    graph = saved.meta_graphs[0]
    (asset,) = graph.asset_file_def
    asset.filename = filename
    graph.collection_def[tf.saved_model.ASSETS_KEY].any_list.value.add().Pack(asset)
    graph.ClearField("asset_file_def")
    (path / "saved_model.pb").write_bytes(saved.SerializeToString())
    return path


def test_assets_of_tensorflow_1_are_found_and_checked(
    tmp_path: Path, pieces: list[graph_pb2.GraphDef]
) -> None:
    path = as_tensorflow_1_kept_them(looked_up(tmp_path / "1"))
    assert_same(path, yield_gil=GilYield())
    assert pieces

    as_elsewhere = as_tensorflow_1_kept_them(looked_up(tmp_path / "2"), filename="../../words.txt")
    with pytest.raises(DataError, match=r"assets must be in its subfolder[\s\S]*\.\./\.\./words"):
        check_model(as_elsewhere)


@pytest.mark.parametrize("damaged", ["bits", "kind"])
def test_a_list_of_assets_that_cannot_be_read_is_refused(tmp_path: Path, damaged: str) -> None:
    path = as_tensorflow_1_kept_them(looked_up(tmp_path / "1"))
    saved = read_saved_model(path)
    (kept,) = saved.meta_graphs[0].collection_def[tf.saved_model.ASSETS_KEY].any_list.value
    if damaged == "bits":
        kept.value = b"\xff" * 9
    else:
        kept.Pack(graph_pb2.GraphDef())
    (path / "saved_model.pb").write_bytes(saved.SerializeToString())
    with pytest.raises(DataError, match=r"list of (its )?assets"):
        check_model(path)


def test_a_damaged_model_is_refused_with_tensorflow_s_reason(tmp_path: Path) -> None:
    path = half_plus(tmp_path / "1", addend=2.0)
    (path / "variables" / "variables.index").unlink()
    with pytest.raises(UserError, match="whole SavedModel"):
        load_checked(path, check_model(path))
    with pytest.raises(UserError, match=r"whole SavedModel[\s\S]*no graph"):
        load_checked(path, saved_model_pb2.SavedModel())
    other = read_saved_model(path)
    other.meta_graphs[0].meta_info_def.tags[:] = ["train"]
    with pytest.raises(UserError, match=r"whole SavedModel[\s\S]*the tags \['train'\]"):
        load_checked(path, other)


def test_nodes_come_after_their_inputs() -> None:
    graph = graph_pb2.GraphDef()
    for name, inputs in {"c": ["b:1", "^a"], "b": ["a"], "a": [], "r": ["s"], "s": ["r"]}.items():
        graph.node.add(name=name, op="NoOp", input=inputs)
    order = in_order(nodes_by_name(graph))
    assert order[:3] == ["a", "b", "c"]
    assert set(order[3:]) == {"r", "s"}, "a ring is last"
