"""A `:classify` or `:regress` body -> serialized `tf.train.Example`s; and their answers -> JSON.

Source: TensorFlow Serving, RESTful API, "Classify and Regress API"; its `json_tensor` for the rules:
a number without a point is an int64 feature, one with a point a float feature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorflow.core.example import example_pb2, feature_pb2

from stoker.serve.errors import ServeError
from stoker.serve.rest.encode import number_texts
from stoker.serve.rest.json_text import (
    base64_bytes,
    invalid,
    is_b64,
    json_type,
    parse_object,
    shown,
)
from stoker.serve.servables.examples import Inferred

_MAX_INT64, _MAX_UINT64 = 2**63 - 1, 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ExamplesBody:
    """The body of a `:classify` or `:regress` request."""

    signature: str
    """The signature's name, empty for the default."""

    context: bytes
    """The serialized Example whose features every other has too; empty if there is none."""

    examples: Sequence[bytes]
    """The serialized Examples."""


def parse_examples(raw: bytes) -> ExamplesBody:
    """Read the body.

    Raises:
        ServeError: it is no JSON, or not of this form.
    """
    body, signature = parse_object(raw)
    context = _example(body["context"]) if "context" in body else b""
    if "examples" not in body:
        raise _form(body, "When method is classify, key 'examples' is expected and was not found")
    examples = body["examples"]
    if not isinstance(examples, list):
        raise _form(body, "Expecting 'examples' value to be an list/array")
    if not examples:
        raise _form(body, "'examples' value is an empty array")
    return ExamplesBody(
        signature=signature, context=context, examples=[_example(item) for item in examples]
    )


def classifications_text(answer: Inferred) -> str:
    """The JSON of a classification: for each row the label and the score of each class."""
    rows = []
    for row in answer.classes:
        scores = number_texts(np.array([score for _, score in row], dtype=np.float32))
        labels = [json.dumps(label.decode(errors="replace")) for label, _ in row]
        pairs = zip(labels, scores, strict=True)
        rows.append("[" + ", ".join(f"[{label}, {score}]" for label, score in pairs) + "]")
    return '{"results": [' + ", ".join(rows) + "]}"


def regressions_text(answer: Inferred) -> str:
    """The JSON of a regression: the value of each row."""
    texts = number_texts(np.array(answer.values, dtype=np.float32))
    return '{"results": [' + ", ".join(texts) + "]}"


def _example(value: Any) -> bytes:
    if not isinstance(value, dict):
        raise invalid(f"Example must be JSON object but got JSON {json_type(value)}")
    features = {name: _feature(content, name) for name, content in value.items()}
    return _serialized(features)


def _serialized(features: Mapping[str, feature_pb2.Feature]) -> bytes:
    try:
        return example_pb2.Example(
            features=feature_pb2.Features(feature=dict(features))
        ).SerializeToString()
    except UnicodeEncodeError:
        raise invalid("The surrogate pair in string is invalid.") from None


def _feature(content: Any, name: str) -> feature_pb2.Feature:
    """One feature, of the kind of its first element; all elements must be of that kind."""
    items = content if isinstance(content, list) else [content]
    kind, values = "", []
    for item in items:
        found = _kind(item, name)
        if kind not in ("", found):
            raise invalid(f"Unexpected element type in feature: {name} expecting type: {kind}")
        kind = found
        values.append(_VALUE[found](item, name))
    feature = feature_pb2.Feature()
    if kind:
        getattr(feature, f"{kind}_list").value.extend(values)
    return feature


def _kind(item: Any, name: str) -> str:
    if isinstance(item, int) and -_MAX_INT64 - 1 <= item <= _MAX_UINT64:  # includes bool
        return "int64"
    if isinstance(item, int):  # RapidJSON reads a whole number beyond 64 bits as a double
        return "float"
    if isinstance(item, float):
        return "float"
    if isinstance(item, str) or is_b64(item):
        return "bytes"
    raise invalid(f"Feature: {name} has element with unexpected JSON type: {json_type(item)}")


def _int64(item: int, name: str) -> int:
    if item > _MAX_INT64:
        raise invalid(f"Feature: {name} has uint64_t element. Only int64_t is supported.")
    return int(item)


def _float(item: float, _name: str) -> float:
    with np.errstate(over="ignore"):  # beyond float32 it becomes infinite
        return float(np.float32(float(item)))


def _bytes(item: Any, _name: str) -> bytes:
    if isinstance(item, str):
        try:
            return item.encode()
        except UnicodeEncodeError:
            raise invalid("JSON Parse error: The surrogate pair in string is invalid.") from None
    return base64_bytes(item["b64"])


_VALUE = {"int64": _int64, "float": _float, "bytes": _bytes}


def _form(body: Any, reason: str) -> ServeError:
    return invalid(f"JSON Value: {shown(body)} {reason}")
