"""Models that could do more than compute are refused before any of it runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from google.protobuf import text_format
from keras.export import ExportArchive
from tensorflow.core.protobuf import saved_model_pb2
from tests.integration.serve.conftest import export

from stoker.core.errors import DataError
from stoker.serve.loading.safety import allowed_operations, check_model
from stoker.serve.servables.servable import LoadOptions, Servable, State

TEXT = [tf.TensorSpec([None], tf.string, name="x")]


def read_file(x: tf.Tensor) -> Any:
    return tf.map_fn(tf.io.read_file, x)


def write_file(x: tf.Tensor) -> Any:
    with tf.control_dependencies([tf.io.write_file(x[0], "written")]):
        return tf.identity(x)


def python(x: tf.Tensor) -> Any:
    return tf.numpy_function(lambda value: value, [x], tf.string)


def prints(x: tf.Tensor) -> Any:
    with tf.control_dependencies([tf.print(x)]):
        return tf.identity(x)


def matching(x: tf.Tensor) -> Any:
    return tf.io.matching_files(x)


def mapped(x: tf.Tensor) -> Any:
    """Memory of any file of the server, by an operation that TensorFlow calls a constant."""
    path = "/etc/passwd"
    raw = tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[10], memory_region_name=path)
    return tf.cast(raw, tf.int32) + tf.size(x)


def in_a_branch(x: tf.Tensor) -> Any:
    return tf.cond(tf.size(x) > 100, lambda: tf.io.read_file(x[0]), lambda: x[0])


def dataset(x: tf.Tensor) -> Any:
    return tf.data.TextLineDataset(x).reduce(tf.constant(0), lambda n, _: n + 1)


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (read_file, "ReadFile"),
        (write_file, "WriteFile"),
        (python, "PyFunc"),
        (prints, "PrintV2"),
        (matching, "MatchingFiles"),
        (mapped, "ImmutableConst"),
        (in_a_branch, "ReadFile"),
        (dataset, "Dataset"),
    ],
)
def test_a_model_that_does_more_than_compute_ends_with_the_operation_and_the_node(
    tmp_path: Path, call: Callable[..., Any], operation: str
) -> None:
    servable = Servable(1, export(tmp_path / "1", call, TEXT))

    assert not servable.load()

    assert servable.state is State.END
    assert operation in servable.reason
    assert "only compute" in servable.reason
    assert str(tmp_path) not in servable.reason


@pytest.mark.parametrize("name", ["reads", "serving_default"])
def test_a_clean_signature_does_not_hide_another_that_reads_files(
    tmp_path: Path, name: str
) -> None:
    """Whichever of the two is the default: who may call could choose the other."""
    archive = ExportArchive()
    clean = "serving_default" if name == "reads" else "clean"
    archive.add_endpoint(clean, tf.function(tf.identity), input_signature=TEXT)
    archive.add_endpoint(name, tf.function(read_file), input_signature=TEXT)
    archive.write_out(str(tmp_path / "1"), verbose=False)
    servable = Servable(1, tmp_path / "1")

    assert not servable.load()

    assert servable.state is State.END
    assert "ReadFile" in servable.reason
    assert "only compute" in servable.reason


def test_an_operation_that_is_allowed_by_name_is_loaded(tmp_path: Path) -> None:
    path = export(tmp_path / "1", prints, TEXT)
    servable = Servable(1, path, LoadOptions(allow_ops=frozenset({"PrintV2"})))

    assert servable.load()
    servable.unload()


def table(path: Path, vocabulary: Path) -> Path:
    module: Any = tf.Module()
    rows = tf.lookup.TextFileInitializer(
        str(vocabulary),
        tf.string,
        tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64,
        tf.lookup.TextFileIndex.LINE_NUMBER,
    )
    module.table = tf.lookup.StaticHashTable(rows, -1)
    return export(path, lambda x: {"id": module.table.lookup(x)}, TEXT, module)


def test_a_table_from_an_asset_passes_and_one_from_elsewhere_does_not(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a\nb\n")
    path = table(tmp_path / "1", tmp_path / "words.txt")
    servable = Servable(1, path)
    assert servable.load(), servable.reason
    servable.unload()

    def foreign(saved: saved_model_pb2.SavedModel) -> None:
        del saved.meta_graphs[0].asset_file_def[:]

    def fed_by_the_client(saved: saved_model_pb2.SavedModel) -> None:
        graph = saved.meta_graphs[0]
        graph.signature_def["serving_default"].inputs["path"].name = "ReadVariableOp:0"

    def assigned_twice(saved: saved_model_pb2.SavedModel) -> None:
        graph = saved.meta_graphs[0].graph_def
        twin = graph.node.add()
        twin.CopyFrom(next(node for node in graph.node if node.op == "VarHandleOp"))
        twin.name = "twin"
        twin.attr["shared_name"].s = twin.attr["shared_name"].s or b"Variable"

    def assigned_another(saved: saved_model_pb2.SavedModel) -> None:
        graph = saved.meta_graphs[0].graph_def
        assign = next(node for node in graph.node if node.op == "AssignVariableOp")
        assign.input[1] = "Const"

    whole = (path / "saved_model.pb").read_bytes()
    for change in (foreign, fed_by_the_client, assigned_twice, assigned_another):
        (path / "saved_model.pb").write_bytes(whole)
        changed(path, change)
        with pytest.raises(DataError, match="on a file that is not its own"):
            check_model(path)


def changed(path: Path, change: Callable[[saved_model_pb2.SavedModel], None]) -> None:
    file = path / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    change(saved)
    file.write_bytes(saved.SerializeToString())


def outside(saved: saved_model_pb2.SavedModel) -> None:
    asset = saved.meta_graphs[0].asset_file_def.add(filename="../../etc/passwd")
    asset.tensor_info.name = "x:0"


def absolute(saved: saved_model_pb2.SavedModel) -> None:
    saved.meta_graphs[0].asset_file_def.add(filename="/etc/passwd")


def hidden_in_restore(saved: saved_model_pb2.SavedModel) -> None:
    graph = saved.meta_graphs[0].graph_def
    node = graph.node.add(name="evil", op="WriteFile")
    saved.meta_graphs[0].saver_def.restore_op_name = node.name


def hidden_in_initializer(saved: saved_model_pb2.SavedModel) -> None:
    saved.meta_graphs[0].graph_def.node.add(name="evil", op="ReadFile")
    saved.meta_graphs[0].graph_def.node.add(name="calm", op="NoOp", input=["^evil"])
    found = saved.meta_graphs[0].collection_def["legacy_init_op"]
    found.node_list.value.append("calm")


def restores_elsewhere(saved: saved_model_pb2.SavedModel) -> None:
    saved.meta_graphs[0].saver_def.filename_tensor_name = "other:0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (outside, "etc/passwd"),
        (absolute, "etc/passwd"),
        (hidden_in_restore, "WriteFile"),
        (hidden_in_initializer, "ReadFile"),
        (restores_elsewhere, "not its own"),
    ],
)
def test_a_changed_model_is_refused(
    exported: dict[str, Path],
    tmp_path: Path,
    change: Callable[[saved_model_pb2.SavedModel], None],
    said: str,
) -> None:
    path = tmp_path / "1"
    shutil.copytree(exported["half_plus_two"], path)
    changed(path, change)

    with pytest.raises(DataError, match=said):
        check_model(path)


def test_an_operation_that_nothing_reaches_does_no_harm(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "1"
    shutil.copytree(exported["half_plus_two"], path)

    def unreached(saved: saved_model_pb2.SavedModel) -> None:
        saved.meta_graphs[0].graph_def.node.add(name="e", op="ReadFile")

    changed(path, unreached)

    check_model(path)


def test_files_that_are_not_what_they_seem_are_refused(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    source = exported["half_plus_two"]

    def copy(name: str) -> Path:
        shutil.copytree(source, tmp_path / name)
        return tmp_path / name

    linked = copy("linked")
    (linked / "assets" / "x").symlink_to("/etc/passwd")
    cut = copy("cut")
    (cut / "saved_model.pb").write_bytes((source / "saved_model.pb").read_bytes()[:-10])
    both, chunked = copy("both"), copy("chunked")
    (both / "saved_model.pbtxt").write_text("")
    (chunked / "saved_model.cpb").write_bytes(b"")
    for path in (linked, cut, both, chunked):
        with pytest.raises(DataError):
            check_model(path)
    text = copy("text")
    saved = saved_model_pb2.SavedModel.FromString((text / "saved_model.pb").read_bytes())
    (text / "saved_model.pb").unlink()
    (text / "saved_model.pbtxt").write_text(text_format.MessageToString(saved))
    check_model(text)


def test_every_small_model_passes(exported: dict[str, Path]) -> None:
    for path in exported.values():
        check_model(path)


def test_a_keras_model_with_lookups_images_and_random_layers_passes(tmp_path: Path) -> None:
    import keras

    words = keras.Input((), dtype="string", name="word")
    looked_up = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(words)
    image = keras.Input((8, 8, 3), name="image")
    seen = keras.layers.Conv2D(2, 3)(keras.layers.Rescaling(1 / 255)(image))
    seen = keras.layers.BatchNormalization()(keras.layers.GlobalAveragePooling2D()(seen))
    steps = keras.Input((4, 3), name="steps")
    recalled = keras.layers.GRU(2)(keras.layers.LSTM(3, return_sequences=True)(steps))
    joined = keras.layers.Concatenate()([looked_up, seen, recalled])
    outcome = keras.layers.Dense(1)(keras.layers.Dropout(0.5)(joined))
    model = keras.Model([words, image, steps], outcome)
    archive = ExportArchive()
    archive.track(model)
    specs = [
        tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, name=tensor.name)
        for tensor in (words, image, steps)
    ]
    archive.add_endpoint(
        "serving_default", lambda *values: model(list(values)), input_signature=specs
    )
    archive.write_out(str(tmp_path / "1"), verbose=False)

    check_model(tmp_path / "1")


def test_the_list_holds_none_of_the_operations_that_reach_out() -> None:
    found = allowed_operations()
    assert len(found) > 500
    for part in ("File", "PyFunc", "Print", "Dataset", "Save", "Restore", "Reader", "Remote"):
        assert [name for name in found if part in name] == []
    assert not found & {"ImmutableConst", "Abort", "GenerateVocabRemapping", "LoadAndRemapMatrix"}
    unknown = [name for name in found if not hasattr(tf.raw_ops, name)]
    assert unknown == []
