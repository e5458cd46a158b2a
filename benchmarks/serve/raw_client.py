"""One connection that sends the same raw tensor repeatedly; does not need TensorFlow.

python raw_client.py KIND PORT PATH BODY [NAME=VALUE ...]: KIND is `http` or `grpc`, PATH that of the
request or the gRPC method, BODY a file, the rest are headers. It reads a number of seconds from each
line of its standard input, sends for that long, and writes `CALLS SECONDS` for the window.
"""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Callable
from pathlib import Path

_TIMEOUT_S = 120.0


def by_http(port: int, path: str, body: bytes, headers: dict[str, str]) -> Callable[[], None]:
    """A call that posts the body and reads the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)

    def call() -> None:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}: {said[:500]!r}")

    return call


def by_grpc(port: int, path: str, body: bytes) -> Callable[[], None]:
    """A call that sends the serialized message and reads the answer."""
    import grpc

    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=unlimited)
    ask = channel.unary_unary(path, request_serializer=None, response_deserializer=None)

    def call() -> None:
        ask(body, timeout=_TIMEOUT_S)

    return call


def main() -> None:
    """Send in windows, as standard input asks."""
    kind, port, path, file, *pairs = sys.argv[1:]
    body = Path(file).read_bytes()
    headers = dict(pair.split("=", 1) for pair in pairs)
    for line in sys.stdin:
        # A server closes a connection that was idle during other measurements.
        if kind == "grpc":
            call = by_grpc(int(port), path, body)
        else:
            call = by_http(int(port), path, body, headers)
        calls, began_s = 0, time.monotonic()
        while (took_s := time.monotonic() - began_s) < float(line) or not calls:
            call()
            calls += 1
        print(calls, took_s, flush=True)


if __name__ == "__main__":
    main()
