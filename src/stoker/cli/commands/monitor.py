"""`stoker monitor`: what watches the runs and servers of this machine."""

from __future__ import annotations

import typer

from stoker.cli.commands import monitor_stack

app = typer.Typer(
    help="Watch the GPUs, runs and servers of this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("up")(monitor_stack.up)
app.command("down")(monitor_stack.down)
app.command("status")(monitor_stack.status)
