"""The REST paths of rollouts: the same operations as the commands of `stoker rollout`.

GET  /v1/rollouts                     every model with a rollout
GET  /v1/rollouts/MODEL               state, counts and history
GET  /v1/rollouts/MODEL/result        result of the newest A/B test
GET  /v1/rollouts/MODEL/verdict       pass, fail or inconclusive; POST: 412 unless it is the expected one
POST /v1/rollouts/MODEL/start         {"version": 7, "settings": {...}, "baseline": 5, "why": "..."}
POST /v1/rollouts/MODEL/ACTION        pause, resume, promote ({"full": true} or {"version": 6}), rollback ({"to": 5}); each
                                      with "why"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from stoker.core.config import build
from stoker.core.errors import Plain, UserError
from stoker.rollout.ab_tests import ABTests
from stoker.rollout.metrics import RolloutMetrics
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER
from stoker.rollout.verdict import evidence, summary
from stoker.serve.errors import Code, ServeError
from stoker.serve.extra_routes import ExtraAnswer, ExtraRequest
from stoker.serve.routing import Served
from stoker.serve.security.auth import Role

_PATH = re.compile(r"/v1/rollouts(?:/(?P<model>[^/]+)(?:/(?P<action>[a-z]+))?)?")
_PREFIX = "/v1/rollouts"

OTHER_VERDICT = 412
"""HTTP status if the verdict is not the expected one, for controllers such as Flagger that read only the status."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """The body of a request that changes a rollout."""

    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start(_Change):
    version: int | None = None
    baseline: int | None = None
    settings: RolloutSettings = field(default_factory=RolloutSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promote(_Change):
    full: bool = False
    version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rollback(_Change):
    to: int | None = None


Body = TypeVar("Body")

Handler = Callable[[str, ModelRollouts, ExtraRequest], Any]
"""Answers a request about a model; the returned object is sent as JSON."""


def _verdict(model: str, rollouts: ModelRollouts, request: ExtraRequest) -> Any:
    version = request.query.get("version")
    if version is not None and not (version.isascii() and version.isdigit() and len(version) < 20):
        raise ServeError(Code.INVALID_ARGUMENT, f"version must be a number: {version}")
    found = evidence(model, rollouts.status(), version=None if version is None else int(version))
    expected = request.query.get("expect", "pass" if request.method == "POST" else "")
    if expected not in ("", "pass", "fail", "inconclusive"):
        raise ServeError(
            Code.INVALID_ARGUMENT, f"expect must be pass, fail or inconclusive: {expected}"
        )
    if expected in ("", found["verdict"]):
        return found
    return ExtraAnswer(status=OTHER_VERDICT, content=found)


def _show(model: str, rollouts: ModelRollouts, _: ExtraRequest) -> Any:
    found = rollouts.status()
    history = [event.to_json() for event, _ in rollouts.history()]
    return {"model": model, **summary(found), "state": found.state.to_json(), "history": history}


def _result(_: str, rollouts: ModelRollouts, __: ExtraRequest) -> Any:
    state, test, found = ABTests(rollouts).result()
    return found.to_json(state, test)


def _start(_: str, rollouts: ModelRollouts, request: ExtraRequest) -> Any:
    body = _body(_Start, request)
    if body.version is None:
        raise UserError("The body must name a version", fix='E.g. {"version": 7}.')
    begun = rollouts.start(body.version, body.settings, why=body.why, baseline=body.baseline)
    return begun.to_json()


def _pause(_: str, rollouts: ModelRollouts, request: ExtraRequest) -> Any:
    return rollouts.pause(why=_body(_Change, request).why).to_json()


def _resume(_: str, rollouts: ModelRollouts, request: ExtraRequest) -> Any:
    return rollouts.resume(why=_body(_Change, request).why).to_json()


def _promote(_: str, rollouts: ModelRollouts, request: ExtraRequest) -> Any:
    body = _body(_Promote, request)
    return rollouts.promote(full=body.full, version=body.version, why=body.why).to_json()


def _rollback(_: str, rollouts: ModelRollouts, request: ExtraRequest) -> Any:
    body = _body(_Rollback, request)
    return rollouts.roll_back(to=body.to, why=body.why).to_json()


ROUTES: dict[tuple[str, str], tuple[Role, Handler]] = {
    ("GET", ""): (Role.ADMIN, _show),
    ("GET", "result"): (Role.ADMIN, _result),
    # External controllers need only the verdict, so a key without the admin role is enough.
    ("GET", "verdict"): (Role.PREDICT, _verdict),
    ("POST", "verdict"): (Role.PREDICT, _verdict),
    ("POST", "start"): (Role.ADMIN, _start),
    ("POST", "pause"): (Role.ADMIN, _pause),
    ("POST", "resume"): (Role.ADMIN, _resume),
    ("POST", "promote"): (Role.ADMIN, _promote),
    ("POST", "rollback"): (Role.ADMIN, _rollback),
}
"""HTTP method, last part of a path below `/v1/rollouts/MODEL` -> required role, function that answers."""


class RolloutRoutes:
    """Answers requests to the paths of rollouts, in each process of a server."""

    def __init__(self, *, gate_folder: Path | None = None) -> None:
        """Args: gate_folder: Folder with the modules of Python gates; None: no Python gates."""
        self._gate_folder = gate_folder
        self._metrics = RolloutMetrics()

    def role_of(self, method: str, path: str) -> Role | None:
        """Return the role that a request needs; None if its path is not about rollouts."""
        if not path.startswith(_PREFIX):
            return None
        found = _PATH.fullmatch(path)
        if found is None:
            return None
        # An unknown path needs the admin role, so that other roles cannot find out which paths exist.
        return ROUTES.get((method, found["action"] or ""), (Role.ADMIN, None))[0]

    def answer(self, request: ExtraRequest) -> ExtraAnswer:
        """Answer a request.

        Raises:
            UserError: the requested change is not possible.
            ServeError: the model or the path does not exist.
        """
        found = _PATH.fullmatch(request.path)
        model, action = (found["model"], found["action"] or "") if found else (None, "")
        if model is None:
            if request.method != "GET":
                raise _unknown(request)
            return ExtraAnswer(content={"rollouts": self._all(request.served())})
        route = ROUTES.get((request.method, action))
        if route is None:
            raise _unknown(request)
        served = request.served().get(model)
        if served is None:
            raise ServeError(Code.NOT_FOUND, f"Servable not found for request: Latest({model})")
        answer = route[1](model, self._open(served, request.who), request)
        return answer if isinstance(answer, ExtraAnswer) else ExtraAnswer(content=answer)

    def families(self, served: Mapping[str, Served]) -> Sequence[Sequence[str]]:
        """Return the metrics of all rollouts, in Prometheus' text format."""
        return self._metrics.families(served)

    def _all(self, served: Mapping[str, Served]) -> list[dict[str, Any]]:
        found = []
        for model, each in sorted(served.items()):
            if (each.base / FOLDER).is_dir():
                try:
                    shown = summary(self._open(each, "").status())
                except (
                    UserError
                ) as error:  # the state of this model is damaged or missing: show the other models
                    shown = {"error": error.line()}
                found.append({"model": model, **shown})
        return found

    def _open(self, served: Served, who: str) -> ModelRollouts:
        return ModelRollouts(
            served.base.parent,
            served.base.name,
            who=f"{who or 'a program on this machine'} over REST",
            gate_folder=self._gate_folder,
        )


def _unknown(request: ExtraRequest) -> ServeError:
    return ServeError(Code.NOT_FOUND, f"{request.method} {request.path} is not a path of rollouts")


def _body(kind: type[Body], request: ExtraRequest) -> Body:
    """Parse the body of a request; an empty body is the same as {}.

    Raises:
        UserError: the body is not JSON, or has unknown keys.
    """
    try:
        content = json.loads(request.body or b"{}")
    except (ValueError, RecursionError):
        raise UserError("The body must be JSON", got=Plain("a body that is not JSON")) from None
    return build(kind, content, where="")
