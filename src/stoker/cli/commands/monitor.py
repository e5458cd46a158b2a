"""`stoker monitor`: what watches the runs and servers of this machine."""

from __future__ import annotations

import typer

from stoker.cli.commands.monitor_tensorboard import tensorboard

app = typer.Typer(
    help="Watch the runs and servers of this machine.", no_args_is_help=True, rich_markup_mode=None
)
app.command("tensorboard")(tensorboard)
