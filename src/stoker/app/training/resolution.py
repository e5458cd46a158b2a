"""Resolves every `auto` of the section `train`, once per run."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.app.context import Context
from stoker.app.stage_outputs import own_counts
from stoker.app.training.folder import CHECKPOINTS, RESOLVED
from stoker.cluster.devices import Devices
from stoker.cluster.resolver import ClusterSpec
from stoker.core.errors import Plain, UserError
from stoker.core.files import read_json, write_json
from stoker.data.ingest import IngestConfig
from stoker.train.checkpoints.store import places
from stoker.train.config import TEST_SWITCH, AutoInputs, ResolvedTraining, TrainConfig, resolve
from stoker.tune.lock import FILE as LOCK

if TYPE_CHECKING:
    from stoker.data.user_dataset.features import AnyTransform

AUTOS = ("batch_size", "steps_per_call", "precision", "xla", "strategy")
"""Settings that keep what they became, where they are still `auto`. What they decide (replicas,
learning rate) has to stay as it was."""


def resolve_once(folder: Path, config: TrainConfig, now: ResolvedTraining) -> ResolvedTraining:
    """Return and record the resolved settings: those of the start, if the run is continued.

    Args:
        folder: The folder of the stage.
        config: The user's section.
        now: What every `auto` would become on this machine.

    Raises:
        UserError: this machine does not have the devices that the run started with.
    """
    resolved = now
    if places(folder / CHECKPOINTS) and (folder / RESOLVED).is_file():
        before = ResolvedTraining(**read_json(folder / RESOLVED))
        _require_same_loop(before, now)
        if before.replicas != now.replicas and config.replicas == "auto":
            raise UserError(
                "a run goes on with as many replicas as it began with",
                got=Plain(
                    f"{now.replicas} here ({now.why['strategy']}); it began with {before.replicas} "
                    f"({before.why['strategy']})"
                ),
                fix="Go on where there are as many devices, or train in a new run.",
            )
        kept = {name: getattr(before, name) for name in AUTOS if getattr(config, name) == "auto"}
        if "xla" in kept:
            kept["xla_trial"] = before.xla_trial
        resolved = replace(now, **kept, why=before.why)
    write_json(folder / RESOLVED, asdict(resolved))
    return resolved


def _require_same_loop(before: ResolvedTraining, now: ResolvedTraining) -> None:
    """With parameter servers steps come in no order: it leaves other checkpoints than without."""
    served = "parameter_server"
    if (before.strategy == served) != (now.strategy == served):
        raise UserError(
            "a run goes on with parameter servers where it began with them, and only there",
            got=Plain(f"{now.strategy} here; it began with {before.strategy}"),
            fix="Go on with `--workers` and `--parameter-servers` as before, or train in a new run.",
        )


def resolve_here(
    context: Context, transform: AnyTransform, devices: Devices, cluster: ClusterSpec | None
) -> ResolvedTraining:
    """Resolve every `auto` for this machine.

    Args:
        context: The experiment, and the earlier stages.
        transform: The features.
        devices: The devices of this machine.
        cluster: The content of TF_CONFIG, or None.

    Raises:
        ConfigError: the settings do not fit the data or the cluster.
    """
    settings, data = context.experiment.train, context.experiment.data
    config = context.experiment.own_dataset
    own = config is not None
    if config is not None:
        # One step processes one batch of the user's dataset, whatever its size.
        count = own_counts(config, analysis=context.results["analyze"])["train"]
        settings = replace(settings, batch_size=count.batch_size)
        rows = count.batches * count.batch_size
    else:
        rows = context.shards().rows("train")
    resolved = resolve(
        settings,
        AutoInputs(
            devices=devices,
            rows=rows,
            string_features=any(feature.dtype == "string" for feature in transform.features),
            workers=1 if cluster is None else max(1, cluster.trainers),
            parameter_servers=0 if cluster is None else len(cluster.servers),
            batches_from_elsewhere=own
            or (isinstance(data, IngestConfig) and data.service is not None),
            tuned=(context.experiment.folder / LOCK).is_file(),
            tries_xla_on_cpu=TEST_SWITCH in os.environ,
        ),
    )
    if not own:
        return resolved
    parts = resolved.replicas * resolved.accumulate
    return replace(resolved, batch_size=-(-resolved.batch_size // parts))
