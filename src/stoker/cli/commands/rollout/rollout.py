"""`stoker rollout`: moves the traffic of a model to another version, and runs A/B tests."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.commands.rollout import ab
from stoker.cli.commands.rollout.export import export
from stoker.cli.commands.rollout.follow import follow
from stoker.cli.commands.rollout.shown import lines_of, show, status_of, summary
from stoker.cli.options import AsJson

if TYPE_CHECKING:
    from stoker.rollout.operations import ModelRollouts

app = typer.Typer(
    help="Move traffic to a new version step by step, or roll back.",
    no_args_is_help=True,
)
app.command()(export)

Model = Annotated[str, typer.Argument(help="The model's name in the repository.")]
Version = Annotated[int, typer.Argument(min=0, help="The version.")]
Models = Annotated[
    Path, typer.Option("--models", help="The model repository: <model>/<version>/ folders.")
]
Why = Annotated[str, typer.Option("--why", help="Reason to record in the history.")]
MODELS = Path("models")


@app.command()
def start(
    model: Model,
    version: Version,
    models: Models = MODELS,
    canary: Annotated[
        str,
        typer.Option(
            "--canary",
            metavar="STAGES",
            help="Percentages of the traffic, optionally with a time instead of --step-time: 1,10:20m,50,100. "
            "The stage `pause` waits for `stoker rollout resume`. The first stage may be header=NAME, which takes "
            "requests with this header, or shadow or shadow=PERCENT, which copies requests and compares the answers.",
        ),
    ] = "1,10,50,100",
    step_time: Annotated[
        str, typer.Option("--step-time", help="Minimum time of a stage, e.g. 30s, 5m, 2h.")
    ] = "5m",
    min_requests: Annotated[
        int,
        typer.Option(
            "--min-requests",
            min=0,
            help="Minimum number of requests that the version answers before a stage ends.",
        ),
    ] = 500,
    warm_up: Annotated[
        str,
        typer.Option(
            "--warm-up",
            help="Time at the start of a stage in which latency is not judged; added to the stage's time.",
        ),
    ] = "30s",
    bake: Annotated[
        str,
        typer.Option("--bake", help="Time after 100 % during which the gates can still roll back."),
    ] = "0s",
    key: Annotated[
        str,
        typer.Option(
            "--key",
            help="Header, gRPC metadata key or cookie:NAME that identifies a user, who then keeps a version. "
            "Default: a version is chosen for each request.",
        ),
    ] = "",
    max_shift: Annotated[
        float,
        typer.Option(
            "--max-shift",
            help="Largest accepted Kolmogorov distance between the versions' predictions, 0 to 1.",
        ),
    ] = 0.2,
    allowed_ratio: Annotated[
        float,
        typer.Option(
            "--allowed-ratio",
            help="Bad or slow answers per bad or slow answer of the baseline that still count as not worse.",
        ),
    ] = 1.25,
    shadow_tolerance: Annotated[
        float,
        typer.Option(
            "--shadow-tolerance",
            help="In a shadow stage, numbers are equal if they differ by at most this times the larger of 1 and the baseline's number.",
        ),
    ] = 1e-3,
    dry_run: Annotated[
        list[str] | None,
        typer.Option(
            "--dry-run", metavar="GATE", help="Measure and show this gate, but do not act on it."
        ),
    ] = None,
    keep_previous: Annotated[
        str,
        typer.Option(
            "--keep-previous", help="Time after 100 % during which the baseline stays loaded."
        ),
    ] = "30m",
    server_memory: ab.ServerMemory = 0.0,
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="REST address of a server that cannot write to the repository: its counts are fetched. May be repeated.",
        ),
    ] = None,
    gates: Annotated[
        Path | None,
        typer.Option(
            "--gates",
            help="YAML file with gates of your own: Prometheus queries, Python functions.",
        ),
    ] = None,
    webhook: Annotated[
        list[str] | None,
        typer.Option(
            "--webhook",
            metavar="[MOMENT,...=]URL",
            help="URL that gets a POST before each stage (stage), before the stage with all traffic (promotion), before "
            "the rollout is completed (end), and after a rollback (rollback). The rollout waits for a 2xx response, except "
            "after a rollback. Default: all four moments.",
        ),
    ] = None,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            metavar="URL",
            help="URL that gets each change as a message in Slack's format. env:NAME: read the URL from the server's environment.",
        ),
    ] = None,
    load_limit: Annotated[
        str,
        typer.Option(
            "--load-limit", help="Roll back a version that takes longer than this to load."
        ),
    ] = "10m",
    inconclusive_limit: Annotated[
        str,
        typer.Option(
            "--inconclusive-limit", help="Pause the rollout if a gate has no answer for this long."
        ),
    ] = "5m",
    strict: Annotated[
        bool, typer.Option("--strict", help="Roll back instead of pausing at --inconclusive-limit.")
    ] = False,
    baseline: Annotated[
        int | None,
        typer.Option(
            "--baseline", help="Version to compare with. Default: the version that serves now."
        ),
    ] = None,
    why: Why = "",
    detach: Annotated[
        bool,
        typer.Option(
            "-d",
            "--detach",
            help="Start the rollout and return without following it. Implied by --json.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Move a model's traffic to a version step by step, and print each change until the end.

    The servers advance the rollout: it continues if this command ends.
    """
    from stoker.app.import_tensorflow import import_tensorflow
    from stoker.core.durations import seconds_of
    from stoker.rollout.state.settings import RolloutSettings
    from stoker.rollout.state.user_gates import read_gates
    from stoker.rollout.state.webhook import parse_webhook

    settings = RolloutSettings(
        stages=canary,
        key=key,
        step_time_s=seconds_of(step_time, name="--step-time"),
        min_requests=min_requests,
        warm_up_s=seconds_of(warm_up, name="--warm-up"),
        bake_s=seconds_of(bake, name="--bake"),
        max_shift=max_shift,
        allowed_ratio=allowed_ratio,
        shadow_tolerance=shadow_tolerance,
        dry_run=tuple(dry_run or ()),
        keep_previous_s=seconds_of(keep_previous, name="--keep-previous"),
        servers=tuple(server or ()),
        load_limit_s=seconds_of(load_limit, name="--load-limit"),
        inconclusive_limit_s=seconds_of(inconclusive_limit, name="--inconclusive-limit"),
        strict=strict,
        user_gates=() if gates is None else read_gates(gates),
        webhooks=tuple(parse_webhook(text) for text in webhook or ()),
        notify=tuple(notify or ()),
    )
    memory = ab.server_bytes(server_memory)
    rollouts = _open(models, model, gate_folder=None if gates is None else gates.parent)
    import_tensorflow()
    begun = rollouts.start(
        version,
        settings,
        why=why,
        baseline=baseline,
        server_bytes=memory,
    )
    if detach or as_json:
        show(begun, as_json=as_json)
    else:
        where = "" if models == MODELS else f" --models {shlex.quote(str(models))}"
        follow(rollouts, begun, target=f"{model}{where}")


@app.command()
def status(model: Model, models: Models = MODELS, as_json: AsJson = False) -> None:
    """Show the stage, the traffic, and each gate's verdict."""
    found = _open(models, model).status()
    if as_json:
        typer.echo(json.dumps(status_of(found), indent=2))
        return
    for line in lines_of(found):
        typer.echo(line)


@app.command()
def pause(model: Model, models: Models = MODELS, why: Why = "", as_json: AsJson = False) -> None:
    """Keep the current traffic split; gates still roll back."""
    show(_open(models, model).pause(why=why), as_json=as_json)


@app.command()
def resume(model: Model, models: Models = MODELS, why: Why = "", as_json: AsJson = False) -> None:
    """Continue after `stoker rollout pause`, or go on from a stage `pause` to the next stage."""
    show(_open(models, model).resume(why=why), as_json=as_json)


@app.command()
def promote(
    model: Model,
    models: Models = MODELS,
    full: Annotated[
        bool, typer.Option("--full", help="Skip the remaining stages: go to 100 %.")
    ] = False,
    version: Annotated[
        int | None,
        typer.Option("--version", help="End an A/B test: this version takes all traffic."),
    ] = None,
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Go to the next stage now, before the current stage is complete; or end an A/B test."""
    show(_open(models, model).promote(full=full, version=version, why=why), as_json=as_json)


@app.command()
def rollback(
    model: Model,
    models: Models = MODELS,
    to: Annotated[
        int | None,
        typer.Option("--to", help="Version that gets all traffic. Default: the baseline."),
    ] = None,
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Take all traffic from the version immediately, without stages."""
    show(_open(models, model).roll_back(to=to, why=why), as_json=as_json)


@app.command()
def history(model: Model, models: Models = MODELS, as_json: AsJson = False) -> None:
    """List every change: when, what, who and why."""
    events = _open(models, model).history()
    if as_json:
        changes = [{**event.to_json(), "state": now.to_json()} for event, now in events]
        typer.echo(json.dumps(changes, indent=2))
        return
    for event, now in events:
        when = datetime.fromtimestamp(event.at_s, UTC).isoformat(timespec="seconds")
        why = f": {event.why}" if event.why else ""
        typer.echo(f"{when}  {summary(now)}  {event.what} by {event.who}{why}")


def _open(models: Path, model: str, *, gate_folder: Path | None = None) -> ModelRollouts:
    from stoker.rollout.operations import ModelRollouts

    return ModelRollouts(models, model, gate_folder=gate_folder)


for command in (ab.ab, ab.outcome, ab.result):
    app.command()(command)
