"""Creates the source with the user's function `data.prepare`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from stoker.app.experiment import Experiment
from stoker.core.errors import ConfigError, Plain
from stoker.core.files import alone, scratch_folder, sweep
from stoker.core.user_code import call, load_function


class Log(Protocol):
    """Receives lines for the user."""

    def log(self, line: str) -> None:
        """Show a line permanently."""


def prepare_source(experiment: Experiment, listener: Log) -> None:
    """Call `data.prepare(path)` if the source does not exist yet.

    Raises:
        ConfigError: the function failed, or did not create the source.
    """
    if experiment.own_dataset is not None:
        return
    source, reference = experiment.files.source, experiment.files.prepare
    if reference is None or Path(source).exists():
        return
    if experiment.folder.resolve() not in Path(source).resolve().parents:
        # A missing path outside the experiment folder is a typo; do not write there.
        return
    made = Path(source)
    with alone(made.parent / f".{made.name}.lock"):
        if made.exists():
            return
        listener.log(f"{source} is not there yet: made by {reference}")
        prepare = load_function(experiment.folder, reference, where="data.prepare")
        sweep(made.parent, made.name)
        with scratch_folder(made) as scratch:
            target = scratch / made.name
            call(prepare, target, what=reference)
            if not target.exists():
                raise ConfigError(
                    f"{reference} must write the path that it is given",
                    got=Plain(f"nothing at {target}"),
                )
            os.rename(target, made)
