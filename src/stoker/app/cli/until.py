"""The chain up to one stage, as the command line runs it."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.app.cli.tolerant import print_result
from stoker.app.resume import NEWEST, Resume


def run_until(
    stage: str,
    experiment: Path,
    overrides: list[str],
    *,
    again: bool,
    as_json: bool,
    resume: Resume = NEWEST,
) -> None:
    """Run the chain up to a stage, and print where its output lies.

    Args:
        stage: The last one.
        experiment: The folder with stoker.yaml.
        overrides: `key=value`, each overrides a setting.
        again: Do the last stage even where nothing has changed.
        as_json: Print its facts as JSON instead.
        resume: Which run is gone on with.
    """
    from stoker.app.chain import run_chain
    from stoker.app.cli.progress import ConsoleListener
    from stoker.app.experiment import load_experiment

    loaded = load_experiment(experiment, overrides=overrides)
    with ConsoleListener() as listener:
        result = run_chain(loaded, listener, until=stage, again=again, resume=resume)
    last = result.outcomes[-1]
    if as_json:
        facts = {"run": str(result.run), "output": str(last.output), "skipped": last.skipped}
        print_result(json.dumps(facts | last.result, indent=2))
    else:
        print_result(str(last.output))
