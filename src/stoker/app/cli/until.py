"""The chain up to one stage, as the command line runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.app.cli.tolerant import print_result
from stoker.app.resume import NEWEST, Resume

if TYPE_CHECKING:
    from stoker.app.chain import ChainResult
    from stoker.app.context import Work
    from stoker.app.experiment import Experiment

Works = Callable[["Experiment", Callable[[str], None]], "Mapping[str, Work]"]
"""An experiment, and whom to tell a line -> stage -> what does its work instead."""


def as_usual(experiment: Experiment, say: Callable[[str], None]) -> Mapping[str, Work]:
    """Every stage does its own work; training with others, where `TF_CONFIG` names them."""
    from stoker.app.joined import on_cluster, task_of

    cluster = task_of(os.environ)
    return {} if cluster is None else on_cluster(experiment, cluster, say)


def joins(experiment: Experiment, say: Callable[[str], None]) -> bool:
    """Train with others where `TF_CONFIG` says that another process leads; whether it does.

    Args:
        experiment: What is trained.
        say: Takes lines for a person.
    """
    from stoker.app.joined import join, task_of

    cluster = task_of(os.environ)
    if cluster is None or cluster.leads:
        return False
    join(experiment, cluster, say)
    return True


def let_others_go(experiment: Experiment, result: ChainResult) -> None:
    """Where this process leads, and the model was trained already: the others wait in vain.

    Args:
        experiment: What was to be trained.
        result: Of the chain.
    """
    from stoker.app.joined import let_go, task_of

    cluster = task_of(os.environ)
    trained = next((each for each in result.outcomes if each.stage == "train"), None)
    if cluster is not None and trained is not None and trained.skipped:
        let_go(experiment, cluster)


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
        trains = _trains(stage)
        together = trains and works is as_usual
        if together and joins(loaded, listener.say):
            return
        result = run_chain(
            loaded,
            listener,
            until=stage,
            again=again,
            resume=resume,
            works=works(loaded, listener.say) if trains else {},
        )
        if together:
            let_others_go(loaded, result)
    last = result.outcomes[-1]
    if as_json:
        facts = {"run": str(result.run), "output": str(last.output), "skipped": last.skipped}
        print_result(json.dumps(facts | last.result, indent=2))
    else:
        print_result(str(last.output))


def _trains(stage: str) -> bool:
    """Whether the chain up to a stage trains."""
    from stoker.app.stages import STAGES

    names = [each.name for each in STAGES]
    return names.index(stage) >= names.index("train")
