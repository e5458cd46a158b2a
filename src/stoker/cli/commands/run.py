"""`stoker run`: the whole chain, then a served model that answers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from stoker.app.runs.resume import Resume
from stoker.cli.options import (
    AcceptChange,
    AsJson,
    ExperimentFolder,
    Gpus,
    Overrides,
    ResumeRun,
    use_gpus,
)
from stoker.cli.run_stages import joins, with_others
from stoker.cli.stdout import print_result, tolerant


def run(
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    resume: ResumeRun = None,
    accept_change: AcceptChange = False,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Data to served model: every stage that has changed, then a server that is asked.

    A killed run goes on where it was; stages whose inputs have not changed are skipped.
    """
    use_gpus(gpus)
    from rich.console import Console

    from stoker.app.chain import run_chain
    from stoker.app.experiment import load_experiment
    from stoker.app.import_tensorflow import import_tensorflow
    from stoker.app.tuned_settings import load_tuned
    from stoker.cli.progress import ConsoleListener
    from stoker.telemetry.wall_time import WallTime

    wall = WallTime.of_process()
    asked = load_experiment(experiment, overrides=overrides)
    loaded, locked = load_tuned(experiment, overrides=overrides)
    with ConsoleListener() as listener:
        if locked:
            listener.say(locked)
        if loaded.resources.accelerators is not None:
            listener.say("resources are for a cluster: this run uses this machine")
        if joins(asked, listener.say):
            return
        which = Resume(run=resume, accept_change=accept_change)
        with with_others(asked, listener.say) as works:
            result = run_chain(loaded, listener, resume=which, works=works, wall=wall)
        listener.stage_began("serve")
        import_tensorflow()
        from stoker.app.smoke_test import prove_run
        from stoker.cli.summary import print_summary

        proof = prove_run(loaded, result)
        listener.stage_ended(proof.outcome)
    if as_json:
        outcomes = [*result.outcomes, proof.outcome]
        facts = [
            {"stage": o.stage, "skipped": o.skipped, "took_s": o.took_s, "output": str(o.output)}
            | {"result": o.result}
            for o in outcomes
        ]
        answers = [asdict(answer) for answer in proof.answers]
        print_result(
            json.dumps({"run": str(result.run), "stages": facts, "answers": answers}, indent=2)
        )
    else:
        console = Console(file=tolerant(sys.stdout), highlight=False)
        print_summary(console, loaded, experiment, result, proof, overrides=overrides)
