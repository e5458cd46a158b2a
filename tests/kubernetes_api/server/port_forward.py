"""`pods/NAME/portforward`: a WebSocket whose first two channels are the data of a port and what went wrong with it.

Pods share this machine's network here, so their ports are those of 127.0.0.1.
Sources: RFC 6455; kubernetes.io, `v4.channel.k8s.io`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

PROTOCOL = "v4.channel.k8s.io"
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
DATA, ERROR = b"\0", b"\1"


def serve(handler: BaseHTTPRequestHandler) -> None:
    """Answer a request for a pod that is there with its port, until either side ends."""
    handler.close_connection = True
    key = handler.headers.get("Sec-WebSocket-Key", "").encode()
    offered = handler.headers.get("Sec-WebSocket-Protocol", "")
    if not key or PROTOCOL not in offered:
        handler.send_error(400, "unable to upgrade: WebSocket and its channel protocol are needed")
        return
    handler.send_response(101)
    accept = base64.b64encode(hashlib.sha1(key + GUID).digest()).decode()
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept}
    for name, value in (headers | {"Sec-WebSocket-Protocol": PROTOCOL}).items():
        handler.send_header(name, value)
    handler.end_headers()
    port = int(parse_qs(urlsplit(handler.path).query)["ports"][0])
    for channel in (DATA, ERROR):
        _send(handler, BINARY, channel + struct.pack("<H", port))
    try:
        target = socket.create_connection(("127.0.0.1", port))
    except OSError as error:
        words = f"an error occurred forwarding {port} -> {port}: {error.strerror}"
        _send(handler, BINARY, ERROR + words.encode())
        _send(handler, CLOSE, struct.pack(">H", 1000))
        return
    with target:
        threading.Thread(target=_answer, args=(handler, target), daemon=True).start()
        _pass_on(handler, target)


def _pass_on(handler: BaseHTTPRequestHandler, target: socket.socket) -> None:
    """Give the port what the client sends."""
    with contextlib.suppress(OSError, EOFError):
        while True:
            kind, data = _receive(handler)
            if kind == CLOSE:
                break
            if kind == PING:
                _send(handler, PONG, data)
            elif data[:1] == DATA:
                target.sendall(data[1:])
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def _answer(handler: BaseHTTPRequestHandler, target: socket.socket) -> None:
    """Give the client what the port sends; then end the connection, without waiting for the client."""
    with contextlib.suppress(OSError):
        while block := target.recv(1 << 15):
            _send(handler, BINARY, DATA + block)
        _send(handler, CLOSE, struct.pack(">H", 1000))
        handler.connection.shutdown(socket.SHUT_WR)


def _send(handler: BaseHTTPRequestHandler, kind: int, data: bytes) -> None:
    size = len(data)
    length = bytes([size]) if size < 126 else b"\x7e" + struct.pack(">H", size)
    handler.wfile.write(bytes([0x80 | kind]) + length + data)


def _receive(handler: BaseHTTPRequestHandler) -> tuple[int, bytes]:
    first, second = _exactly(handler, 2)
    size = second & 0x7F
    if size == 126:
        (size,) = struct.unpack(">H", _exactly(handler, 2))
    elif size == 127:
        (size,) = struct.unpack(">Q", _exactly(handler, 8))
    mask = _exactly(handler, 4)
    data = _exactly(handler, size)
    return first & 0xF, bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))


def _exactly(handler: BaseHTTPRequestHandler, size: int) -> bytes:
    data = handler.rfile.read(size)
    if len(data) < size:
        raise EOFError
    return data
