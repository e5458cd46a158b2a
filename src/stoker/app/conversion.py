"""Finds the model for a conversion, and real rows: from the splits of an experiment, or from the user's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.app.experiment import Experiment
from stoker.app.stage_outputs import open_dataset, open_transform, split_rows
from stoker.client.rows import Request, padded, to_arrays
from stoker.client.signature import SignatureSpec, TensorSpec, chosen
from stoker.core.errors import ConfigError, Plain

if TYPE_CHECKING:
    from stoker.app.chain import ChainResult
    from stoker.export.conversion import ConversionSource

Rows = Mapping[str, NDArray[Any]]
"""Input -> [rows, ...] values."""


def of_experiment(experiment: Experiment, chain: ChainResult, *, rows: int) -> ConversionSource:
    """Return a chain's exported model, rows of the eval split to compare, and rows of the train split for value ranges.

    Args:
        experiment: The experiment.
        chain: The result of the chain up to `export`.
        rows: Maximum number of rows of each split.
    """
    from stoker.export.conversion import ConversionSource

    transform = open_transform(experiment, chain.output("transform"))
    dataset = open_dataset(experiment, chain.output("ingest"), analysis=chain.results["analyze"])
    columns = transform.serving_columns

    def first_rows(split: str) -> Rows:
        batch = next(split_rows(dataset, split, columns, batch_rows=rows))
        return {name: np.asarray(array[:rows]) for name, array in batch.items()}

    return ConversionSource(
        saved_model=chain.output("export"),
        rows=first_rows("eval"),
        representative=first_rows("train"),
    )


def of_folder(folder: Path, request: Request | None) -> ConversionSource:
    """Return the source of a conversion: the SavedModel in a folder, or its newest version, and the user's rows.

    Raises:
        ConfigError: the SavedModel or the rows are missing.
        UserError: the model does not accept the rows.
    """
    from stoker.export.conversion import ConversionSource
    from stoker.export.signatures import SERVING_TRANSFORMED, TRANSFORM_FEATURES
    from stoker.registry.exported_model import load_model
    from stoker.registry.repository import version_folders

    versions = version_folders(folder)
    saved_model = versions[max(versions)] if versions else folder
    if request is None:
        raise ConfigError(
            "a conversion needs real rows to compare the models on",
            got=Plain("none"),
            fix="Pass rows with --data rows.json, or name the folder of an experiment.",
        )
    model = load_model(saved_model)
    signatures = {
        name: SignatureSpec(
            inputs={
                n: TensorSpec(dtype=s.dtype, shape=s.shape) for n, s in signature.inputs.items()
            },
            outputs={},
        )
        for name, signature in model.signatures.items()
    }
    model.close()
    if request.signature == SERVING_TRANSFORMED:  # its inputs are the outputs of the transform
        request = replace(request, signature=TRANSFORM_FEATURES)
    spec = chosen(signatures, request.signature)
    rows = to_arrays(padded(request, lambda: signatures), spec)
    return ConversionSource(saved_model=saved_model, rows=rows, representative=rows)
