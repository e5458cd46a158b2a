"""Connects to a port of a pod through the cluster's API.

The official client opens the WebSocket. Its own relay (`stream.portforward`) is not used: it replaces a method of the
client that other threads may be using, and leaves its WebSocket open. So this module reads the frames itself. There
are two channels; the first carries the data, the second error messages. Each channel begins with the number of the
port.
Source: kubernetes.io, `v4.channel.k8s.io` of `pods/portforward`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import Future
from typing import Any

from stoker.core.errors import Plain, UserError
from stoker.jobs.providers.kubernetes.client import Cluster
from stoker.jobs.providers.kubernetes.problems import problem

DATA, ERROR = 0, 1
"""Numbers of the two channels."""

PORT_BYTES = 2
"""Number of bytes at the beginning of each channel, which hold the port."""

PROTOCOL = "v4.channel.k8s.io"

OPEN_S = 30.0
"""Maximum wait for a connection, seconds."""

_RULE = "the cluster's API must forward ports of pods"
_PROXY = "A proxy before it may not let WebSockets through."


def connect(cluster: Cluster, pod: str, port: int) -> PodWire:
    """Connect to a port of a pod.

    Raises:
        UserError: the cluster refuses, or does not answer.
    """
    import websocket
    from kubernetes.stream import ws_client

    client: Any = ws_client  # the module's functions have no type annotations
    path = f"{cluster.path('v1', 'pods', pod)}/portforward"
    settings, url, headers = cluster.request_of(path, ports=str(port))
    headers |= {"sec-websocket-protocol": PROTOCOL}
    opened: Future[Any] = Future()

    def open_socket() -> None:
        try:
            made = client.create_websocket(settings, client.get_websocket_url(url), headers)
            opened.set_result(made)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            opened.set_exception(error)

    # The client has no time limit of its own, and a proxy may pass on the request but no answer.
    threading.Thread(target=open_socket, daemon=True).start()
    try:
        made = opened.result(OPEN_S)
    except TimeoutError:
        raise UserError(_RULE, got=Plain(f"no answer within {OPEN_S:g} s"), fix=_PROXY) from None
    except websocket.WebSocketBadStatusException as error:
        text = (error.resp_body or b"").decode(errors="replace")
        what = f"GET {path.partition('/namespaces/')[2]}"
        raise problem(error.status_code, text, what=what, namespace=cluster.namespace) from None
    except (websocket.WebSocketException, OSError) as error:
        said = Plain(str(error) or type(error).__name__)
        raise UserError(_RULE, got=said, fix=_PROXY) from None
    return PodWire(made, f"{pod}:{port}")


class PodWire:
    """A connection to a port, as a `Wire`; the protocol can close only both directions together."""

    def __init__(self, made: Any, name: str) -> None:
        """Take over a WebSocket.

        Args:
            made: The WebSocket.
            name: Name of pod and port, for messages.
        """
        self._socket, self._name = made, name
        self._begun: set[int] = set()

    def recv(self, _: int, /) -> bytes:
        """Return the data of the next frame with data; no bytes after the end."""
        import websocket

        while True:
            try:
                kind, frame = self._socket.recv_data_frame(control_frame=True)
            except (websocket.WebSocketException, OSError):
                return b""
            if kind == websocket.ABNF.OPCODE_CLOSE:
                return b""
            if kind != websocket.ABNF.OPCODE_BINARY or not frame.data:
                continue
            channel, data = frame.data[0], bytes(frame.data[1:])
            if channel not in self._begun:
                self._begun.add(channel)
                data = data[PORT_BYTES:]
            if data and channel == ERROR:
                print(f"stoker: {self._name}: {data.decode(errors='replace')}", file=sys.stderr)
                return b""
            if data and channel == DATA:
                return data

    def sendall(self, data: bytes, /) -> None:
        """Send bytes.

        Raises:
            OSError: the connection is broken.
        """
        import websocket

        try:
            self._socket.send_binary(bytes((DATA,)) + data)
        except websocket.WebSocketException as error:
            raise ConnectionError(str(error)) from None

    def shutdown(self, _: int, /) -> None:
        """Close the connection in both directions; data that has not arrived yet is lost."""
        import websocket

        with contextlib.suppress(websocket.WebSocketException, OSError):
            self._socket.send_close()
        with contextlib.suppress(websocket.WebSocketException, OSError):
            self._socket.abort()  # makes a waiting `recv` return

    def close(self) -> None:
        """Close the socket of the connection."""
        self._socket.shutdown()
