"""Embeddings for TensorBoard's projector: vectors and their labels as text files.

Source: tensorboard/plugins/projector/projector_plugin.py (what it reads, and from where).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from google.protobuf import text_format
from numpy.typing import NDArray
from tensorboard.plugins.projector.projector_config_pb2 import EmbeddingInfo, ProjectorConfig

from stoker.core.files import write_atomic

FOLDER = "embeddings"
"""Below the folder of the event files: the projector reads nothing outside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """The vectors of one layer."""

    name: str
    """As the projector's list shows it."""

    vectors: NDArray[np.float32]
    """[points, dimensions]."""

    labels: Sequence[str] | None = None
    """[points] what each stands for, or None: then its number is shown."""


def write_projector(folder: Path, embeddings: Sequence[Embedding]) -> None:
    """Write the vectors as they are now, over those of before.

    Args:
        folder: Where the event files are.
        embeddings: All of them.

    Raises:
        OSError: the disk.
        UserError: the disk is full.
    """
    config = ProjectorConfig()
    for embedding in embeddings:
        stem = f"{FOLDER}/{quote(embedding.name, safe='')}"
        info: EmbeddingInfo = config.embeddings.add()
        info.tensor_name = embedding.name
        info.tensor_path = f"{stem}.tsv"
        info.tensor_shape.extend(embedding.vectors.shape)
        # As text: the plugin tells raw floats from text by whether they happen to be no UTF-8.
        lines = io.StringIO()
        np.savetxt(lines, embedding.vectors, fmt="%.7g", delimiter="\t")
        write_atomic(folder / info.tensor_path, lines.getvalue())
        if embedding.labels is not None:
            info.metadata_path = f"{stem}.labels.tsv"
            write_atomic(folder / info.metadata_path, _lines(embedding.labels))
    write_atomic(folder / "projector_config.pbtxt", text_format.MessageToString(config))


def _lines(labels: Sequence[str]) -> str:
    # A tab would make columns of it, and an empty line is left out by the browser.
    shown = (" ".join(label.split()) or '""' for label in labels)
    return "".join(f"{label}\n" for label in shown)
