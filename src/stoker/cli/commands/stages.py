"""`stoker ingest|analyze|train|export|evaluate|push`: the chain up to one stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stoker.cli.commands.train import train
from stoker.cli.options import Again, AsJson, ExperimentFolder, Gpus, Overrides, use_gpus
from stoker.cli.run_stages import run_until

_HELP = {
    "ingest": "Read the source, check every record, write shards split into train and eval.",
    "analyze": "Statistics, schema, anomalies and an HTML report of the ingested data.",
    "transform": "Run the analyzers of preprocessing_fn over the training split, save its graph.",
    "export": "Write the best model as a SavedModel that takes raw features, and check it.",
    "evaluate": "Measure the SavedModel on the eval split; exit with 3 if a gate fails.",
    "push": "Publish the model as the next version of the repository.",
}


def _command(stage: str) -> Callable[..., None]:
    def command(
        experiment: ExperimentFolder = Path(),
        overrides: Overrides = [],  # noqa: B006 - typer copies it
        again: Again = False,
        gpus: Gpus = None,
        as_json: AsJson = False,
    ) -> None:
        use_gpus(gpus)
        run_until(stage, experiment, overrides, again=again, as_json=as_json)

    command.__doc__ = f"{_HELP[stage]}\n\nEarlier stages run first if their inputs have changed."
    return command


COMMANDS = {
    **{stage: _command(stage) for stage in ("ingest", "analyze", "transform")},
    "train": train,
    **{stage: _command(stage) for stage in ("export", "evaluate", "push")},
}
"""Verb -> its command, in the chain's order."""
