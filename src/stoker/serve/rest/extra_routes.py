"""HTTP requests to the paths of `ExtraRoutes`: checks who may send them, and converts the answers."""

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
    """Refuse administrative requests that may not come from the operator, on a server without keys.

    Args:
        scope: ASGI's scope of the request.
        role: The role that the request needs.

    Raises:
        HttpError: the request comes from another machine, or from a page in a browser, which may be a stranger's.
    """
    if role < Role.ADMIN:
        return
    client = scope.get("client") or ("", 0)
    # A client of a Unix socket has no address; it is on this machine.
    if header(scope, b"origin") or (client[0] and not is_loopback(client[0])):
        raise HttpError(
            Code.PERMISSION_DENIED.http_status,
            "without --keys-file, only programs on this machine have the role admin",
        )


def answered_by(extra: ExtraRoutes, plane: DataPlane, request: HttpRequest, *, who: str) -> Answer:
    """Answer a request.

    Args:
        extra: Answers the path.
        plane: Has the served models.
        request: The request.
        who: The owner of the request's key.

    Raises:
        ServeError: the request cannot be answered.
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
