"""The identity of a run, name by name: two runs with equal identities end with the same weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stoker.app.context import Context
from stoker.app.experiment import Experiment, data_fingerprint
from stoker.core.fingerprint import library_versions
from stoker.data.ingest import REACH_KEYS
from stoker.train.checkpoints.identity import Identity

if TYPE_CHECKING:
    from stoker.train.config import ResolvedTraining

WITHOUT_EFFECT = (
    "checkpoint",
    "divergence",
    "max_restarts",
    "memory",
    "metrics_host",
    "metrics_port",
    "metrics_textfile",
    "nan_budget",
    "tensorboard",
    "watchdog_s",
)
"""Settings of `train` that do not change weights: when to save, watch or stop."""


def run_identity(experiment: Experiment, *, source: str) -> Identity:
    """Return settings, code, source and versions of a whole run.

    Args:
        experiment: The experiment.
        source: Its `data_fingerprint`.
    """
    settings = experiment.to_json() | {"train": training_settings(experiment)}
    for place in ("runs", "folder", "push", "slo"):  # outputs, their receivers, objectives
        del settings[place]
    for key in REACH_KEYS:
        settings["data"].pop(key, None)
    if not pipeline_settings(experiment):
        # As in earlier versions, which did not have this section.
        settings["data"].pop("pipeline", None)
    return {
        "configuration": dict(_flat(settings)),
        "code": code_fingerprints(experiment),
        "data": {"source": source},
        "versions": library_versions(),
    }


def training_identity(context: Context, resolved: ResolvedTraining) -> Identity:
    """Return the part of the identity that changes weights, for checkpoints and for other workers.

    Args:
        context: With the stages before `train`.
        resolved: The value of every `auto`.
    """
    experiment = context.experiment
    became = asdict(resolved)
    if experiment.train.elastic is not None:
        # Which devices share the virtual workers does not change the weights.
        became |= {"strategy": "elastic", "replicas": "elastic"}
    settings = {
        name: f"auto: {became[name]}" if value == "auto" and name in became else value
        for name, value in training_settings(experiment).items()
    }
    labels = {"label": experiment.label, "label_only": list(experiment.label_only)}
    return {
        "configuration": dict(_flat(labels | {"train": settings} | pipeline_settings(experiment))),
        "code": code_fingerprints(experiment),
        "data": _data(context),
        "versions": library_versions(),
    }


def shared_settings(experiment: Experiment) -> dict[str, Any]:
    """Return every setting that all tasks of a cluster must share, by dotted name.

    Paths, and how the data is reached, may differ between tasks.

    Args:
        experiment: The settings of `stoker.yaml` and `--set`, without those of a lock file, which is
            for one machine.
    """
    settings = experiment.to_json()
    for place in ("runs", "models", "folder", "slo"):
        del settings[place]
    for key in REACH_KEYS:
        settings["data"].pop(key, None)
    if experiment.own_dataset is None:
        inside = f"{experiment.folder}{os.sep}"
        settings["data"]["source"] = settings["data"]["source"].removeprefix(inside)
    return dict(_flat(settings))


def training_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the section `train` as JSON values, without settings that do not change weights."""
    settings: dict[str, Any] = experiment.to_json()["train"]
    # How batches are prepared does not change them, except for the decoder of images.
    decoder = settings.pop("feed")["decoder"]
    named: dict[str, Any] = {} if decoder == "auto" else {"feed": {"decoder": decoder}}
    # Absent without it, as in earlier versions; the fewest workers change nothing.
    elastic = settings.pop("elastic")
    if elastic is not None:
        named["elastic"] = {"max": elastic["max"]}
    return {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT} | named


def pipeline_settings(experiment: Experiment) -> dict[str, Any]:
    """Return `data.pipeline` if it differs from its default, else nothing.

    A cache counts: if a dataset yields other batches in every pass, it changes the training.
    """
    own = experiment.own_dataset
    settings = {} if own is None else own.pipeline.differences
    return {"data.pipeline": settings} if settings else {}


def code_fingerprints(experiment: Experiment) -> dict[str, str]:
    """Return the fingerprint of each user function that training depends on, by `module:function`."""
    named = (experiment.model, experiment.preprocessing, experiment.train.callbacks)
    return {name: experiment.source_fingerprint(name) for name in named if name is not None}


def _data(context: Context) -> dict[str, str]:
    if context.experiment.own_dataset is not None:
        # The stages are those of the run, but each worker calls its own copy of the code.
        source = {"source": data_fingerprint(context.experiment)}
        return source | {stage: context.identities[stage] for stage in ("ingest", "analyze")}
    dataset = context.shards()
    return {
        column.name: dataset.fingerprint_of([column.name])
        for column in context.transform().columns
        if column.name in {known.name for known in dataset.columns}
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, item in value.items():
        if isinstance(item, Mapping):
            found += _flat(item, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", item))
    return found
