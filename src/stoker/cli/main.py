"""`stoker`: the commands, and the place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback

import typer

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
from stoker.core.errors import EXIT_BUG, EXIT_DONE, UserError
from stoker.core.threads import end_process

app = typer.Typer(
    name="stoker",
    help="From data to a served model, with nothing idle.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("init")(init.init)
app.command("run")(chain.run)
for _name, _command in chain.COMMANDS.items():
    app.command(_name)(_command)
app.command("serve", cls=serve.ServeCommand)(serve.serve)
app.command("skew")(skew.skew)
app.command("profile", cls=profile.BeforeCommand)(profile.profile)
app.command("tune")(tune.tune)
app.command("call")(call.call)
app.command("bench")(bench.bench)
app.command("convert")(convert.convert)
app.command("deploy")(deploy.deploy)
app.command("doctor")(doctor.doctor)
app.command("goodput")(goodput.goodput)
app.command("job-start", hidden=True)(job_task.job_start)
app.command("job-task", hidden=True)(job_task.job_task)
app.add_typer(rollout.app, name="rollout")
app.add_typer(monitor.app, name="monitor")
app.add_typer(data_service.app, name="data-service")
app.command("submit")(submit.submit)
app.add_typer(jobs.app, name="jobs")
app.command("logs")(jobs.logs)
app.command("stop")(jobs.stop)


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
    """Accept the options before a command; `main` reads --debug and --log-json first."""


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
