"""The chain up to one stage, as the command line runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.app.cli.tolerant import print_result
from stoker.app.resume import NEWEST, Resume

if TYPE_CHECKING:
    from stoker.app.context import Work
    from stoker.app.experiment import Experiment

Works = Callable[["Experiment", Callable[[str], None]], "Mapping[str, Work]"]
"""An experiment, and whom to tell a line -> stage -> what does its work instead."""


def as_usual(*_: object) -> Mapping[str, Work]:
    """Every stage does its own work."""
    return {}


def run_until(
    stage: str,
    experiment: Path,
    overrides: list[str],
    *,
    again: bool,
    as_json: bool,
    resume: Resume = NEWEST,
    works: Works = as_usual,
) -> None:
    """Run the chain up to a stage, and print where its output lies.

    Args:
        stage: The last one.
        experiment: The folder with stoker.yaml.
        overrides: `key=value`, each overrides a setting.
        again: Do the last stage even where nothing has changed.
        as_json: Print its facts as JSON instead.
        resume: Which run is gone on with.
        works: Which stages are worked on otherwise.
    """
    from stoker.app.chain import run_chain
    from stoker.app.cli.progress import ConsoleListener
    from stoker.app.locked import load_tuned

    loaded, locked = load_tuned(experiment, overrides=overrides)
    with ConsoleListener() as listener:
        if locked:
            listener.say(locked)
        result = run_chain(
            loaded,
            listener,
            until=stage,
            again=again,
            resume=resume,
            works=works(loaded, listener.say),
        )
    last = result.outcomes[-1]
    if as_json:
        facts = {"run": str(result.run), "output": str(last.output), "skipped": last.skipped}
        print_result(json.dumps(facts | last.result, indent=2))
    else:
        print_result(str(last.output))
