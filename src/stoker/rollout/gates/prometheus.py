"""A gate that queries Prometheus: each number of the answer must be within the gate's limits.

Source: Prometheus, HTTP API, instant queries (`/api/v1/query`).
"""

from __future__ import annotations

import contextlib
import json
from typing import Any
from urllib.parse import urlencode

from stoker.core.errors import ConfigError, Plain
from stoker.rollout.http_call import HttpAnswer, NoAnswerError, send

_PATH = "/api/v1/query"
_FORM = "application/x-www-form-urlencoded"
_BAD_DATA = "bad_data"
"""`errorType` of Prometheus' answer to a query that is not PromQL; the status is 400."""


def check_query(url: str, query: str, *, gate: str, timeout_s: float) -> str:
    """Let Prometheus check that a query is PromQL.

    Args:
        url: URL of the Prometheus server.
        query: Query of the gate, with the versions filled in.
        gate: Name of the gate.
        timeout_s: Maximum time to wait for an answer, seconds.

    Returns:
        Why Prometheus could not check it, as one clause; empty if the query is PromQL.

    Raises:
        ConfigError: the query is not PromQL, or its result is not numbers.
    """
    try:
        answer = _ask(url, query, timeout_s)
        content = _content(answer)
    except NoAnswerError as error:
        return str(error)
    if content.get("errorType") == _BAD_DATA:
        raise ConfigError(
            f"The query of gate {gate} must be PromQL",
            got=query,
            fix=f"Prometheus says: {_one_line(content.get('error'))}.",
        )
    if content.get("status") != "success":
        return _refusal(answer, content)
    with contextlib.suppress(NoAnswerError):
        _numbers(content)
        return ""
    raise ConfigError(
        f"The query of gate {gate} must return numbers",
        got=query,
        fix="Apply a function to a range such as up[1m], for example rate().",
    )


def query_numbers(url: str, query: str, *, timeout_s: float) -> list[float]:
    """Return the numbers of a query: one for a scalar, one for each series of a vector.

    Raises:
        NoAnswerError: Prometheus did not answer with numbers.
    """
    answer = _ask(url, query, timeout_s)
    content = _content(answer)
    if content.get("status") != "success":
        raise NoAnswerError(_refusal(answer, content))
    return _numbers(content)


def _numbers(content: dict[str, Any]) -> list[float]:
    try:
        data = content["data"]
        if data["resultType"] == "scalar":
            return [float(data["result"][1])]
        if data["resultType"] == "vector":
            return [float(series["value"][1]) for series in data["result"]]
    except (KeyError, TypeError, ValueError, IndexError):
        raise NoAnswerError("Prometheus' answer does not have the expected form") from None
    raise NoAnswerError(f"the query gives a {data['resultType']}, not numbers")


def _ask(url: str, query: str, timeout_s: float) -> HttpAnswer:
    form = urlencode({"query": query, "timeout": f"{timeout_s:.3f}"})
    return send(url.rstrip("/") + _PATH, body=form.encode(), media_type=_FORM, timeout_s=timeout_s)


def _content(answer: HttpAnswer) -> dict[str, Any]:
    try:
        content = json.loads(answer.body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise NoAnswerError(f"status {answer.status}, not the answer of a Prometheus")
    return content


def _refusal(answer: HttpAnswer, content: dict[str, Any]) -> str:
    return f"status {answer.status}: {_one_line(content.get('error') or 'no reason')}"


def _one_line(text: object) -> Plain:
    return Plain(" ".join(str(text).split())[:300].rstrip("."))
