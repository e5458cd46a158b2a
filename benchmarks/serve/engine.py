"""Our HTTP engine without a model: the body is read, and the answer is always the same.

python engine.py PORT ANSWER, the file of the answer's body
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, cast

from stoker.serve.limits import HttpLimits
from stoker.serve.rest.app import RestApp
from stoker.serve.rest.http import HttpServer
from stoker.serve.runtime.sockets import BACKLOG, bound_socket

Message = MutableMapping[str, Any]


class Constant:
    """An ASGI application."""

    def __init__(self, body: bytes) -> None:
        """Args: body: what it answers."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        self._start = {"type": "http.response.start", "status": 200, "headers": headers}
        self._body = {"type": "http.response.body", "body": body}

    async def __call__(
        self,
        scope: Message,  # noqa: ARG002 - ASGI's
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        while (await receive()).get("more_body", False):
            pass
        await send(self._start)
        await send(self._body)


def main() -> None:
    """Serve."""
    bound = bound_socket("127.0.0.1", int(sys.argv[1]))
    bound.listen(BACKLOG)
    app = Constant(Path(sys.argv[2]).read_bytes())
    HttpServer(cast("RestApp", app), drain_s=1.0, limits=HttpLimits(), tls=None).run([bound])


if __name__ == "__main__":
    main()
