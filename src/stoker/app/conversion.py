"""Real rows for a conversion: of an experiment's splits, or of the user's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.app.experiment import Experiment
from stoker.app.stage_outputs import eval_rows, open_dataset, open_transform
from stoker.client.rows import Request, padded, to_arrays
from stoker.client.signature import SignatureSpec, TensorSpec, chosen
from stoker.core.errors import ConfigError, Plain
from stoker.data.columns import Column, to_numpy

if TYPE_CHECKING:
    from stoker.app.chain import ChainResult
    from stoker.data.user_dataset.load_dataset import AnyDataset

Rows = Mapping[str, NDArray[Any]]
"""Input -> [rows, ...] values."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A SavedModel, and rows to ask it about."""

    saved_model: Path
    """Its folder."""

    rows: Rows
    """What the conversion is compared on."""

    representative: Rows
    """What ranges are measured on."""


def of_experiment(experiment: Experiment, chain: ChainResult, *, rows: int) -> Source:
    """What a chain exported, with rows of its eval split, and of its train split for ranges.

    Args:
        experiment: What was run.
        chain: Its outputs up to `export`.
        rows: Most rows of each.
    """
    transform = open_transform(experiment, chain.output("transform"))
    dataset = open_dataset(experiment, chain.output("ingest"), analysis=chain.results["analyze"])
    columns = transform.serving_columns
    held_out = next(eval_rows(dataset, columns, at_once=rows))
    return Source(
        saved_model=chain.output("export"),
        rows=_first(held_out, rows),
        representative=_first(_train_rows(dataset, columns, rows), rows),
    )


def of_folder(folder: Path, request: Request | None) -> Source:
    """A SavedModel, or the newest of a folder of versions, with the user's own rows.

    Raises:
        ConfigError: there is no SavedModel, or there are no rows.
        UserError: the rows are none that the model takes.
    """
    from stoker.export.signatures import SERVING_TRANSFORMED, TRANSFORM_FEATURES
    from stoker.registry.callpath import load_model
    from stoker.registry.repository import version_folders

    versions = version_folders(folder)
    saved_model = versions[max(versions)] if versions else folder
    if request is None:
        raise ConfigError(
            "a conversion is compared on real rows",
            got=Plain("none"),
            fix="Give them by --data rows.json, or name the experiment's folder.",
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
    if request.signature == SERVING_TRANSFORMED:  # takes the transform's outputs for raw rows
        request = replace(request, signature=TRANSFORM_FEATURES)
    spec = chosen(signatures, request.signature)
    rows = to_arrays(padded(request, lambda: signatures), spec)
    return Source(saved_model=saved_model, rows=rows, representative=rows)


def _train_rows(dataset: AnyDataset, columns: Sequence[Any], rows: int) -> dict[str, NDArray[Any]]:
    from stoker.data.user_dataset.load_dataset import OwnDataset

    if isinstance(dataset, OwnDataset):
        return next(iter(dataset.arrays("train", columns=columns)))
    stored = [column for column in columns if isinstance(column, Column)]
    batch = next(dataset.batches("train", columns=[column.name for column in stored], rows=rows))
    return {column.name: to_numpy(column, batch.column(column.name)) for column in stored}


def _first(values: Mapping[str, NDArray[Any]], rows: int) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(array[:rows]) for name, array in values.items()}
