"""Requests to the paths of `ExtraRoutes`: who may send them, and their answers as HTTP."""

from __future__ import annotations

import json
from urllib.parse import parse_qsl

from stoker.core.errors import DataError, UserError
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.errors import Code, ServeError
from stoker.serve.extra_routes import ExtraRequest, ExtraRoutes
from stoker.serve.rest.messages import Answer, HttpError, HttpRequest, Scope, header
from stoker.serve.security.auth import Role, is_loopback


def check_sender(scope: Scope, role: Role) -> None:
    """Refuse to let strangers administer a server that has no keys.

    Args:
        scope: ASGI's scope of the request.
        role: the role that it needs.

    Raises:
        HttpError: it comes from another machine, or from a page in a browser, which need not be the operator's.
    """
    if role < Role.ADMIN:
        return
    client = scope.get("client") or ("", 0)
    # A Unix socket has no address; who reaches it is on this machine.
    if header(scope, b"origin") or (client[0] and not is_loopback(client[0])):
        raise HttpError(
            Code.PERMISSION_DENIED.http_status,
            "without --keys-file only programs on this machine have the role admin",
        )


def answered_by(extra: ExtraRoutes, plane: DataPlane, request: HttpRequest, *, who: str) -> Answer:
    """Answer a request.

    Args:
        extra: answers its path.
        plane: knows the models.
        request: the request.
        who: the owner of its key.

    Raises:
        ServeError: it cannot be answered.
    """
    query = dict(parse_qsl(request.scope.get("query_string", b"").decode("latin-1")))
    requested = ExtraRequest(
        method=request.method,
        path=request.path,
        query=query,
        body=request.body,
        who=who,
        served=plane.models.served,
    )
    try:
        answer = extra.answer(requested)
    except DataError as error:
        raise ServeError(Code.FAILED_PRECONDITION, error.line()) from error
    except UserError as error:
        raise ServeError(Code.INVALID_ARGUMENT, error.line()) from error
    return Answer(status=answer.status, body=json.dumps(answer.content))
