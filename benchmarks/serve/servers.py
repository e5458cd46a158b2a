"""Servers as processes that are pinned, stopped while another is measured, and ended for certain."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-bench-serve"

SERVER_CORE, CLIENT_CORE = 0, 1

_START_S = 180.0
"""Longest until a server answers."""

_END_S = 5.0
"""Time for a server to end after SIGTERM, seconds."""

PEERS = {
    "fastapi": "FastAPI + uvicorn",
    "kserve": "KServe",
    "mlserver": "MLServer",
    "bentoml": "BentoML",
    "litserve": "LitServe",
    "ray": "Ray Serve",
}
"""Its environment and its file -> what it is called."""


class Server:
    """A process, and all that it started."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        cores: Sequence[int] = (SERVER_CORE,),
    ) -> None:
        """Args: name: what it is called; command; port: of its HTTP; log: its output; cores."""
        self.name, self.port, self._log = name, port, log
        where = ",".join(map(str, cores))
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["taskset", "-c", where, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, answers: Callable[[], bool]) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it ended, or it took too long; the end of its log is in the message.
        """
        until_s, said = time.monotonic() + _START_S, "nothing"
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                if answers():
                    return
            except (OSError, http.client.HTTPException) as error:
                said = str(error)
            time.sleep(0.2)  # what takes seconds is looked at now and then
        tail = self._log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{self.name} says {said}, and its log ends so:\n{tail}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let a server that is stopped run for a while."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of it."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """Every process of it: those of its session, and all that they started."""
        found = {self._process.pid}
        parents = _parents()
        grown = True
        while grown:
            more = {pid for pid, (parent, session) in parents.items() if {parent, session} & found}
            grown = not more <= found
            found |= more
        return sorted(found & parents.keys())

    def cpu_s(self) -> float:
        """CPU time that its living processes have used, seconds."""
        return sum(_cpu_s(pid) for pid in self.pids())

    def rss_bytes(self) -> int:
        """Memory of its processes."""
        return sum(_rss_bytes(pid) for pid in self.pids())

    def stop(self) -> None:
        """End all of it."""
        self.signal(signal.SIGCONT)
        pids = self.pids()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        for pid in {*pids, *self.pids()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _parents() -> dict[int, tuple[int, int]]:
    """Every living process -> its parent, its session."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields:
                found[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return found


def _stat(pid: int) -> list[str]:
    """What /proc says of a process from its state on; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _rss_bytes(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def free_port() -> int:
    """A free port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def post(
    port: int,
    path: str,
    body: bytes,
    headers: Mapping[str, str] = {},
) -> tuple[int, bytes]:
    """Send a request; the status and the body that come back."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST" if body else "GET", path, body or None, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def ours(
    root: Path,
    log: Path,
    *options: str,
    workers: int = 1,
    cores: Sequence[int] = (SERVER_CORE,),
    name: str = "stoker",
) -> tuple[Server, int]:
    """`stoker serve` on a repository, and its gRPC port."""
    options = (*options, "--workers", str(workers))
    return start_ours([str(root)], log, *options, cores=cores, name=name)


def start_ours(
    served: Sequence[str],
    log: Path,
    *options: str,
    cores: Sequence[int] = (SERVER_CORE,),
    name: str = "stoker",
) -> tuple[Server, int]:
    """`stoker serve` on what these arguments name, and its gRPC port."""
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "stoker", "serve", *served, *options]
    command += ["--rest_api_port", str(port), "--port", str(grpc_port)]
    return Server(name, command, port=port, log=log, cores=cores), grpc_port


def peer(name: str, root: Path, log: Path) -> Server:
    """A peer in its own environment.

    Raises:
        SystemExit: there is none.
    """
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            f"bench-serve: {ENVIRONMENTS / name} is missing; make it by "
            "python benchmarks/serve/environments.py, or leave it out by --peers"
        )
    port = free_port()
    script = str(HERE / "peers" / f"with_{name}.py")
    return Server(PEERS[name], [str(python), script, str(port), str(root)], port=port, log=log)


def of_ours(name: str, script: str, *arguments: str, log: Path) -> Server:
    """A script in this folder that takes a port first."""
    port = free_port()
    command = [sys.executable, str(HERE / script), str(port), *arguments]
    return Server(name, command, port=port, log=log)
