"""The identity of a run, as a dict of its inputs.

Two runs with equal identities are the same training; on a GPU, their weights may still differ.
"""

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
"""Settings of `train` that do not change weights, such as when to save or what to report."""


def run_identity(experiment: Experiment, *, source: str) -> Identity:
    """Return the identity of a whole run: settings, code, source and library versions.

    Args:
        experiment: The experiment.
        source: The experiment's `data_fingerprint`.
    """
    settings = experiment.to_json() | {"train": training_settings(experiment)}
    for place in ("runs", "folder", "push", "slo"):  # none of these changes an output
        del settings[place]
    for key in REACH_KEYS:
        settings["data"].pop(key, None)
    if not pipeline_settings(experiment):
        # Left out if it is the default, to keep the fingerprints of earlier versions, which lack this section.
        settings["data"].pop("pipeline", None)
    return {
        "configuration": dict(_flat(settings)),
        "code": code_fingerprints(experiment),
        "data": {"source": source},
        "versions": library_versions(),
    }


def training_identity(context: Context, resolved: ResolvedTraining) -> Identity:
    """Return the part of the identity that can change weights, to compare with checkpoints and other workers.

    Args:
        context: The experiment, with the results of the stages before `train`.
        resolved: The value of every `auto`.
    """
    experiment = context.experiment
    became = asdict(resolved)
    if experiment.train.elastic is not None:
        # The assignment of virtual workers to devices does not change the weights.
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

    Paths, and the way to reach the data, may differ between tasks.

    Args:
        experiment: The settings of `stoker.yaml` and `--set`, without the settings of a lock file, which is for
            one machine.
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
    # The settings of `feed` do not change weights, except for the decoder of images.
    decoder = settings.pop("feed")["decoder"]
    named: dict[str, Any] = {} if decoder == "auto" else {"feed": {"decoder": decoder}}
    # Left out if `elastic` is not set, to keep the fingerprints of earlier versions. `elastic.min` does not change
    # weights.
    elastic = settings.pop("elastic")
    if elastic is not None:
        named["elastic"] = {"max": elastic["max"]}
    return {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT} | named


def pipeline_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings of `data.pipeline` that differ from their defaults, to add to an identity.

    `cache` is among them, because it changes the training if a dataset yields other batches in every pass.
    """
    own = experiment.own_dataset
    settings = {} if own is None else own.pipeline.differences
    return {"data.pipeline": settings} if settings else {}


def code_fingerprints(experiment: Experiment) -> dict[str, str]:
    """Return `module:function` -> fingerprint, for each user function that training depends on."""
    named = (experiment.model, experiment.preprocessing, experiment.train.callbacks)
    return {name: experiment.source_fingerprint(name) for name in named if name is not None}


def _data(context: Context) -> dict[str, str]:
    if context.experiment.own_dataset is not None:
        # Stages are compared by identity, because all workers read the same outputs. The code is fingerprinted here,
        # because each worker calls its own copy.
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
