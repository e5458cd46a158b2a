"""What a run is, name by name: two that differ in nothing here end in the same weights."""

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
    "nan_budget",
    "tensorboard",
    "watchdog_s",
)
"""Settings of `train` that change no weight: when it is saved, watched or given up."""


def run_identity(experiment: Experiment, *, source: str) -> Identity:
    """Settings, code, source and versions of a whole run.

    Args:
        experiment: The experiment.
        source: `data_fingerprint` of it.
    """
    settings = experiment.to_json() | {"train": training_settings(experiment)}
    for place in ("runs", "folder"):
        del settings[place]
    for key in REACH_KEYS:
        settings["data"].pop(key, None)
    if not pipeline_settings(experiment):
        # The same as before there was such a section.
        settings["data"].pop("pipeline", None)
    return {
        "configuration": dict(_flat(settings)),
        "code": code_fingerprints(experiment),
        "data": {"source": source},
        "versions": library_versions(),
    }


def training_identity(context: Context, resolved: ResolvedTraining) -> Identity:
    """The part of it that changes the weights, as a checkpoint and the other workers know it.

    Args:
        context: With the stages before `train`.
        resolved: What the `auto`s have become.
    """
    experiment = context.experiment
    became = asdict(resolved)
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


def asked_settings(experiment: Experiment) -> dict[str, Any]:
    """Every setting that the tasks of a cluster must be started with alike, by dotted name.

    Each may see the folder elsewhere, and reach the data in its own way: that is left out.

    Args:
        experiment: As `stoker.yaml` and `--set` say it, without what a lock file adds: that is of
            one machine.
    """
    settings = experiment.to_json()
    for place in ("runs", "models", "folder"):
        del settings[place]
    for key in REACH_KEYS:
        settings["data"].pop(key, None)
    if experiment.own_dataset is None:
        inside = f"{experiment.folder}{os.sep}"
        settings["data"]["source"] = settings["data"]["source"].removeprefix(inside)
    return dict(_flat(settings))


def training_settings(experiment: Experiment) -> dict[str, Any]:
    """The section `train`, JSON values, without what changes no weight."""
    settings: dict[str, Any] = experiment.to_json()["train"]
    # How batches are made ready changes none of them, but for what decodes images.
    decoder = settings.pop("feed")["decoder"]
    named = {} if decoder == "auto" else {"feed": {"decoder": decoder}}
    return {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT} | named


def pipeline_settings(experiment: Experiment) -> dict[str, Any]:
    """`data.pipeline` where it asks for something, else nothing.

    A cache too: where a dataset gives other batches in every pass, training with it is another one.
    """
    own = experiment.own_dataset
    asked = {} if own is None else own.pipeline.differences
    return {"data.pipeline": asked} if asked else {}


def code_fingerprints(experiment: Experiment) -> dict[str, str]:
    """`module:function` of the user's that training depends on -> its fingerprint."""
    named = (experiment.model, experiment.preprocessing, experiment.train.callbacks)
    return {name: experiment.source_fingerprint(name) for name in named if name is not None}


def _data(context: Context) -> dict[str, str]:
    if context.experiment.own_dataset is not None:
        # The stages are those of the run, but each worker calls the code that it has itself.
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
