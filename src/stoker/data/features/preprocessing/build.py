"""Build the transform: run the analyzers on the training split, and save the graph with their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain
from stoker.core.files import hash_folder, publish_folder, scratch_folder, write_json
from stoker.core.multi_output import by_output
from stoker.data.dataset import Dataset
from stoker.data.features.engine import Progress, no_progress
from stoker.data.features.preprocessing.analysis_passes import (
    Resolved,
    describe_call,
    needed_columns,
    resolve,
)
from stoker.data.features.preprocessing.serving_graph import save_parts
from stoker.data.features.preprocessing.trace import VocabularyFile
from stoker.data.features.preprocessing.trace_function import (
    Plan,
    PreprocessingFn,
    TracedFunction,
)
from stoker.data.features.preprocessing.transform import (
    FILES,
    Transform,
    load_transform,
)
from stoker.data.features.spec import (
    SPEC,
    FeatureSpec,
    IdSpec,
    LabelSpec,
    TransformSpec,
    VocabularySpec,
    to_json,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnRoles:
    """Columns that are not features."""

    label_only: Sequence[str] = ()
    """Raw columns that serving will not have; a label that is a raw column is always one of them."""

    sample_weight: str | None = None
    """Weight of each row: an output of the function or, if no output has this name, a raw column."""


FEATURES_ONLY = ColumnRoles()


def build_transform(
    dataset: Dataset,
    preprocessing_fn: PreprocessingFn | None,
    out_dir: Path,
    *,
    label: str | Mapping[str, str] | None,
    roles: ColumnRoles = FEATURES_ONLY,
    progress: Progress = no_progress,
) -> Transform:
    """Run the analyzers of `preprocessing_fn` on the training split, and save the graph.

    Args:
        dataset: The dataset; the hash of each shard is checked before the shard is read.
        preprocessing_fn: Raw columns -> outputs, see `stoker.transform`; an image column arrives
            decoded, [batch, height, width, channels] uint8. None: every column becomes a feature
            unchanged, except the label and, if there are images, `path`.
        out_dir: Folder to create, with a single rename; it must be empty or missing.
        label: An output of the function or, if no output has this name, a raw column; for a model with
            several outputs, output -> label. A string becomes its index among the training split's
            sorted distinct strings.
        roles: Columns that are not features.
        progress: Called with the rows done in each pass.

    Returns:
        The transform, loaded from the written folder.

    Raises:
        ConfigError: the function raises or returns something unusable; the label is neither a
            column nor an output; a feature depends on a column that only the label may use.
        DataError: a shard is damaged, or the training split is empty.
        FileExistsError: `out_dir` is not empty.
    """
    sources = {} if label is None else by_output(label)
    labels = tuple(dict.fromkeys(sources.values()))
    plan = Plan(
        dataset=dataset,
        function=preprocessing_fn,
        labels=labels,
        label_only=_label_only(dataset, labels, roles.label_only),
        weights=() if roles.sample_weight is None else (roles.sample_weight,),
    )
    with scratch_folder(out_dir) as scratch:
        made = scratch / "transform"
        resolved = resolve(plan, scratch, progress)
        _require_features(plan, resolved.traced)
        spec = _describe(plan, resolved, sources)
        save_parts(plan, resolved, made)
        write_json(made / SPEC, to_json(spec))
        write_json(made / FILES, hash_folder(made))
        publish_folder(made, out_dir)
    return load_transform(out_dir)


def _label_only(dataset: Dataset, labels: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    columns = [column.name for column in dataset.columns]
    for name in names:
        if name not in columns:
            raise ConfigError(
                "label_only must name raw columns", got=name, fix=nearest(name, columns)
            )
    return tuple(dict.fromkeys([*names, *(label for label in labels if label in columns)]))


def _require_features(plan: Plan, traced: TracedFunction) -> None:
    if not traced.features:
        raise ConfigError(
            "a transform must have at least one feature besides the label",
            got=Plain("none"),
            fix="Return the model's inputs from preprocessing_fn.",
        )
    for name, tensor in traced.features.items():
        columns = {column.name for column in needed_columns(traced, [tensor], plan.dataset)}
        hidden = [column for column in plan.label_only if column in columns]
        if hidden:
            raise ConfigError(
                f"feature {name!r} must not depend on {hidden[0]!r}, which serving will not have",
                got=Plain(f"a feature computed from {', '.join(map(repr, sorted(columns)))}"),
                fix=f"Compute {name!r} from other columns, or remove {hidden[0]!r} from label_only "
                "if it is listed there.",
            )


def _describe(plan: Plan, resolved: Resolved, sources: Mapping[str, str]) -> TransformSpec:
    traced = resolved.traced
    outputs = traced.features | traced.labels
    domains = {name: traced.trace.domain(tensor) for name, tensor in outputs.items()}
    features, labels = list(traced.features.values()), list(traced.labels.values())
    weights = list(traced.weights.values())
    return TransformSpec(
        features=tuple(_feature(name, tensor) for name, tensor in traced.features.items()),
        labels={output: _label(resolved, name) for output, name in sources.items()},
        serving_columns=tuple(needed_columns(traced, features, plan.dataset)),
        label_columns=tuple(needed_columns(traced, labels, plan.dataset)),
        weight=next(iter(traced.weights), None),
        weight_columns=tuple(needed_columns(traced, weights, plan.dataset)),
        vocabularies={
            answer.name: VocabularySpec(
                file=f"assets/{answer.name}", terms=answer.terms, escaped=answer.escaped
            )
            for answer in resolved.answers
            if isinstance(answer, VocabularyFile)
        },
        ids={
            name: IdSpec(num_buckets=domain.num_buckets, vocabulary=domain.vocabulary)
            for name, domain in domains.items()
            if domain is not None
        },
        analyzers=tuple(
            describe_call(call, traced, answer)
            for call, answer in zip(traced.trace.calls, resolved.answers, strict=True)
        ),
    )


def _feature(name: str, tensor: tf.Tensor) -> FeatureSpec:
    return FeatureSpec(name=name, dtype=tensor.dtype.name, shape=tuple(tensor.shape[1:].as_list()))


def _label(resolved: Resolved, name: str) -> LabelSpec:
    traced = resolved.traced
    feature, call = _feature(name, traced.labels[name]), traced.classes_calls.get(name)
    classes = None if call is None else _class_names(resolved.answers[call])
    return LabelSpec(name=name, dtype=feature.dtype, shape=feature.shape, classes=classes)


def _class_names(classes: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(name.decode(errors="backslashreplace") for name in classes)
