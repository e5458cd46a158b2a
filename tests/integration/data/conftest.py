"""Real emulators of S3 and GCS on loopback, and a proxy before them that does the faults."""

from __future__ import annotations

import contextlib
import functools
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pyarrow import fs

COMMANDS = {
    "s3": ["moto_server", "-H", "{host}", "-p", "{port}"],
    "gs": [
        "gcp-storage-emulator",
        "start",
        "--host",
        "{host}",
        "--port",
        "{port}",
        "--in-memory",
        "--quiet",
    ],
}
HOST = "127.0.0.1"


@dataclass
class Faults:
    """What the proxy does to requests; zero and None: nothing."""

    seen: list[str] = field(default_factory=list)
    """`METHOD path` of every request that came."""

    answer_503: int = 0
    """So many requests for content are answered 503."""

    cut_bodies: int = 0
    """So many bodies of objects end in the middle, and the connection with them."""

    deny_after: int | None = None
    """This many requests for content are answered, then all get 403."""

    pause_s: float = 0.0
    """Pause within each body, seconds."""

    before: Callable[[str], None] | None = None
    """Called with each `METHOD path`."""

    def is_content(self, method: str, path: str) -> bool:
        """True for a request for an object's bytes."""
        of_gcs = path.startswith(("/storage/v1/", "/download/"))
        return method == "GET" and ("alt=media" in path if of_gcs else "list-type=" not in path)

    def contents(self) -> int:
        """How many requests for objects' bytes came."""
        return sum(self.is_content(*line.split(" ", 1)) for line in self.seen)


class _Proxy(BaseHTTPRequestHandler):
    """Passes requests on, but for what its server's `faults` say."""

    protocol_version = "HTTP/1.1"
    server: _ProxyServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - of http.server
        """Say nothing."""

    def _pass(self) -> None:
        faults, what = self.server.faults, f"{self.command} {self.path}"
        body = self._body()
        with self.server.alone:
            faults.seen.append(what)
            content = faults.is_content(self.command, self.path)
            if content and faults.answer_503 > 0:
                faults.answer_503 -= 1
                return self._answer(503, b"slow down")
            if faults.deny_after is not None:
                if faults.deny_after == 0:
                    return self._answer(403, b"")
                faults.deny_after -= content
            cut = content and faults.cut_bodies > 0
            faults.cut_bodies -= cut
        if faults.before is not None:
            faults.before(what)
        upstream = http.client.HTTPConnection(HOST, self.server.upstream, timeout=30)
        own = ("connection", "transfer-encoding", "expect")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in own}
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        self._relay(answer, answer.read(), cut=cut)
        upstream.close()
        return None

    def _body(self) -> bytes:
        """The body of a request; that of an upload comes in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        blocks = []
        while size := int(self.rfile.readline(), 16):
            blocks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(blocks)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _relay(self, answer: http.client.HTTPResponse, body: bytes, *, cut: bool) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        half = len(body) // 2
        self.wfile.write(body[:half])
        if cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        time.sleep(self.server.faults.pause_s if half else 0)
        self.wfile.write(body[half:])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815 - of http.server


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: int) -> None:
        super().__init__((HOST, 0), _Proxy)
        self.upstream = upstream
        self.faults = Faults()
        self.alone = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is not an error of the server."""


@functools.cache
def _system(scheme: str, port: int) -> fs.FileSystem:
    """Made once: Arrow makes no second one while the first waits for an answer."""
    at = {"endpoint_override": f"{HOST}:{port}", "scheme": "http"}
    if scheme == "gs":
        limit = timedelta(seconds=5)
        return fs.GcsFileSystem(anonymous=True, project_id="p", retry_time_limit=limit, **at)
    return fs.S3FileSystem(
        access_key="x", secret_key="y", region="us-east-1", allow_bucket_creation=True, **at
    )


@dataclass(frozen=True)
class StoreServer:
    """An emulator, the proxy before it, and what is in it."""

    scheme: str
    port: int
    proxy: _ProxyServer

    @property
    def faults(self) -> Faults:
        """What the proxy does now."""
        return self.proxy.faults

    def environment(self) -> dict[str, str]:
        """What makes a program find the proxy, with credentials that any emulator takes."""
        url = f"http://{HOST}:{self.proxy.server_port}"
        if self.scheme == "gs":
            return {"STORAGE_EMULATOR_HOST": url}
        return {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "hunter2",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def system(self) -> fs.FileSystem:
        """The emulator, past the proxy."""
        return _system(self.scheme, self.port)

    def put(self, path: str, content: bytes) -> None:
        """Write an object: `bucket/key`."""
        with self.system().open_output_stream(path, compression=None) as stream:
            stream.write(content)

    def put_folder(self, folder: Path, to: str) -> str:
        """Copy a local folder; its URI."""
        system = self.system()
        system.create_dir(to.partition("/")[0])
        for path in folder.rglob("*"):
            if path.is_file():
                with system.open_output_stream(
                    f"{to}/{path.relative_to(folder)}", compression=None
                ) as stream:
                    stream.write(path.read_bytes())
        return f"{self.scheme}://{to}"


@contextlib.contextmanager
def started(scheme: str, folder: Path) -> Iterator[StoreServer]:
    """Start an emulator and its proxy; both end with the block."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [part.format(host=HOST, port=port) for part in COMMANDS[scheme]]
    command[0] = str(Path(sys.executable).parent / command[0])
    with (folder / f"{scheme}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    proxy = _ProxyServer(port)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        _wait_for(port, process)
        yield StoreServer(scheme=scheme, port=port, proxy=proxy)
    finally:
        proxy.shutdown()
        proxy.server_close()
        process.terminate()
        process.wait(10)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 300
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the emulator did not start: {process.args!r}")


@pytest.fixture(scope="session")
def _started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StoreServer]]:
    folder = tmp_path_factory.mktemp("stores")
    with started("s3", folder) as s3, started("gs", folder) as gs:
        yield {"s3": s3, "gs": gs}


@pytest.fixture(params=["s3", "gs"])
def store(
    request: pytest.FixtureRequest,
    _started: dict[str, StoreServer],
    monkeypatch: pytest.MonkeyPatch,
) -> StoreServer:
    """An emulator that the test's process finds, behind a proxy without faults yet."""
    found = _started[request.param]
    found.proxy.faults = Faults()
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def s3(_started: dict[str, StoreServer], monkeypatch: pytest.MonkeyPatch) -> StoreServer:
    """The same for S3 alone, where the two do not differ."""
    found = _started["s3"]
    found.proxy.faults = Faults()
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    return found
