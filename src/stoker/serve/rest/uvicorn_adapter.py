"""The only module that imports uvicorn, and the list of its private names that the server uses.

`protocol.py` answers small requests before uvicorn starts an ASGI task, and `http.py` closes listeners without losing a
connection. uvicorn has no public API for either. So `pyproject.toml` limits uvicorn's version, and after an
incompatible upgrade, a test fails with the names that are missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

__all__ = ["STATUS_LINE", "Config", "HttpToolsProtocol", "Server", "new_cycle"]

USED_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "HttpToolsProtocol": (
            *("access_log", "access_logger", "app", "app_state", "asgi_version", "client"),
            *("connections", "cycle", "flow", "headers", "logger", "loop", "parser", "pipeline"),
            *("root_path", "scheme", "server", "server_state", "transport"),
            *("timeout_keep_alive", "timeout_keep_alive_handler", "timeout_keep_alive_task"),
            *("on_body", "on_headers_complete", "on_message_begin", "on_message_complete"),
            *("on_response_complete", "pause_writing", "resume_writing"),
            *("_start_asgi_task", "_unset_keepalive_if_required"),
        ),
        "RequestResponseCycle": (
            *("body", "disconnected", "keep_alive", "message_event", "more_body"),
            *("response_complete", "response_started", "scope"),
        ),
        "ServerState": ("connections", "default_headers", "total_requests"),
        "FlowControl": ("read_paused", "write_paused"),
        "Server": ("config", "lifespan", "server_state", "servers", "shutdown", "started"),
        "Config": ("http_protocol_class", "load", "timeout_keep_alive"),
    }
)
"""Name of a uvicorn class -> its attributes and methods that the server reads, sets, calls, or overrides."""


def new_cycle(protocol: HttpToolsProtocol, scope: Any, *, keep_alive: bool) -> RequestResponseCycle:
    """Return uvicorn's record of one request and its answer.

    Args:
        protocol: The connection that received the request.
        scope: The request's ASGI scope.
        keep_alive: Whether the connection stays open after the answer.
    """
    return RequestResponseCycle(
        scope=scope,
        transport=protocol.transport,
        flow=protocol.flow,
        logger=protocol.logger,
        access_logger=protocol.access_logger,
        access_log=protocol.access_log,
        default_headers=protocol.server_state.default_headers,
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=protocol.on_response_complete,
    )
