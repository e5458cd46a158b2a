"""`stoker call`: sends rows or images to a model server, over REST or gRPC."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.options import AsJson
from stoker.cli.output import print_result
from stoker.core.errors import ConfigError, Plain, UserError

if TYPE_CHECKING:
    from stoker.client.connection import Connection
    from stoker.client.model_client import Answers, ModelClient
    from stoker.client.rows import Request
    from stoker.client.signature import ModelAt


def call(
    model: Annotated[str, typer.Argument(help="The model's name on the server.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON: one row, a list of rows, one row per line, or a complete request body; - is stdin."
        ),
    ] = None,
    image: Annotated[
        list[Path],
        typer.Option(help="Image file, sent unchanged; may be given several times."),
    ] = [],  # noqa: B006 - typer copies it
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of the server (default: http://127.0.0.1:8501; 127.0.0.1:8500 for gRPC)."
        ),
    ] = None,
    use_grpc: Annotated[bool, typer.Option("--grpc", help="Use gRPC.")] = False,
    signature: Annotated[str, typer.Option(help="Signature (default: serving_default).")] = "",
    version: Annotated[int | None, typer.Option(help="Version (default: the newest).")] = None,
    label: Annotated[str, typer.Option(help="The label of a version.")] = "",
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Timeout, seconds.")] = 30.0,
    ca: Annotated[
        Path | None, typer.Option(help="For https: file of the certificate authority (CA).")
    ] = None,
    cert: Annotated[Path | None, typer.Option(help="For https: client certificate.")] = None,
    key: Annotated[
        Path | None, typer.Option(help="For https: key of the client certificate.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send rows or images to a model server. The token is read from STOKER_TOKEN."""
    from stoker.client.grpc_client import GrpcClient
    from stoker.client.rest_client import RestClient
    from stoker.client.signature import ModelAt

    # gRPC also logs the errors that it raises: show them only once.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    at = ModelAt(name=model, version=version, label=label)
    how = connection(timeout_s=timeout_s, ca=ca, cert=cert, key=key)
    where = {} if url is None else {"url": url}
    kind: type[GrpcClient | RestClient] = GrpcClient if use_grpc else RestClient
    with kind(**where, connection=how) as client:
        request = read_request(client, at, data, image, signature=signature)
        answers = client.ask(at, request)
    if as_json:
        print_result(json.dumps(_facts(at, request, answers)))
    else:
        print_result("\n".join(_lines(at, request, answers)))


def connection(
    *, timeout_s: float, ca: Path | None, cert: Path | None, key: Path | None
) -> Connection:
    """Return the settings of a connection; the token is read from STOKER_TOKEN."""
    from stoker.client.connection import TOKEN_VARIABLE, Connection, Tls

    tls = Tls(ca=ca, cert=cert, key=key)
    return Connection(timeout_s=timeout_s, token=os.environ.get(TOKEN_VARIABLE, ""), tls=tls)


def read_request(
    client: ModelClient,
    at: ModelAt,
    data: Path | None,
    images: list[Path],
    *,
    signature: str,
) -> Request:
    """Return the request in the files.

    Raises:
        ConfigError: no file is given.
        UserError: a file cannot be read, or the model has no input for images.
    """
    import dataclasses

    from stoker.client.rows import Request, parse_request

    request = Request(rows=[{}])
    if data is not None:
        request = parse_request(
            read_text(data), where="standard input" if _is_stdin(data) else str(data)
        )
    elif not images:
        raise ConfigError(
            "a call needs rows or images to send",
            got=Plain("neither --data nor --image"),
            fix="Try --data row.json, or --image photo.jpg.",
        )
    if signature:
        request = dataclasses.replace(request, signature=signature)
    return _with_images(client, at, request, images) if images else request


def _with_images(client: ModelClient, at: ModelAt, request: Request, images: list[Path]) -> Request:
    """Return rows with one image each; a single row is repeated for all images."""
    import dataclasses

    from stoker.client.rows import as_bytes
    from stoker.client.signature import chosen

    spec = chosen(client.signatures(at), request.signature)
    given = [n for row in request.rows or [] if isinstance(row, dict) for n in row]
    free = [name for name in spec.encoded if name not in given]
    if len(free) != 1:
        raise UserError(
            f"{at.name} must have exactly one input of encoded bytes that --data does not set",
            got=Plain(", ".join(f"{n} ({s.dtype})" for n, s in spec.inputs.items())),
            fix='Send the image in --data: bytes are written as {"b64": ...}.',
        )
    rows = list(request.rows or [])
    rows = rows * len(images) if len(rows) == 1 else rows
    if len(rows) != len(images) or not all(isinstance(row, dict) for row in rows):
        raise UserError(
            "--data must hold one row of named inputs, or one for each --image",
            got=Plain(f"{len(rows)} rows, {len(images)} images"),
        )
    with_images = [
        row | {free[0]: as_bytes(_content(path))} for row, path in zip(rows, images, strict=True)
    ]
    return dataclasses.replace(request, rows=with_images)


def _is_stdin(path: Path) -> bool:
    return str(path) == "-"


def read_text(path: Path) -> str:
    """Return the text of a file; "-" is standard input.

    Raises:
        UserError: it cannot be read, or is not text.
    """
    content = sys.stdin.buffer.read() if _is_stdin(path) else _content(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(
            f"{path} must be text",
            got=Plain("bytes that are not UTF-8"),
            fix="Send images by --image.",
        ) from None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} must be a file that can be read", got=Plain(error.strerror or str(error))
        ) from None


def _facts(at: ModelAt, request: Request, answers: Answers) -> dict[str, Any]:
    outputs = {name: _plain(values) for name, values in answers.outputs.items()}
    # Both REST and gRPC print a single value without a list around it.
    only = next(iter(outputs.values())) if len(outputs) == 1 else None
    facts: dict[str, Any] = {"model": at.name, "version": answers.version or at.version}
    if request.rows is None:
        return facts | {"outputs": outputs if only is None else only}
    if only is not None:
        return facts | {"predictions": only}
    names, columns = list(outputs), zip(*outputs.values(), strict=False)
    return facts | {"predictions": [dict(zip(names, row, strict=True)) for row in columns]}


def _plain(values: Any) -> Any:
    """Return a value for JSON: arrays as lists, and bytes that are not text as base64."""
    if hasattr(values, "tolist"):
        return _plain(_short(values).tolist())
    if isinstance(values, list):
        return [_plain(value) for value in values]
    if isinstance(values, bytes):
        from stoker.client.rows import as_bytes

        try:
            return values.decode()
        except UnicodeDecodeError:
            return as_bytes(values)
    return values


def _short(values: Any) -> Any:
    """Return floats of 16 or 32 bits as the shortest decimal numbers that represent them: 0.1, not 0.10000000149."""
    few_bits = values.dtype.kind in "fV" and values.dtype.itemsize < 8
    return values.astype("U").astype("float64") if few_bits else values


def _lines(at: ModelAt, request: Request, answers: Answers) -> list[str]:
    version = "" if answers.version is None else f" version {answers.version}"
    outputs = answers.outputs
    if request.rows is None:
        return [f"{at.name}{version}", *(f"{_label(n)}{_shown(v)}" for n, v in outputs.items())]
    lines = [f"{at.name}{version}, {len(request.rows)} row(s)"]
    for number in range(len(request.rows)):
        # An output that does not have one value per row is shown completely for each row.
        parts = [
            _label(n)
            + _shown(v[number] if getattr(v, "ndim", 0) and len(v) == len(request.rows) else v)
            for n, v in outputs.items()
        ]
        lines.append(f"{number}: " + ", ".join(parts))
    return lines


def _label(name: str) -> str:
    return f"{name} " if name else ""


_SHOWN_VALUES = 8
"""Maximum length of a vector that is shown completely."""


def _shown(value: Any) -> str:
    plain = _plain(value)
    if isinstance(plain, list):
        flat = plain and not any(isinstance(item, list | str | dict) for item in plain)
        if flat and len(plain) > 1:
            best = max(range(len(plain)), key=plain.__getitem__)
            whole = "" if len(plain) > _SHOWN_VALUES else f" of [{', '.join(map(_shown, plain))}]"
            return f"{best} ({_shown(plain[best])}){whole}"
        text = json.dumps(plain)
        return text if len(text) < 200 else text[:200] + "..."
    return f"{plain:.6g}" if isinstance(plain, float) else str(plain)
