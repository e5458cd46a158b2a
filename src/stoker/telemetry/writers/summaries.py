"""Creates TensorBoard's messages for values that are not scalars, and the files for its projector."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from google.protobuf import text_format
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2, tensor_pb2
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.projector.projector_config_pb2 import EmbeddingInfo, ProjectorConfig
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.util.tensor_util import make_tensor_proto

from stoker.core.files import write_atomic

Histogram = NDArray[np.float64]
"""[buckets, 3]: left edge, right edge and count of each bucket."""


def histogram_value(tag: str, histogram: Histogram) -> summary_pb2.Summary.Value:
    """Return a histogram in the form that TensorBoard's histogram plugin reads."""
    metadata = histogram_metadata.create_summary_metadata(display_name=None, description=None)
    tensor = make_tensor_proto(np.asarray(histogram, np.float64))
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def text_value(tag: str, markdown: str) -> summary_pb2.Summary.Value:
    """Return a text that TensorBoard shows as Markdown."""
    metadata = text_metadata.create_summary_metadata(display_name=None, description=None)
    tensor: tensor_pb2.TensorProto = make_tensor_proto(np.array([markdown.encode()], object))
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def session_start(settings: Mapping[str, Any], *, run: str) -> summary_pb2.Summary:
    """Return the message with the settings of a run, for TensorBoard's HParams table.

    The metrics in the table need no message: TensorBoard finds them among the run's scalars.

    Args:
        settings: Nested settings; each becomes a column with its dotted name.
        run: ID of the run; each run is a row of its own.
    """
    summary: summary_pb2.Summary = hparams_pb(flat_settings(settings), trial_id=run)
    return summary


def session_end(*, succeeded: bool) -> summary_pb2.Summary.Value:
    """Return the message that a run has ended, for TensorBoard's HParams table."""
    status = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status)
    metadata = hparams_metadata.create_summary_metadata(
        plugin_data_pb2.HParamsPluginData(session_end_info=end)
    )
    return summary_pb2.Summary.Value(
        tag=hparams_metadata.SESSION_END_INFO_TAG,
        metadata=metadata,
        tensor=hparams_metadata.NULL_TENSOR,
    )


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | float | str]:
    """Return nested settings by dotted name; values that are not numbers, booleans or strings become JSON text."""
    flat: dict[str, bool | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            flat[f"{prefix}{name}"] = value
        elif value is not None:
            flat[f"{prefix}{name}"] = json.dumps(value, default=str)
    return flat


FOLDER = "embeddings"
"""Folder for the vectors, inside the folder of event files: the projector reads no files outside the latter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """The vectors of one layer."""

    name: str
    """Name of the layer in the projector's list."""

    vectors: NDArray[np.float32]
    """[points, dimensions] the vectors."""

    labels: Sequence[str] | None = None
    """[points] the label of each point; None: the projector shows the point's number."""


def write_projector(folder: Path, embeddings: Sequence[Embedding]) -> None:
    """Write the current vectors; they replace the previous ones.

    Args:
        folder: Folder of the event files.
        embeddings: The vectors of all layers that the projector shows.

    Raises:
        OSError: the disk has failed.
        UserError: the disk is full.
    """
    config = ProjectorConfig()
    for embedding in embeddings:
        stem = f"{FOLDER}/{quote(embedding.name, safe='')}"
        info: EmbeddingInfo = config.embeddings.add()
        info.tensor_name = embedding.name
        info.tensor_path = f"{stem}.tsv"
        info.tensor_shape.extend(embedding.vectors.shape)
        # Write text, not raw floats: the plugin takes a file of raw floats for text if it happens to be valid UTF-8.
        lines = io.StringIO()
        np.savetxt(lines, embedding.vectors, fmt="%.7g", delimiter="\t")
        write_atomic(folder / info.tensor_path, lines.getvalue())
        if embedding.labels is not None:
            info.metadata_path = f"{stem}.labels.tsv"
            write_atomic(folder / info.metadata_path, _lines(embedding.labels))
    write_atomic(folder / "projector_config.pbtxt", text_format.MessageToString(config))


def _lines(labels: Sequence[str]) -> str:
    # A tab in a label would split it into columns, and the browser skips an empty line.
    shown = (" ".join(label.split()) or '""' for label in labels)
    return "".join(f"{label}\n" for label in shown)
