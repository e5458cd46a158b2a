"""`:predict` with one tensor as the body, and one as the answer: no JSON, no base64.

| header | of a request | of an answer |
|---|---|---|
| `X-Tensor-Dtype` | the values' type, TensorFlow's name; `string` makes the whole body one text | the same |
| `X-Tensor-Shape` | `1,224,224,3`; not for `string` | the same |
| `X-Tensor-Name` | which input it is; not needed where there is one | the output's name |
| `X-Signature-Name` | the signature, the default one without it | |
| `X-Output-Name` | which output is wanted; needed where there are several | |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from stoker.core.errors import Plain, UserError
from stoker.registry.callpath import Signature
from stoker.serve.dataplane.requests import Tensors
from stoker.serve.rest.messages import RAW, Answer, Asked
from stoker.serve.tensor_bytes import DTYPES, checked_shape, from_bytes, to_bytes

_SHAPE = re.compile(r"\d{1,12}(?:\s*,\s*\d{1,12})*|")


def is_raw(asked: Asked) -> bool:
    """Whether the body is a tensor."""
    return asked.media_type == RAW


def wants_raw(asked: Asked) -> bool:
    """Whether the client takes a tensor as the answer; `*/*` asks for nothing."""
    accepted = asked.header("accept").lower().split(",")
    return any(one.partition(";")[0].strip() == RAW for one in accepted)


def input_reader(asked: Asked) -> Callable[[Signature], Tensors]:
    """What reads the body against a signature.

    Raises:
        UserError: the headers contradict each other, or do not describe the body.
    """
    dtype, shape_said = asked.header("x-tensor-dtype").strip(), asked.header("x-tensor-shape")
    if dtype != "string" and dtype not in DTYPES:
        raise UserError(
            "X-Tensor-Dtype must be string or one of " + ", ".join(sorted(DTYPES)), got=dtype
        )
    array = (
        _text(asked.body, shape_said) if dtype == "string" else _values(asked, dtype, shape_said)
    )

    def read(signature: Signature) -> Tensors:
        name = asked.header("x-tensor-name") or _only(list(signature.inputs), "X-Tensor-Name")
        return {name: array}

    return read


def output_filter(asked: Asked) -> tuple[str, ...]:
    """The outputs that are wanted; all if empty."""
    name = asked.header("x-output-name")
    return (name,) if name else ()


def answer(outputs: Tensors) -> Answer:
    """One output as the body.

    Raises:
        UserError: there are several, or it has no form in bytes.
    """
    name = _only(list(outputs), "X-Output-Name")
    array = outputs[name]
    is_text = array.dtype == object
    if is_text and array.size != 1:
        raise UserError(
            f"output {name!r} must be one text to be a body", got=Plain(f"{array.size} texts")
        )
    body = array.reshape(-1)[0] if is_text else to_bytes(array)
    return Answer(
        body=body,
        content_type=RAW,
        headers=(
            (b"x-tensor-name", _header_safe(name)),
            (b"x-tensor-dtype", b"string" if is_text else array.dtype.name.encode()),
            (b"x-tensor-shape", ",".join(map(str, array.shape)).encode()),
        ),
    )


def _text(body: bytes, shape_said: str) -> np.ndarray[Any, Any]:
    if shape_said:
        raise UserError(
            "X-Tensor-Shape must not be given for string: the body is one text", got=shape_said
        )
    array = np.empty(1, dtype=object)
    array[0] = body
    return array


def _values(asked: Asked, dtype: str, shape_said: str) -> np.ndarray[Any, Any]:
    given = any(name == b"x-tensor-shape" for name, _ in asked.scope["headers"])
    if not given or not _SHAPE.fullmatch(shape_said.strip()):
        raise UserError("X-Tensor-Shape must be lengths parted by commas", got=shape_said)
    lengths = [int(part) for part in shape_said.split(",") if part.strip()]
    shape = checked_shape(lengths, name="X-Tensor-Shape")
    return from_bytes(asked.body, dtype=dtype, shape=shape, name="the body")


def _only(names: list[str], header: str) -> str:
    if len(names) == 1:
        return names[0]
    raise UserError(f"{header} must name one of {', '.join(sorted(names))}", got=Plain("none"))


def _header_safe(name: str) -> bytes:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in name).encode()
