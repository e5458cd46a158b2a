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
    init,
    monitor,
    profile,
    rollout,
    skew,
    tune,
)
from stoker.cli.serve import serve
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
app.add_typer(rollout.app, name="rollout")
app.add_typer(monitor.app, name="monitor")
app.add_typer(data_service.app, name="data-service")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Accept the options before a command; `main` reads --debug first."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 bug in Stoker, 2 invalid input, 3 a check failed."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    if debug:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0")
    end_process(invoke([a for a in arguments if a != "--debug"], debug=debug))


def invoke(arguments: list[str], *, debug: bool) -> int:
    """Run one command; return the exit code."""
    try:
        app(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_DONE
    except UserError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"stoker: {error.line()}", err=True)
        return error.exit_code
    except Exception:  # noqa: BLE001 - the edge: all but a UserError is a bug
        traceback.print_exc()
        typer.echo("stoker: this is a bug in Stoker; please report the lines above", err=True)
        return EXIT_BUG
    return EXIT_DONE
