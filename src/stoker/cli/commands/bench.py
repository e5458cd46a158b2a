"""`stoker bench`: sends load to a model server and measures the latencies."""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson
from stoker.cli.output import print_result, require_writable_file, tolerant
from stoker.core.errors import ConfigError, Plain

if TYPE_CHECKING:
    from stoker.client.rows import Request
    from stoker.loadtest.result import LoadResult


MAX_BATCH = 100_000
"""Maximum number of rows in one request: the whole body is held in memory."""


def bench(
    url: Annotated[
        str, typer.Argument(help="URL of the server's REST interface.", metavar="URL")
    ] = ("http://127.0.0.1:8501"),
    model: Annotated[str, typer.Option(help="The model's name on the server.")] = "",
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON: rows to send, one per request; after the last row, the first follows."
        ),
    ] = None,
    image: Annotated[
        list[Path],
        typer.Option(help="Image file instead of rows; may be given several times."),
    ] = [],  # noqa: B006 - typer copies it
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, however long the answers take.")
    ] = None,
    closed: Annotated[
        bool,
        typer.Option(
            "--closed",
            help="Each connection sends its next request when it has the answer to the last one.",
        ),
    ] = False,
    seconds: Annotated[float, typer.Option(help="Duration, seconds.")] = 10.0,
    connections: Annotated[int, typer.Option(help="Connections.")] = 16,
    batch: Annotated[int, typer.Option(help="Rows in one request.")] = 1,
    signature: Annotated[str, typer.Option(help="Signature (default: serving_default).")] = "",
    version: Annotated[int | None, typer.Option(help="Version (default: the newest).")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Timeout, seconds.")] = 10.0,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow a server on another machine.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of the latencies to this SVG file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send REST load to a model server and report the latencies.

    With --rate, requests follow a schedule, and latency counts from the scheduled time. Ctrl-C ends the
    load early and reports it. The token is read from STOKER_TOKEN.
    """
    from stoker.cli.commands.call import connection, read_request
    from stoker.client.rest_client import RestClient
    from stoker.client.rows import padded
    from stoker.client.signature import ModelAt
    from stoker.core.files import write_atomic
    from stoker.core.signals import heard
    from stoker.loadtest.config import LoadConfig, resolved
    from stoker.loadtest.connection import http_requests
    from stoker.loadtest.generator import run_load

    if not model:
        raise ConfigError("--model must name a model of the server", got=model)
    if (rate is None) != closed:
        raise ConfigError(
            "load needs either --rate or --closed",
            got=Plain("both" if closed else "neither"),
            fix="Try --rate 100.",
        )
    if plot is not None:
        require_writable_file(plot, flag="--plot")
    config = LoadConfig(
        rate_per_s=rate, seconds=seconds, connections=connections, timeout_s=timeout_s
    )
    at = ModelAt(name=model, version=version)
    how = connection(timeout_s=timeout_s, ca=None, cert=None, key=None)
    with RestClient(url, connection=how) as client:
        if client.address.secure:
            raise ConfigError("load can be sent over plain http only", got=url)
        address = resolved(client.address.host, client.address.port, allow_remote=allow_remote)
        signatures = functools.cache(lambda: client.signatures(at))
        several = [
            padded(part, signatures)
            for part in _split(read_request(client, at, data, image, signature=signature), batch)
        ]
        # One request before the load, to report a missing model or rows that the model refuses.
        client.ask(at, several[0])
        requests = http_requests(client.address, f"{at.path}:predict", several, how.headers)
    stopped = threading.Event()
    with heard((signal.SIGINT, signal.SIGTERM), lambda _: stopped.set()):
        result = run_load(config, address, requests, stopped=stopped.is_set)
    if plot is not None:
        from stoker.loadtest.result import latency_picture

        write_atomic(plot, latency_picture(result, title=f"{model} at {client.address}"))
    if as_json:
        print_result(json.dumps({"url": url, "model": model, "batch": batch, **result.as_json()}))
    else:
        _print(result, title=f"{model} at {client.address}", plot=plot)


def _split(request: Request, batch: int) -> list[Request]:
    """Return requests of `batch` rows each."""
    import dataclasses

    if not 1 <= batch <= MAX_BATCH:
        raise ConfigError(f"a request must have from 1 to {MAX_BATCH:,} rows", got=batch)
    if request.rows is None:
        return [request]
    rows = list(request.rows)
    # The last request is filled up with the first rows, so that all requests have the same size.
    return [
        dataclasses.replace(
            request, rows=[rows[place % len(rows)] for place in range(start, start + batch)]
        )
        for start in range(0, len(rows), batch)
    ]


def _print(result: LoadResult, *, title: str, plot: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from stoker.loadtest.result import PERCENTS

    console = Console(file=tolerant(sys.stdout), highlight=False)
    rate = result.asked_rate_per_s
    requested = "" if rate is None else f" of {rate:,g} requested"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("answers", f"{result.throughput_per_s:,.1f}/s{requested}")
    took = f"{result.latencies.count:,} of {result.sent:,} in {result.took_s:.1f} s"
    table.add_row("", f"{took}, {result.connections} connections, {result.mode} loop")
    for percent in PERCENTS if result.latencies.count else ():
        table.add_row(f"p{percent:g}", _ms(result.latencies.at(percent)))
    if result.latencies.count:
        table.add_row("max", _ms(result.latencies.max_s))
    for name, count in result.errors.items():
        table.add_row(name, f"{count:,}")
    if result.lag.count:
        lag = f"p99 {_ms(result.lag.at(99))}, max {_ms(result.lag.max_s)}"
        table.add_row("lag of the load generator", lag)
    table.add_row("CPU of the load generator", f"{result.cpu_share:.0%} of a core")
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}")
    if plot is not None:
        console.print(f"picture: {plot}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
