"""Checks that the files of a SavedModel are complete and inside its own folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import tensorflow as tf
from google.protobuf import text_format
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from stoker.core.errors import DataError, Plain

_ASSETS_KEY = tf.saved_model.ASSETS_KEY


def read_saved_model(folder: Path) -> saved_model_pb2.SavedModel:
    """Read the file of a SavedModel.

    Raises:
        DataError: the file is missing or damaged, or there are several.
    """
    binary, text = folder / "saved_model.pb", folder / "saved_model.pbtxt"
    if (folder / "saved_model.cpb").exists() or (binary.is_file() and text.is_file()):
        raise _not_whole(folder, "several saved_model files")
    if not binary.is_file() and not text.is_file():
        raise _not_whole(folder, "no saved_model.pb")
    try:
        if binary.is_file():
            return saved_model_pb2.SavedModel.FromString(binary.read_bytes())
        return text_format.Parse(text.read_text(), saved_model_pb2.SavedModel())
    except (OSError, DecodeError, text_format.ParseError, UnicodeDecodeError) as error:
        name = (binary if binary.is_file() else text).name
        raise _not_whole(folder, f"a {name} that is damaged ({type(error).__name__})") from error


def check_files(folder: Path) -> None:
    """Check that every link in a version's folder points to a path inside the folder.

    Raises:
        DataError: a link points outside; the message names the link.
    """
    inside = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise DataError(
                f"{folder}: every link in a version must point to a file inside its folder",
                got=Plain(f"{path.relative_to(folder)}, which points outside"),
                fix="Replace the link by a copy of the file.",
            )


def assets_of(
    folder: Path, meta_graph: meta_graph_pb2.MetaGraphDef
) -> list[meta_graph_pb2.AssetFileDef]:
    """Return the assets, i.e. the files that tables are filled from; TensorFlow 1 listed them in a collection.

    Raises:
        DataError: the collection is damaged.
    """
    if meta_graph.asset_file_def or _ASSETS_KEY not in meta_graph.collection_def:
        return list(meta_graph.asset_file_def)
    found = []
    for kept in meta_graph.collection_def[_ASSETS_KEY].any_list.value:
        asset = meta_graph_pb2.AssetFileDef()
        try:
            is_one = kept.Unpack(asset)
        except DecodeError as error:
            raise _not_whole(folder, "a list of assets that is damaged") from error
        if not is_one:
            raise _not_whole(folder, f"a {kept.type_url[:100]!r} in the list of its assets")
        found.append(asset)
    return found


def check_assets(folder: Path, meta_graph: meta_graph_pb2.MetaGraphDef) -> None:
    """Check that every asset is in the folder of assets.

    Raises:
        DataError: an asset is elsewhere; the message names it.
    """
    for asset in assets_of(folder, meta_graph):
        name = PurePosixPath(asset.filename)
        if name.is_absolute() or ".." in name.parts or not name.parts:
            raise DataError(
                f"{folder}: a model's assets must be in its subfolder assets",
                got=Plain(f"the asset {asset.filename[:100]!r}"),
                fix="Export it again.",
            )


def _not_whole(folder: Path, got: str) -> DataError:
    return DataError(
        f"{folder} must contain one complete SavedModel",
        got=Plain(got),
        fix="Export it again, or copy it again.",
    )
