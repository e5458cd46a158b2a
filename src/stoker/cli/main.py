"""`stoker`: lists the commands, and turns an error into a message and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import typer
from typer.core import TyperCommand

from stoker import __version__
from stoker.cli.commands import (
    bench,
    call,
    chain,
    convert,
    data_service,
    deploy,
    doctor,
    goodput,
    init,
    monitor,
    profile,
    skew,
    tune,
)
from stoker.cli.commands.jobs import job_task, jobs, submit
from stoker.cli.commands.rollout import rollout
from stoker.cli.serve import serve
from stoker.core import log_lines
from stoker.core.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, UserError
from stoker.core.threads import end_process

app = typer.Typer(
    name="stoker",
    help="From data to a served model, without idle hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_EXAMPLES = {
    "init": "stoker init mine --from data.csv --label price",
    "run": "stoker run mine --set train.epochs=3",
    "ingest": "stoker ingest mine --set data.max_bad_rows=10",
    "analyze": "stoker analyze mine    (open the report.html in the printed folder)",
    "transform": "stoker transform mine",
    "train": "stoker train mine --dry-run",
    "export": "stoker export mine",
    "evaluate": "stoker evaluate mine",
    "push": "stoker push mine",
    "serve": "stoker serve mine --rest_api_port 8501",
    "skew": "stoker skew requests-*.tfrecord --analysis runs/mine/RUN/analysis",
    "profile": "stoker profile mine    (or: stoker profile -- python train.py)",
    "tune": "stoker tune mine --budget 20m",
    "call": "stoker call mine --data row.json",
    "bench": "stoker bench --model mine --data rows.json --rate 500",
    "convert": "stoker convert mine --to litert --out mine-litert",
    "deploy": "stoker deploy mine --target compose --out mine-compose",
    "doctor": "stoker doctor --disk runs",
    "goodput": "stoker goodput runs/mine/20261127T184133Z-4f1a",
    "rollout": "stoker rollout start mine 2",
    "monitor": "stoker monitor tensorboard mine",
    "data-service": "stoker data-service start --workers 2",
    "submit": "stoker submit mine --on local",
    "jobs": "stoker jobs show JOB",
    "logs": "stoker logs -f JOB",
    "stop": "stoker stop JOB",
}
"""Command -> the example at the end of its help."""


def _example(verb: str) -> str:
    return f"Example: {_EXAMPLES[verb]}"


def _add(verb: str, function: Callable[..., None], cls: type[TyperCommand] | None = None) -> None:
    app.command(verb, cls=cls, epilog=_example(verb))(function)


_add("init", init.init)
_add("run", chain.run)
for _name, _command in chain.COMMANDS.items():
    _add(_name, _command)
_add("serve", serve.serve, serve.ServeCommand)
_add("skew", skew.skew)
_add("profile", profile.profile, profile.BeforeCommand)
_add("tune", tune.tune)
_add("call", call.call)
_add("bench", bench.bench)
_add("convert", convert.convert)
_add("deploy", deploy.deploy)
_add("doctor", doctor.doctor)
_add("goodput", goodput.goodput)
app.command("job-start", hidden=True)(job_task.job_start)
app.command("job-task", hidden=True)(job_task.job_task)
app.add_typer(rollout.app, name="rollout", epilog=_example("rollout"))
app.add_typer(monitor.app, name="monitor", epilog=_example("monitor"))
app.add_typer(data_service.app, name="data-service", epilog=_example("data-service"))
_add("submit", submit.submit)
app.add_typer(jobs.app, name="jobs", epilog=_example("jobs"))
_add("logs", jobs.logs)
_add("stop", jobs.stop)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
    log_json: bool = typer.Option(
        False, "--log-json", help="Write messages as JSON lines: time, level, run, worker, message."
    ),
) -> None:
    """Declare the options before a command; `main` has read --debug and --log-json already."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 bug in Stoker, 2 invalid input, 3 a check failed."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, of_script = arguments[:end], arguments[end:]
    debug = "--debug" in own
    if log_lines.wants_json(own, os.environ):
        log_lines.enable(os.environ)
    if debug:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0")
    read = ("--debug", log_lines.FLAG)
    end_process(invoke([*(a for a in own if a not in read), *of_script], debug=debug))


def invoke(arguments: list[str], *, debug: bool) -> int:
    """Run one command; return the exit code."""
    try:
        app(arguments)
    except SystemExit as ended:
        continues = {*arguments[:1]} & {"run", *chain.COMMANDS} and "--dry-run" not in arguments
        if ended.code == EXIT_INTERRUPTED and continues:
            _say("interrupted; the same command continues where this one stopped")
        return ended.code if isinstance(ended.code, int) else EXIT_DONE
    except UserError as error:
        if debug:
            traceback.print_exc()
        _say(error.line())
        return error.exit_code
    except Exception:  # noqa: BLE001 - the edge: all but a UserError is a bug
        if not log_lines.write_error(traceback.format_exc()):
            traceback.print_exc()
        _say("this is a bug in Stoker; please report the lines above")
        return EXIT_BUG
    return EXIT_DONE


def _say(line: str) -> None:
    if not log_lines.write_error(line):
        typer.echo(f"stoker: {line}", err=True)
