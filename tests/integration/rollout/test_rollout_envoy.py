"""An exported split in a real Envoy, which is started and counted."""

from __future__ import annotations

import http.client
import http.server
import math
import os
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from stoker.cli.main import invoke
from stoker.rollout.control.controller import Event, change
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase, RolloutState

TOOLS = Path(__file__).parents[3] / ".tools" / "envoy"
REQUESTS = 2_000
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def envoy() -> Path:
    """The program."""
    found = sorted(TOOLS.glob("lib/python*/site-packages/envoy/_bin/envoy"))
    if not found:
        if os.environ.get("CI") == "true":
            pytest.fail(f"must be there in CI: Envoy below {TOOLS}")
        pytest.skip(f"{TOOLS} must be an environment with requirements-envoy.lock")
    return found[0]


@contextmanager
def server_of(version: int) -> Iterator[int]:
    """A server that answers with its version."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", "1")
            self.end_headers()
            self.wfile.write(str(version).encode())

        def log_message(self, *_: object) -> None:
            pass

    class Quick(http.server.ThreadingHTTPServer):
        daemon_threads = True

    Handler.wbufsize = -1  # one packet an answer
    with Quick(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@dataclass
class Gateway:
    """A running Envoy, and the repository whose split it has."""

    models: Path
    routes: Path
    port: int

    def follow(self, state: RolloutState) -> None:
        """Make a state the newest, and write the split for Envoy."""
        files = StateFiles(self.models / "m" / ".rollout")
        change(files, files.latest(), state, Event(what="test", who="test", why="", at_s=0.0))
        assert self.export("envoy-routes", "--out", str(self.routes)) == 0

    def export(self, to: str, *flags: str) -> int:
        models = ["--models", str(self.models)]
        return invoke(["rollout", "export", "m", "--to", to, *models, *flags], debug=False)

    def ask(self, many: list[dict[str, str]]) -> list[int]:
        """The version that answered each request; its headers are given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        versions = []
        for headers in many:
            connection.request("POST", "/v1/models/m:predict", b"{}", headers)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, body
            versions.append(int(body))
        connection.close()
        return versions

    def until(self, headers: list[dict[str, str]], *, least: int, most: int) -> list[int]:
        """Ask until Envoy has taken up a split that sends so many of these requests to version 2."""
        end_s = time.monotonic() + LIMIT_S
        while not least <= (versions := self.ask(headers)).count(2) <= most:
            assert time.monotonic() < end_s, Counter(versions)
            time.sleep(0.05)
        return versions


def running(stages: str, *, stage: int = 0, key: str = "") -> RolloutState:
    return RolloutState(
        rollout=1,
        baseline=1,
        candidate=2,
        settings=RolloutSettings(stages=stages, key=key),
        began_s=time.time(),
        phase=Phase.RUNNING,
        stage=stage,
    )


def is_share(counted: int, share: float, *, of: int = REQUESTS) -> bool:
    """Whether a count is within four standard errors."""
    return abs(counted / of - share) <= 4 * math.sqrt(share * (1 - share) / of)


@pytest.fixture(scope="module")
def gateway(envoy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("envoy")
    for version in (1, 2):
        (folder / "models" / "m" / str(version)).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = Gateway(models=folder / "models", routes=folder / "routes.yaml", port=port)
    found.follow(running("10,50,100"))
    bootstrap = folder / "envoy.yaml"
    with server_of(1) as first, server_of(2) as second:
        backends = [
            f"--backend={version}=127.0.0.1:{at}" for version, at in ((1, first), (2, second))
        ]
        places = [f"--listen=127.0.0.1:{port}", f"--routes={found.routes}", f"--out={bootstrap}"]
        assert found.export("envoy", *backends, *places) == 0
        command = [str(envoy), "-c", str(bootstrap), "--concurrency", "1", "--disable-hot-restart"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end_s = time.monotonic() + LIMIT_S
            while True:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < end_s, (folder / "log").read_text()
                try:
                    found.ask([{}])
                    break
                except (ConnectionError, http.client.HTTPException):
                    time.sleep(0.05)
            yield found
        finally:
            process.terminate()
            process.wait()


def test_envoy_splits_as_the_stage_says_and_follows_it_without_a_restart(gateway: Gateway) -> None:
    gateway.follow(running("10,50,100"))
    gateway.until([{}] * 200, least=2, most=60)
    first = Counter(gateway.ask([{}] * REQUESTS))
    gateway.follow(running("10,50,100", stage=1))
    gateway.until([{}] * 200, least=60, most=200)
    second = Counter(gateway.ask([{}] * REQUESTS))

    assert is_share(first[2], 0.1), first
    assert is_share(second[2], 0.5), second


def test_a_stage_of_a_header_is_for_requests_with_it(gateway: Gateway) -> None:
    gateway.follow(running("header=x-canary,10,100"))
    gateway.until([{"x-canary": "yes"}] * 20, least=20, most=20)

    assert set(gateway.ask([{"X-Canary": "1"}, {"x-canary": ""}] * 50)) == {2}
    assert set(gateway.ask([{}, {"x-canary-not": "1"}] * 50)) == {1}


@pytest.mark.parametrize("key", ["x-user", "cookie:uid"])
def test_a_user_stays_with_a_version_and_one_percent_is_part_of_ten(
    gateway: Gateway, key: str
) -> None:
    """Of 500 users, the shares are within four standard errors."""
    users = [f"user-{number}" for number in range(500)]
    cookie = key.startswith("cookie:")
    headers = [{"cookie": f"a=b; uid={user}"} if cookie else {"x-user": user} for user in users]

    gateway.follow(running("1,100", key=key))
    few = dict(zip(users, gateway.until(headers, least=1, most=14), strict=True))
    again = dict(zip(users, gateway.ask(headers), strict=True))
    gateway.follow(running("10,100", key=key))
    many = dict(zip(users, gateway.until(headers, least=23, most=77), strict=True))

    assert few == again
    assert all(many[user] == 2 for user, version in few.items() if version == 2)
    assert set(gateway.ask([{}, {"cookie": "uida=1"}] * 100)) == {1}
