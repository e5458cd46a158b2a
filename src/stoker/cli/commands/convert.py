"""`stoker convert`: converts a SavedModel to LiteRT, ONNX or TensorFlow.js, and compares both models' answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson, Overrides
from stoker.cli.output import print_result, require_new_folder
from stoker.core.errors import ConfigError, Plain

if TYPE_CHECKING:
    from stoker.export.conversion import Conversion, ConversionSource


TFJS_VARIABLE = "STOKER_TFJS_PYTHON"
"""Environment variable: path of the Python interpreter that runs TensorFlow.js's converter."""


class Form(StrEnum):
    """Target format."""

    LITERT = "litert"
    LITERT_FLOAT16 = "litert-float16"
    LITERT_INT8 = "litert-int8"
    ONNX = "onnx"
    TFJS = "tfjs"


def convert(
    model: Annotated[
        Path,
        typer.Argument(
            help="An experiment, a SavedModel, or a model's folder of versions.", metavar="MODEL"
        ),
    ],
    to: Annotated[Form, typer.Option(help="Target format.")],
    out: Annotated[Path, typer.Option(help="Folder to create; it must not exist yet.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON: rows for the comparison. An experiment uses the rows of its eval split."
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(help="Maximum number of an experiment's eval rows to compare.")
    ] = 256,
    signature: Annotated[str, typer.Option(help="Signature (default: serving_default).")] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Maximum difference of an answer: this value plus this value times the original answer."
        ),
    ] = None,
    tfjs_python: Annotated[
        Path | None,
        typer.Option(
            envvar=TFJS_VARIABLE,
            help="Python interpreter with the TensorFlow.js converter (default: Stoker's).",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    as_json: AsJson = False,
) -> None:
    """Convert a model to LiteRT, ONNX or TensorFlow.js.

    Before anything is written, both models answer real rows; exit code 3 if the answers differ by more
    than the tolerance. If the format lacks an operation of the model, the error names it.
    """
    from stoker.app.import_tensorflow import import_tensorflow

    if rows < 1:
        raise ConfigError("--rows must be at least 1", got=rows)
    if tolerance is not None and not tolerance >= 0:
        raise ConfigError("--tolerance must be 0 or more", got=tolerance)
    require_new_folder(out)
    source = _source(model, data, rows=rows, signature=signature, overrides=overrides)
    import_tensorflow()
    from stoker.export.conversion import convert as converted

    made = converted(
        source,
        to.value,
        out,
        signature=signature,
        tolerance=tolerance,
        tfjs_python=tfjs_python,
    )
    if as_json:
        facts = {"out": str(out), "saved_model": str(source.saved_model)}
        print_result(json.dumps(facts | asdict(made), indent=2))
    else:
        print_result("\n".join(_lines(made, out)))


def _source(
    model: Path, data: Path | None, *, rows: int, signature: str, overrides: list[str]
) -> ConversionSource:
    from stoker.app.experiment import FILE

    if not (model / FILE).is_file():
        return _of_folder(model, data, signature)
    if data is not None:
        raise ConfigError(
            "--data must be left out for an experiment, which has its own rows",
            got=Plain(f"--data {data}"),
            fix="Remove --data, or name the SavedModel instead.",
        )
    from stoker.app.chain import run_chain
    from stoker.app.conversion import of_experiment
    from stoker.app.experiment import load_experiment
    from stoker.app.import_tensorflow import import_tensorflow
    from stoker.cli.progress import ConsoleListener

    experiment = load_experiment(model, overrides=overrides)
    with ConsoleListener() as listener:
        chain = run_chain(experiment, listener, until="export")
    import_tensorflow()
    return of_experiment(experiment, chain, rows=rows)


def _of_folder(model: Path, data: Path | None, signature: str) -> ConversionSource:
    import dataclasses

    from stoker.app.conversion import of_folder
    from stoker.app.import_tensorflow import import_tensorflow
    from stoker.cli.commands.call import read_text
    from stoker.client.rows import parse_request

    request = None if data is None else parse_request(read_text(data), where=str(data))
    if request is not None and signature:
        request = dataclasses.replace(request, signature=signature)
    import_tensorflow()
    return of_folder(model, request)


def _lines(made: Conversion, out: Path) -> list[str]:
    lines = [
        f"wrote {out}: {made.to}, {_kib(made.size_bytes)}, the SavedModel {_kib(made.saved_model_bytes)}",
        f"signature {made.signature}, takes {_inputs(made.inputs)}",
    ]
    if made.why:
        lines.append(
            f"not serving_default: {made.why.partition(' Export with')[0]} What the model takes "
            "now is what the SavedModel's signature transform_features answers."
        )
    for name, off in made.differences.items():
        choice = made.same_choice.get(name)
        same = "" if choice is None else f"; the same choice in {choice:.1%} of the rows"
        lines.append(
            f"{name}: off by at most {off:.2g} on {made.rows} rows, allowed is "
            f"{made.tolerance:g}{same}"
        )
    return lines


def _inputs(inputs: dict[str, str]) -> str:
    shown = [f"{name} ({spec})" for name, spec in list(inputs.items())[:_SHOWN_INPUTS]]
    more = len(inputs) - len(shown)
    return ", ".join(shown) + (f" and {more} more, see conversion.json" if more else "")


_SHOWN_INPUTS = 5
"""Maximum number of input names that are printed."""


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:,.0f} KiB"
