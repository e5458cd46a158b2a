"""uvicorn's private names that the server uses exist in the installed version."""

from __future__ import annotations

import asyncio
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from stoker.internals import missing_names
from stoker.serve.rest import uvicorn_adapter
from stoker.serve.rest.uvicorn_adapter import (
    USED_NAMES,
    Config,
    HttpToolsProtocol,
    Server,
    new_cycle,
)

SERVE = Path(uvicorn_adapter.__file__).parents[1]


async def _objects() -> dict[str, object]:
    """One object of each class of uvicorn, of a server that listens and a connection with a request."""

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        pass

    config = Config(app, lifespan="off", log_config=None, port=0, http=HttpToolsProtocol)
    config.load()
    server = Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    ours, theirs = socket.socketpair()
    with ours:
        _, protocol = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: HttpToolsProtocol(config, server.server_state, {}), theirs
        )
        protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
    found: dict[str, object] = {
        "HttpToolsProtocol": protocol,
        "RequestResponseCycle": new_cycle(protocol, protocol.scope, keep_alive=True),
        "ServerState": server.server_state,
        "FlowControl": FlowControl(protocol.transport),
        "Server": server,
        "Config": config,
    }
    await server.shutdown()
    return found


def test_the_installed_uvicorn_has_every_name_that_the_server_uses() -> None:
    found = asyncio.run(_objects())
    missing = missing_names(USED_NAMES, found)
    assert missing == [], f"uvicorn {metadata.version('uvicorn')} has no {', '.join(missing)}"


def test_a_missing_name_is_reported_with_its_class() -> None:
    config = Config("app:app")
    assert missing_names({"Config": ("load", "gone")}, {"Config": config}) == ["Config.gone"]


def test_only_the_adapter_imports_uvicorn() -> None:
    importers = [
        path.name
        for path in SERVE.rglob("*.py")
        if re.search(r"^\s*(from|import) uvicorn", path.read_text(), re.MULTILINE)
    ]
    assert importers == ["uvicorn_adapter.py"]
