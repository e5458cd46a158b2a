"""Saves the preprocessing function in two parts: features for serving, without the label, and labels for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.analysis_passes import Resolved, needed_columns, run_graph
from stoker.data.features.preprocessing.trace import VocabularyFile
from stoker.data.features.preprocessing.trace_function import Plan
from stoker.data.features.preprocessing.transform import identifiers


def save_parts(plan: Plan, resolved: Resolved, folder: Path) -> None:
    """Save features, labels and weights as separate graphs: the one for serving has none of the labels' tables."""
    traced = resolved.traced
    files = [answer for answer in resolved.answers if isinstance(answer, VocabularyFile)]
    module: Any = tf.Module()
    module.serving = _part(plan, resolved, traced.features)
    module.decoded = (
        _part(plan, resolved, traced.features, takes_pixels=True) if traced.decoded else None
    )
    module.labeling = _part(plan, resolved, traced.labels) if traced.labels else None
    module.weighing = _part(plan, resolved, traced.weights) if traced.weights else None
    # Every vocabulary is saved, even one that no output uses.
    module.vocabularies = [tf.saved_model.Asset(file.path) for file in files]
    tf.saved_model.save(module, str(folder))


def _part(
    plan: Plan,
    resolved: Resolved,
    outputs: Mapping[str, tf.Tensor],
    *,
    takes_pixels: bool = False,
) -> Any:
    """Make a module that computes these outputs, and holds only the tables that they need.

    Args:
        plan: The function and the dataset.
        resolved: The last trace, and the results of its analyzers.
        outputs: Output -> its tensor in the trace.
        takes_pixels: Whether the module takes images that are already decoded, as the training feed has
            them.
    """
    traced = resolved.traced
    columns = needed_columns(traced, list(outputs.values()), plan.dataset)
    feeds = {c.name: traced.raw[c.name] for c in columns}
    if takes_pixels:
        feeds |= {name: traced.decoded[name] for name in feeds if name in traced.decoded}
    pruned = traced.wrapped.prune(list(feeds.values()), list(outputs.values()))
    if not takes_pixels:
        _probe(plan.dataset, pruned, columns, outputs)
    inputs, results = identifiers(feeds, "c"), identifiers(outputs, "f")
    signature = {
        key: tf.TensorSpec(feeds[name].shape, feeds[name].dtype, name=key)
        for name, key in inputs.items()
    }

    def compute(raw: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        found = pruned(*[raw[name] for name in inputs.values()])
        return dict(zip(results.values(), found, strict=True))

    part: Any = tf.Module()
    part.compute = tf.function(compute, input_signature=[signature], autograph=False)
    part.objects = _captured(pruned, resolved.objects)
    return part


def _probe(
    dataset: Dataset, pruned: Any, columns: Sequence[Column], outputs: Mapping[str, tf.Tensor]
) -> None:
    """Run a few rows as one batch and as two; refuse outputs that are wrong.

    An output is wrong if it has a different number of rows than the batch, or if its value for a row depends
    on the other rows of the batch: in serving, these belong to other clients.
    """
    names = [column.name for column in columns]
    batch = dataset.first_rows(names)
    together = run_graph(pruned, batch, columns)
    for name, values in zip(outputs, together, strict=True):
        if len(values) != batch.num_rows:
            raise ConfigError(
                f"output {name!r} of preprocessing_fn must have one row per record",
                got=Plain(f"{len(values)} rows for {batch.num_rows} records"),
                fix="Do not change the first dimension: do not filter or reduce over it, or use tf.unique.",
            )
    if batch.num_rows > 1:
        cut = batch.num_rows // 2
        parts = [
            run_graph(pruned, part, columns) for part in (batch.slice(0, cut), batch.slice(cut))
        ]
        for name, whole, *halves in zip(outputs, together, *parts, strict=True):
            _require_same(name, whole, np.concatenate(halves))


def _require_same(name: str, whole: NDArray[Any], apart: NDArray[Any]) -> None:
    if whole.dtype.kind == "f":
        # Some functions (log1p) differ in the last bit between batch sizes.
        same = np.allclose(whole, apart, rtol=1e-4, atol=1e-5, equal_nan=True)
    else:
        same = bool((whole == apart).all())
    if not same:
        raise ConfigError(
            f"each row of output {name!r} of preprocessing_fn must depend only on the same row of the input",
            got=Plain("different values for the same row in different batches"),
            fix="Use an analyzer (st.mean, st.scale_to_z_score, ...) instead of reducing over "
            "the batch.",
        )


def _captured(pruned: Any, objects: Sequence[Any]) -> list[Any]:
    """Return the tables that a part of the graph uses.

    Raises:
        ConfigError: the part uses a table or variable that cannot be saved.
    """
    handles = [tensor for tensor in pruned.captured_inputs if tensor.dtype == tf.resource]
    used = [item for item in objects if any(_is_any(handle, item) for handle in handles)]
    for handle in handles:
        if not any(_is_any(handle, item) for item in objects):
            raise ConfigError(
                "preprocessing_fn must create tables and variables so that they are tracked and saved",
                got=Plain("a table or variable that is not tracked"),
                fix="Create it with stoker.transform.make_and_track_object(lambda: ...).",
            )
    return used


def _is_any(handle: Any, item: Any) -> bool:
    """Whether a captured handle belongs to the object `item`, or to one of its submodules."""
    if isinstance(item, tf.Module):
        return any(_is_any(handle, part) for part in vars(item).values())
    return any(getattr(item, name, None) is handle for name in ("resource_handle", "handle"))
