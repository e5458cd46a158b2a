"""`stoker run`: the whole chain, then a smoke test of the served model."""

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
from stoker.cli.run_stages import coordinated, trained_as_worker
from stoker.cli.stdout import print_result, tolerant


def run(
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    resume: ResumeRun = None,
    accept_change: AcceptChange = False,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Run every stage whose inputs have changed, then serve the model and call it.

    A killed run continues where it stopped; stages with unchanged inputs are skipped.
    """
    use_gpus(gpus)
    from rich.console import Console

    from stoker.app.chain import run_chain
    from stoker.app.import_tensorflow import import_tensorflow
    from stoker.app.tuned_settings import load_tuned
    from stoker.cli.progress import ConsoleListener
    from stoker.telemetry.wall_time import WallTime

    wall = WallTime.of_process()
    loaded = load_tuned(experiment, overrides=overrides)
    with ConsoleListener(loaded.lock_note) as listener:
        if loaded.used.resources.accelerators is not None:
            listener.log("The section resources is for a cluster; this run uses this machine.")
        if trained_as_worker(loaded.asked, listener.log):
            return
        which = Resume(run=resume, accept_change=accept_change)
        with coordinated(loaded.asked, listener.log) as works:
            result = run_chain(loaded.used, listener, resume=which, works=works, wall=wall)
        listener.stage_began("serve")
        import_tensorflow()
        from stoker.app.smoke_test import prove_run
        from stoker.cli.summary import print_summary

        proof = prove_run(loaded.used, result)
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
        print_summary(console, loaded.used, experiment, result, proof, overrides=overrides)
