"""`POST /v1/rollouts/MODEL/outcomes`: outcomes of users, for the A/B test of a model.

    {"outcomes": [{"key": "user-7", "value": 1}, ...]}      ->      {"recorded": 1}

Either all outcomes of a request are written, or none.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.errors import Code, ServeError
from stoker.serve.rest.messages import Answer, HttpRequest

_PATH = re.compile(r"/v1/rollouts/(?P<model>[^/:]+)/outcomes", re.IGNORECASE)

_FORM = 'the body must be {"outcomes": [{"key": TEXT, "value": NUMBER}, ...]}'


def matches(path: str) -> bool:
    """Whether a path is the path of outcomes."""
    return _PATH.fullmatch(path) is not None


def answer(plane: DataPlane, request: HttpRequest) -> Answer:
    """Answer a request: write its outcomes.

    Raises:
        ServeError: the request has another form, or an outcome is invalid.
    """
    found = _PATH.fullmatch(request.path)
    if found is None or request.method != "POST":
        raise ServeError(Code.UNIMPLEMENTED, f"{request.path} takes POST only")
    outcomes = _outcomes(request.body)
    if plane.router is None:
        raise ServeError(Code.NOT_FOUND, "this server has no rollouts")
    plane.router.add_outcomes(found["model"], outcomes)
    return Answer(body=json.dumps({"recorded": len(outcomes)}))


def _outcomes(body: bytes) -> list[tuple[str, float]]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ServeError(Code.INVALID_ARGUMENT, _FORM) from error
    given = content.get("outcomes") if isinstance(content, dict) else None
    if not isinstance(given, list) or not given:
        raise ServeError(Code.INVALID_ARGUMENT, _FORM)
    return [_outcome(each, number) for number, each in enumerate(given, start=1)]


def _outcome(given: Any, number: int) -> tuple[str, float]:
    if isinstance(given, dict) and set(given) == {"key", "value"}:
        key, value = given["key"], given["value"]
        if isinstance(key, str) and key and isinstance(value, int | float):
            try:
                key.encode()
                return key, float(value)
            except (UnicodeEncodeError, OverflowError):
                pass
    raise ServeError(Code.INVALID_ARGUMENT, f"outcome {number} cannot be read: {_FORM}")
