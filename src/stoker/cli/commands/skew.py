"""`stoker skew`: compares logged requests with the training data."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import AsJson
from stoker.cli.output import print_result
from stoker.core.errors import EXIT_CHECK, DataError, Plain


def skew(
    logs: Annotated[
        list[Path], typer.Argument(help="Files of a server's request log.", metavar="LOG")
    ],
    analysis: Annotated[
        Path,
        typer.Option(
            help="Analysis of the training data: the folder that `stoker analyze` prints."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Compare logged requests with the training split.

    It compares types, ranges, values and distributions. Exit code 3 if they differ.
    """
    from stoker.app.import_tensorflow import import_tensorflow

    for path in logs:
        if not path.is_file():
            raise DataError(
                "LOG must be a file",
                got=Plain(str(path)),
                fix="Pass the files whose names start with the log's filename_prefix.",
            )
    import_tensorflow()
    from stoker.data.features.analysis.request_skew import compare
    from stoker.serve.request_log.reader import logged_requests

    found = compare(logged_requests(logs), analysis)
    if as_json:
        print_result(json.dumps(asdict(found), indent=2))
    else:
        print_result(f"{found.rows:,} rows, compared: {', '.join(found.compared) or 'nothing'}")
        for anomaly in found.anomalies:
            print_result(f"{anomaly.severity}: {anomaly.column}: {anomaly.message}")
        if not found.anomalies:
            print_result("no skew")
    if found.anomalies:
        raise typer.Exit(EXIT_CHECK)
