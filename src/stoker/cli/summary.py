"""The tables at the end of `stoker run` and of `stoker train --dry-run`."""

from __future__ import annotations

import json
import os
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from stoker.app.chain import ChainResult, StageOutcome, results_by_stage
from stoker.app.context import EvaluateResult, IngestResult, StageResults, TrainingResult
from stoker.app.dry_run import DryRunResult, Steps
from stoker.app.experiment import Experiment
from stoker.app.smoke_test import SmokeTest
from stoker.cli.progress import counted, goodput_line
from stoker.evaluate.metrics import is_of_label
from stoker.measure.findings import shown_busy, shown_mfu
from stoker.measure.kernel_class import LABELS


def print_summary(
    console: Console,
    experiment: Experiment,
    target: Path,
    result: ChainResult,
    tested: SmokeTest,
    *,
    overrides: Sequence[str] = (),
) -> None:
    """Print stages, utilization, metrics, gates, the server's answers, and commands to try next.

    Args:
        console: Prints the tables.
        experiment: The experiment.
        target: Path of the experiment as the user typed it, for the commands.
        result: Result of the chain.
        tested: Result of the smoke test.
        overrides: `--set` options of the user, for the commands.
    """
    console.print(_stages(experiment, result, tested))
    console.print()
    console.print(_facts(experiment, result, tested))
    console.print()
    console.print(_answers(tested))
    console.print("[bold]next, for example[/]")
    for command in _next_commands(experiment, target, result, tested, overrides):
        # Without line breaks, so that the user can copy it.
        console.print(Text(f"  {command}"), soft_wrap=True)


def _stages(experiment: Experiment, result: ChainResult, tested: SmokeTest) -> Table:
    table = Table(
        Column("stage", style="bold"),
        Column("time", justify="right"),
        Column("what it wrote", overflow="fold"),
        Column("where", overflow="fold"),
        title=f"[bold]{escape(experiment.name)}[/] run {escape(_shown(result.run))}",
        title_justify="left",
        title_style="",
    )
    outcomes = [*result.outcomes, tested.outcome]
    results = results_by_stage(outcomes)
    for outcome in outcomes:
        took = "[dim]skipped[/]" if outcome.skipped else f"{outcome.took_s:.1f} s"
        where = _place(outcome, result.run)
        table.add_row(outcome.stage, took, escape(_wrote(outcome.stage, results)), escape(where))
    return table


_REPORTS = {"analyze": "report.html", "evaluate": "report.html"}
"""Stage -> file of its output that the user may want to open."""


def _place(outcome: StageOutcome, run: Path) -> str:
    place = outcome.output / _REPORTS.get(outcome.stage, "")
    relative = os.path.relpath(place, run)
    # A path inside the folder of runs is shown relative to the run, which the title names.
    return relative if relative.count("..") <= 1 else _shown(place)


def _facts(experiment: Experiment, result: ChainResult, tested: SmokeTest) -> Table:
    train, evaluation = result.results["train"], result.results["evaluate"]
    facts = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    facts.add_row("settings", escape(_settings(train["resolved"])))
    facts.add_row("utilization", _utilization(train))
    if (line := goodput_line(train)) is not None:
        facts.add_row("goodput", escape(line))
    if device := train["device_time"]:
        facts.add_row("device time", escape(_device_time(device, train.get("device_finding"))))
    facts.add_row("metrics", _metrics(evaluation))
    for verdict in evaluation["verdicts"]:
        facts.add_row("gate", _verdict(verdict))
    if warnings := len(result.warnings):
        facts.add_row("warnings", escape(f"{warnings}, kept in {_shown(result.run / 'stages')}"))
    facts.add_row(
        "served",
        f"{escape(experiment.model_name)} version {tested.version} on 127.0.0.1: "
        "REST and gRPC gave the same answers",
    )
    return facts


def _settings(resolved: Mapping[str, Any]) -> str:
    """Return the value chosen for each setting `auto`, with the reason: `strategy one_device (no GPU)`."""
    return ", ".join(f"{name} {resolved[name]} ({why})" for name, why in resolved["why"].items())


def _wrote(stage: str, results: StageResults) -> str:
    """Describe in a few words what a stage wrote."""
    match stage:
        case "ingest":
            return _ingested(results["ingest"])
        case "analyze":
            found = len(results["analyze"]["anomalies"])
            return (
                f"statistics, schema, report; {'1 anomaly' if found == 1 else f'{found} anomalies'}"
            )
        case "transform":
            transform = results["transform"]
            columns, features = transform["serving_columns"], transform["features"]
            return f"{counted(len(columns), 'raw column')} -> {counted(len(features), 'feature')}"
        case "train":
            train = results["train"]
            return (
                f"{train['steps']:,} steps, {train['parameters']:,} parameters, best epoch "
                f"{train['best_epoch']}"
            )
        case "export":
            export = results["export"]
            signatures, rows = len(export["signatures"]), export["vetted_rows"]
            return f"SavedModel, {signatures} signatures, {rows} rows checked"
        case "evaluate":
            return f"evaluation of {counted(results['evaluate']['rows'], 'row')}, report"
        case "push":
            return f"version {results['push']['version']}"
        case _:
            serve = results["serve"]
            return f"{counted(serve['rows'], 'row')} answered by version {serve['version']}"


def _ingested(ingest: IngestResult) -> str:
    if not ingest["rows"]:
        return f"{ingest['columns']} tensors of your own dataset; nothing copied"
    rows = ", ".join(f"{count:,} {split}" for split, count in ingest["rows"].items())
    bad = f", {counted(ingest['bad_rows'], 'bad row')} left out" if ingest["bad_rows"] else ""
    dropped = ingest.get("copies_dropped")
    copies = f", {counted(dropped, 'duplicate row')} left out" if dropped else ""
    return f"{rows} rows{bad}{copies}"


def _utilization(train: TrainingResult) -> str:
    ceiling_s = train["ceiling_step_time_s"]
    free = "" if ceiling_s is None else f", {1e3 * ceiling_s:.2f} ms without the time for input"
    return (
        f"U {shown_busy(train['busy_fraction'])}{_mfu(train)}, W {train['input_wait']:.1%} waiting for input; "
        f"{train['samples_per_s']:,.0f} samples/s, {1e3 * train['step_time_s']:.2f} ms a step{free}"
    )


def _mfu(train: TrainingResult) -> str:
    mfu = train.get("mfu")
    return "" if mfu is None else f", MFU {shown_mfu(mfu)} of the measured peak"


def _device_time(found: Mapping[str, Any], finding: Mapping[str, Any] | None) -> str:
    """Return the shares of the kernel classes, the largest first, and the finding about them."""
    shares = sorted(found["shares"].items(), key=lambda each: -each[1])
    parts = [f"{LABELS[name]} {share:.0%}" for name, share in shares if share >= MIN_SHOWN]
    of_cpu = " (operations of the CPU)" if found["of_cpu"] else ""
    return ", ".join(parts) + of_cpu + ("" if finding is None else f". {finding['text']}")


MIN_SHOWN = 0.005
"""Classes with a smaller share of the device time are left out."""


def _metrics(evaluation: EvaluateResult) -> str:
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


def _titled(title: str, *columns: Column | str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold")


def _answers(tested: SmokeTest) -> Table:
    table = _titled("what the served model answered", "true label", "REST", "gRPC")
    for answer in tested.answers:
        table.add_row(escape(answer.truth), escape(answer.rest), escape(answer.grpc))
    return table


_MAX_BODY = 300
"""Maximum length of a request in a suggested command, characters; an image is longer and is not shown."""

_LONGER = "train.epochs"
"""Setting that the last suggested command changes; the user's own `--set` of this setting is not repeated."""


def _next_commands(
    experiment: Experiment,
    target: Path,
    result: ChainResult,
    tested: SmokeTest,
    overrides: Sequence[str],
) -> list[str]:
    base = shlex.quote(_shown(experiment.models_root / experiment.model_name))
    model = f"localhost:8501/v1/models/{urllib.parse.quote(experiment.model_name)}"
    row = {
        name: float(f"{value:.7g}") if isinstance(value, float) else value  # digits of a float32
        for name, value in tested.rest_row.items()
    }
    body = json.dumps({"instances": [row]}, ensure_ascii=False)
    if len(body) <= _MAX_BODY:
        model = f"-d {shlex.quote(body)} {model}:predict"
    kept = [given for given in overrides if not given.startswith(f"{_LONGER}=")]
    where = shlex.join([str(target), *(p for given in kept for p in ("--set", given))])
    return [
        f"stoker serve {base}    # then: curl {model}",
        f"tensorboard --logdir {shlex.quote(_shown(result.output('train')))}",
        f"stoker run {where} --set {_LONGER}={2 * experiment.train.epochs}",
    ]


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def print_dry_run(console: Console, rehearsal: DryRunResult) -> None:
    """Print settings, device placement, memory, and that the exported, untrained model has answered a row."""
    steps, served = rehearsal.steps, rehearsal.served
    console.print(_dry_run_facts(steps))
    console.print()
    console.print(_placement(steps))
    console.print()
    console.print(_memory(steps))
    console.print()
    signatures = " and ".join(served.signatures)
    console.print(
        f"served: untrained, {shown_bytes(served.size_bytes)} on the disk, one row answered by "
        f"{escape(signatures)}: {escape(', '.join(served.outputs))}",
        soft_wrap=True,
    )


def _dry_run_facts(steps: Steps) -> Table:
    resolved = steps.resolved
    facts = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    replicas = f"{resolved.replicas} replica{'s' * (resolved.replicas > 1)}"
    facts.add_row("strategy", f"{resolved.strategy}, {replicas}: {resolved.why['strategy']}")
    facts.add_row(
        "batch",
        f"{resolved.batch_size} x {resolved.accumulate} passes x {replicas} = "
        f"{resolved.global_batch} samples a step",
    )
    trial = ", tried while the run trains" if resolved.xla_trial else ""
    facts.add_row(
        "precision", f"{resolved.precision}, XLA {'on' if resolved.xla else 'off'}{trial}"
    )
    first, second = steps.losses
    facts.add_row(
        "two steps",
        f"loss {first:.4g}, {second:.4g}; {steps.first_step_s:.1f} s to compile and run the first, "
        f"{1e3 * steps.second_step_s:.3g} ms the second",
    )
    return facts


def _placement(steps: Steps) -> Table:
    numbers = [Column(name, justify="right") for name in ("variables", "bytes", "operations")]
    kinds = Column("most frequent", overflow="fold")
    table = _titled("device placement", "device", *numbers, kinds)
    for placed in steps.placed:
        table.add_row(
            escape(placed.device),
            f"{placed.variables:,}",
            shown_bytes(placed.variables_bytes),
            f"{placed.operations:,}",
            escape(", ".join(placed.kinds)),
        )
    return table


def _memory(steps: Steps) -> Table:
    footprint = steps.footprint
    size, details = Column("bytes", justify="right"), Column("details", overflow="fold")
    table = _titled("memory of a replica", "what", size, details)
    fixed = footprint.parameters - footprint.trainable
    numbers = f"{footprint.trainable:,} trainable parameters, {fixed:,} not trainable"
    table.add_row("weights", shown_bytes(footprint.weights_bytes), numbers)
    table.add_row("gradients", shown_bytes(footprint.gradients_bytes), "")
    table.add_row("optimizer", shown_bytes(footprint.optimizer_bytes), "")
    largest = ", ".join(f"{name} {shown_bytes(size)}" for name, size in footprint.largest[:3])
    estimate = shown_bytes(footprint.activations_bytes)
    table.add_row("activations (estimate)", estimate, escape(largest))
    table.add_row("total", shown_bytes(footprint.total_bytes), "")
    for device, peak in steps.peak_bytes.items():
        table.add_row(f"{device}: TensorFlow's peak", shown_bytes(peak), "")
    return table


def shown_bytes(size: float) -> str:
    """Return a size as text: `512 B`, `1.5 KiB`, `20.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
