"""The table at the end of a run."""

from __future__ import annotations

import os
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stoker.app.chain import ChainResult, StageOutcome
from stoker.app.experiment import Experiment
from stoker.app.smoke_test import Proof
from stoker.cli.goodput import goodput_line
from stoker.evaluate.metrics import is_of_label
from stoker.measure.findings import shown_mfu
from stoker.measure.kernel_class import LABELS


def print_summary(
    console: Console,
    experiment: Experiment,
    target: Path,
    result: ChainResult,
    proof: Proof,
    *,
    overrides: Sequence[str] = (),
) -> None:
    """Stages, utilisation, metrics, gates, answers, and what to try next.

    Args:
        console: Where to.
        experiment: What was run.
        target: The experiment as the user named it, for the commands to try.
        result: What the chain did.
        proof: What the served model answered.
        overrides: What was set on the command line, for the commands to try.
    """
    console.print(_stages(experiment, result, proof))
    console.print()
    console.print(_facts(experiment, result, proof))
    console.print()
    console.print(_answers(proof))
    console.print("[bold]next, for example[/]")
    for command in _next_commands(experiment, target, result, overrides):
        # Not broken into lines: it is there to be copied.
        console.print(Text(f"  {command}"), soft_wrap=True)


def _stages(experiment: Experiment, result: ChainResult, proof: Proof) -> Table:
    table = Table(
        title=f"[bold]{escape(experiment.name)}[/] run {escape(_shown(result.run))}",
        title_justify="left",
        title_style="",
    )
    table.add_column("stage", style="bold")
    table.add_column("time", justify="right")
    table.add_column("what it wrote", overflow="fold")
    table.add_column("where", overflow="fold")
    for outcome in [*result.outcomes, proof.outcome]:
        took = "[dim]skipped[/]" if outcome.skipped else f"{outcome.took_s:.1f} s"
        where = _place(outcome, result.run)
        table.add_row(outcome.stage, took, escape(_wrote(outcome)), escape(where))
    return table


_REPORTS = {"analyze": "report.html", "evaluate": "report.html"}
"""Stage -> the file of its output that a person opens."""


def _place(outcome: StageOutcome, run: Path) -> str:
    place = outcome.output / _REPORTS.get(outcome.stage, "")
    relative = os.path.relpath(place, run)
    # Inside the runs' folder a place is told from the run, which the title names.
    return relative if relative.count("..") <= 1 else _shown(place)


def _facts(experiment: Experiment, result: ChainResult, proof: Proof) -> Table:
    train, evaluation = result.result("train"), result.result("evaluate")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("settings", escape(_settings(train["resolved"])))
    facts.add_row("utilisation", _utilisation(train))
    if (line := goodput_line(train)) is not None:
        facts.add_row("goodput", escape(line))
    if train.get("device_time"):
        facts.add_row("device time", escape(_device_time(train)))
    facts.add_row("metrics", _metrics(evaluation))
    for verdict in evaluation["verdicts"]:
        facts.add_row("gate", _verdict(verdict))
    if warnings := len(result.warnings):
        facts.add_row("warnings", escape(f"{warnings}, kept in {_shown(result.run / 'stages')}"))
    facts.add_row(
        "served",
        f"{escape(experiment.model_name)} version {proof.version} on 127.0.0.1: "
        "REST and gRPC gave the same answers",
    )
    return facts


def _settings(resolved: Mapping[str, Any]) -> str:
    """What each `auto` became that has a reason: `strategy one_device (no GPU)`."""
    return ", ".join(f"{name} {resolved[name]} ({why})" for name, why in resolved["why"].items())


def _wrote(outcome: StageOutcome) -> str:
    facts = outcome.result
    match outcome.stage:
        case "ingest":
            if not facts["rows"]:
                return f"{facts['columns']} tensors of your own dataset; nothing copied"
            rows = ", ".join(f"{count:,} {split}" for split, count in facts["rows"].items())
            bad = f", {facts['bad_rows']} bad rows left out" if facts["bad_rows"] else ""
            dropped = facts.get("copies_dropped")
            copies = f", {dropped:,} copies left out" if dropped else ""
            return f"{rows} rows{bad}{copies}"
        case "analyze":
            return f"statistics, schema, report; {len(facts['anomalies'])} anomalies"
        case "transform":
            return (
                f"{len(facts['serving_columns'])} raw columns -> {len(facts['features'])} features"
            )
        case "train":
            return (
                f"{facts['steps']:,} steps, {facts['parameters']:,} parameters, best epoch "
                + str(facts["best_epoch"])
            )
        case "export":
            return f"SavedModel, {len(facts['signatures'])} signatures, {facts['vetted_rows']} rows asked"
        case "evaluate":
            return f"evaluation of {facts['rows']:,} rows, report"
        case "push":
            return f"version {facts['version']}"
        case _:
            return f"{facts['rows']} rows answered by version {facts['version']}"


def _utilisation(train: Mapping[str, Any]) -> str:
    ceiling_s = train["ceiling_step_time_s"]
    free = "" if ceiling_s is None else f", {1e3 * ceiling_s:.2f} ms were the input free"
    return (
        f"U {_busy(train['busy_fraction'])}{_mfu(train)}, W {train['input_wait']:.1%} waiting for input; "
        f"{train['samples_per_s']:,.0f} samples/s, {1e3 * train['step_time_s']:.2f} ms a step{free}"
    )


def _mfu(train: Mapping[str, Any]) -> str:
    mfu = train.get("mfu")
    return "" if mfu is None else f", MFU {shown_mfu(mfu)} of the measured peak"


def _device_time(train: Mapping[str, Any]) -> str:
    """The kernel classes, the largest first, and the finding about them."""
    found = train["device_time"]
    shares = sorted(found["shares"].items(), key=lambda each: -each[1])
    parts = [f"{LABELS[name]} {share:.0%}" for name, share in shares if share >= LEAST_SHOWN]
    of_cpu = " (operations of the CPU)" if found["of_cpu"] else ""
    finding = train.get("device_finding")
    return ", ".join(parts) + of_cpu + ("" if finding is None else f". {finding['text']}")


LEAST_SHOWN = 0.005
"""Classes with a smaller share of the device time are left out."""

MEASURABLE = 1.05
"""A busy fraction above this says that the machine's noise was larger than what was measured."""


def _busy(fraction: float | None) -> str:
    if fraction is None:
        return "not measured with parameter servers"
    if fraction > MEASURABLE:
        return f"not measurable (noise: {fraction:.2f})"
    return f"{min(1.0, fraction):.0%} busy"


def _metrics(evaluation: Mapping[str, Any]) -> str:
    shown = [
        f"{name} {value:.4f}"
        if isinstance(value, float | int)
        else f"{name} undefined ({value['undefined']})"
        for name, value in evaluation["metrics"].items()
        if not is_of_label(name)
    ]
    single = len(evaluation["metrics"]) - len(shown)
    more = f", and {single} of single labels" if single else ""
    return f"{escape(', '.join(shown))}{more} on {evaluation['rows']:,} held-out rows"


def _verdict(verdict: Mapping[str, Any]) -> str:
    word = "[green]pass[/]" if verdict["passed"] else "[red]FAIL[/]"
    rule = f"{verdict['subject']} {verdict['rule']}"
    return f"{word}  {escape(rule)}: {escape(verdict['reason'])}"


def _answers(proof: Proof) -> Table:
    table = Table(title="what the served model answered", title_justify="left", title_style="bold")
    table.add_column("true label")
    table.add_column("REST")
    table.add_column("gRPC")
    for answer in proof.answers:
        table.add_row(escape(answer.truth), escape(answer.rest), escape(answer.grpc))
    return table


_LONGER = "train.epochs"
"""What the last command to try changes, and so is not set twice in it."""


def _next_commands(
    experiment: Experiment, target: Path, result: ChainResult, overrides: Sequence[str]
) -> list[str]:
    base = shlex.quote(_shown(experiment.models_root / experiment.model_name))
    name = urllib.parse.quote(experiment.model_name)
    kept = [given for given in overrides if not given.startswith(f"{_LONGER}=")]
    where = shlex.join([str(target), *(p for given in kept for p in ("--set", given))])
    return [
        f"stoker serve {base}    # then: curl localhost:8501/v1/models/{name}",
        f"tensorboard --logdir {shlex.quote(_shown(result.output('train')))}",
        f"stoker run {where} --set {_LONGER}={2 * experiment.train.epochs}",
    ]


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
