"""Converts a user's rows to requests of REST and gRPC."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stoker.client.signature import SignatureSpec, TensorSpec, chosen, list_padding
from stoker.core.errors import DataError, Plain, UserError, nearest

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request: rows, or whole tensors by name."""

    rows: Sequence[Any] | NDArray[Any] | None = None
    """One value or one object of inputs per row: REST's `instances`."""

    columns: Any = None
    """One tensor, or an object of tensors: REST's `inputs`."""

    signature: str = ""
    """The signature to call; "" for the default."""

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the request over REST."""
        named = {"signature_name": self.signature} if self.signature else {}
        if self.rows is not None:
            return {**named, "instances": list(self.rows)}
        return {**named, "inputs": self.columns}


def parse_request(text: str, *, where: str) -> Request:
    """Parse a request: one row, a list of rows, one row per line, or a request body of TensorFlow Serving.

    Args:
        text: JSON, in which NaN and Infinity are allowed.
        where: Name of the file, for errors.

    Raises:
        DataError: the text has none of these forms.
    """
    value = _json(text, where)
    if isinstance(value, dict):
        for key in ("instances", "inputs"):
            if key in value and set(value) <= {key, "signature_name"}:
                return _of_body(value, where)
        return Request(rows=[value])
    if isinstance(value, list):
        if not value:
            raise DataError(f"{where} must hold at least one row", got=value)
        return Request(rows=value)
    return Request(rows=[value])


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise DataError(
            f"{where} must hold JSON of few levels", got=Plain("lists or objects nested too deeply")
        ) from None
    except json.JSONDecodeError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            if len(lines) > 1:
                return [json.loads(line) for line in lines]
        except (json.JSONDecodeError, RecursionError):
            pass
        raise DataError(
            f"{where} must hold JSON: a row, a list of rows, or a row a line",
            got=Plain(f"{error.msg} in line {error.lineno}, column {error.colno}"),
        ) from None


def _of_body(body: Mapping[str, Any], where: str) -> Request:
    signature = body.get("signature_name", "")
    if "instances" not in body:
        return Request(columns=body["inputs"], signature=signature)
    rows = body["instances"]
    if not isinstance(rows, list) or not rows:
        raise DataError(f"instances in {where} must be a list of at least one row", got=rows)
    return Request(rows=rows, signature=signature)


def json_instances(rows: Mapping[str, NDArray[Any]], *, binary: Sequence[str]) -> list[Any]:
    """Return rows in the form of TensorFlow Serving's `instances`: one object per row.

    Args:
        rows: Input -> [rows] or [rows, length] values; strings are bytes.
        binary: Inputs that hold bytes (images), sent as `{"b64": ...}`.
    """
    count = len(next(iter(rows.values())))
    return [
        {name: _json_value(values[row], binary=name in binary) for name, values in rows.items()}
        for row in range(count)
    ]


def as_bytes(content: bytes) -> dict[str, str]:
    """Return bytes in REST's form, `{"b64": ...}`."""
    return {"b64": base64.b64encode(content).decode()}


def _json_value(value: Any, *, binary: bool) -> Any:
    if getattr(value, "ndim", 0):
        return [_json_value(item, binary=binary) for item in value]
    if isinstance(value, bytes):
        if not binary:
            try:
                return value.decode()
            except UnicodeDecodeError:
                pass
        return as_bytes(value)
    return value.item() if hasattr(value, "item") else value


def to_arrays(request: Request, signature: SignatureSpec) -> dict[str, NDArray[Any]]:
    """Convert a request's rows or tensors to arrays with the dtypes of a signature.

    Raises:
        UserError: an input is unknown or missing, or a value does not fit its dtype; the error names the input.
    """
    if request.rows is None:
        return _typed(_named(request.columns, signature), signature)
    first = request.rows[0]
    if not _is_named(first):
        return _typed(_named(list(request.rows), signature), signature)
    columns: dict[str, list[Any]] = {name: [] for name in first}
    for number, row in enumerate(request.rows):
        if not isinstance(row, dict) or set(row) != set(first):
            raise UserError(
                f"every row must have the inputs of the first, {', '.join(first)}",
                got=Plain(f"row {number}: {_keys(row)}"),
            )
        for name, value in row.items():
            columns[name].append(value)
    return _typed(columns, signature)


def padded(request: Request, signatures: Callable[[], Mapping[str, SignatureSpec]]) -> Request:
    """Pad the lists of each input to the length of the longest one, if the model removes the padding.

    Args:
        request: The request. It is returned unchanged if its lists have the same length.
        signatures: Returns the model's signatures, from the server; called only if lengths differ.

    Raises:
        UserError: lengths differ, and the model does not remove padding from that input.
        CallError: the server did not return the signatures.
    """
    columns = _lists(request)
    lengths = {name: {len(v) for v in values if _is_list(v)} for name, values in columns.items()}
    uneven = {name: max(found) for name, found in lengths.items() if len(found) > 1}
    if not uneven:
        return request
    known = signatures()
    padding = list_padding(known, request.signature)
    for name, longest in uneven.items():
        shown = name or next(iter(_named([], chosen(known, request.signature))))
        if shown not in padding:
            raise _uneven(shown)
        columns[name] = [
            [*v, *[padding[shown]] * (longest - len(v))] if _is_list(v) else v
            for v in columns[name]
        ]
    if request.rows is None:
        return replace(request, columns=columns.get("") or request.columns | columns)
    rows = zip(*columns.values(), strict=True)
    return replace(
        request, rows=columns.get("") or [dict(zip(columns, row, strict=True)) for row in rows]
    )


def _lists(request: Request) -> dict[str, list[Any]]:
    """Return input -> values of the rows; an unnamed input has the key "". {} if the rows have different inputs."""
    if request.rows is None:
        named = request.columns if _is_named(request.columns) else {"": request.columns}
        return {name: values for name, values in named.items() if isinstance(values, list)}
    rows = list(request.rows)
    if not any(map(_is_named, rows)):
        return {"": rows}
    if any(not _is_named(row) or row.keys() != rows[0].keys() for row in rows):
        return {}
    return {name: [row[name] for row in rows] for name in rows[0]}


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or getattr(value, "ndim", 0) > 0


def _is_named(value: Any) -> bool:
    """Return whether a value is an object of inputs by name; `{"b64": ...}` is not."""
    return isinstance(value, dict) and set(value) != {"b64"}


def _uneven(name: str) -> UserError:
    return UserError(
        f"input {name!r} must have rows of the same length",
        got=Plain("rows of different lengths"),
        fix="Pad the shorter rows as the model expects, or send one row at a time.",
    )


def _keys(row: Any) -> str:
    return ", ".join(row) if isinstance(row, dict) else repr(row)


def _named(values: Any, signature: SignatureSpec) -> Mapping[str, Any]:
    """Return input -> tensor; a tensor without a name belongs to the model's only input."""
    if _is_named(values):
        return values
    if len(signature.inputs) != 1:
        raise UserError(
            f"a row must be an object of the inputs {', '.join(signature.inputs)}",
            got=Plain("a value without a name"),
        )
    return {next(iter(signature.inputs)): values}


def _typed(columns: Mapping[str, Any], signature: SignatureSpec) -> dict[str, NDArray[Any]]:
    for name in columns:
        if name not in signature.inputs:
            raise UserError(
                f"the inputs must be {', '.join(signature.inputs)}",
                got=name,
                fix=nearest(name, signature.inputs),
            )
    missing = [name for name in signature.inputs if name not in columns]
    if missing:
        raise UserError(
            f"the inputs must be {', '.join(signature.inputs)}",
            got=Plain(f"no {missing[0]!r}"),
        )
    return {name: _array(name, columns[name], spec) for name, spec in signature.inputs.items()}


_KINDS = {"f": "iuf", "i": "iu", "u": "iu", "b": "b", "c": "iufc"}
"""NumPy kind of the declared dtype -> kinds of values that can be converted to it without loss."""


def _array(name: str, values: Any, spec: TensorSpec) -> NDArray[Any]:
    import numpy as np

    from stoker.client.tensors import numpy_dtype

    if spec.dtype == "string":
        texts = np.array(_strings(name, values), dtype=object)
        if any(isinstance(item, list) for item in texts.flat):
            raise _uneven(name)
        return texts
    dtype = numpy_dtype(spec.dtype)
    try:
        found = np.asarray(values)
    except ValueError:
        raise _uneven(name) from None
    # bfloat16 of ml_dtypes has the kind "V".
    allowed = _KINDS.get(dtype.kind, "iuf")
    fits = not found.size or found.dtype.kind in allowed
    if fits and dtype.kind in "iu" and found.size:
        limits = np.iinfo(dtype)
        fits = bool(limits.min <= found.min() and found.max() <= limits.max)
    if not fits:
        raise UserError(f"input {name!r} must hold {spec.dtype}", got=values)
    return found.astype(dtype)


def _strings(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_strings(name, item) for item in value]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and set(value) == {"b64"}:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            pass
    raise UserError(f"input {name!r} must hold strings, or bytes as {{'b64': ...}}", got=value)
