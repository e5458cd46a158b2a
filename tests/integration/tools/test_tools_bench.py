"""The load generator against loopback servers: what stalls, refuses, breaks off; and the real one."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import invoke
from stoker.loadtest.config import LoadConfig
from stoker.loadtest.generator import run_load
from stoker.loadtest.result import LoadResult

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
REQUEST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"

Answer = Callable[[int], bytes | None]
"""Number of a request, over all connections -> the answer; None ends the connection."""


@contextmanager
def answering(answer: Answer) -> Iterator[int]:
    """A server with a thread for each connection; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    counted = iter(range(10**9))
    threads = []

    def serve(connection: socket.socket) -> None:
        # A client that is ended while an answer is on its way resets the connection.
        with (
            suppress(ConnectionResetError),
            connection,
            connection.makefile("rb") as lines,
        ):
            while lines.readline():
                length = 0
                while line := lines.readline().strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                lines.read(length)
                said = answer(next(counted))
                if said is None:
                    return
                try:
                    connection.sendall(said)
                except OSError:
                    return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (accepting, *threads):
            thread.join()


def load(port: int, *, rate: float | None, seconds: float, **more: Any) -> LoadResult:
    config = LoadConfig(rate_per_s=rate, seconds=seconds, **more)
    address = (socket.AF_INET, ("127.0.0.1", port))
    return run_load(config, address, [REQUEST], stopped=lambda: False)


def test_an_open_loop_counts_those_whom_a_stall_kept_waiting() -> None:
    """One answer takes 0.6 s. In that time 60 requests were due, and each of them waited."""

    def stall(number: int) -> bytes:
        if number == 20:
            time.sleep(0.6)  # the stall
        return OK

    with answering(stall) as port:
        result = load(port, rate=100, seconds=1.5, connections=1)
    with answering(stall) as port:
        closed = load(port, rate=None, seconds=1.5, connections=1)

    assert result.sent == 150
    assert result.latencies.count == 150
    assert result.latencies.max_s >= 0.6
    # 50 of the 60 had 0.1 s and more yet to wait: a third of all.
    assert result.latencies.at(100 - 100 * 45 / 150) >= 0.1
    assert any("for one of 1 connections" in note for note in result.notes)
    # The closed loop sent nothing meanwhile, and so sees one slow answer of thousands.
    assert closed.latencies.max_s >= 0.6
    assert closed.latencies.count > 20


def test_every_request_of_the_schedule_is_accounted_for() -> None:
    answers = {
        1: b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
        2: b"HTTP/1.1 404 No\r\nContent-Length: 3\r\n\r\nabc",
        3: b"nonsense\r\n\r\n",
        4: None,
        5: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
        6: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    }
    with answering(lambda number: answers.get(number % 7, OK)) as port:
        result = load(port, rate=210, seconds=1, connections=1)

    counted = {"HTTP 404": 30, "HTTP 503": 30, "connection closed": 30, "no HTTP answer": 30}
    assert result.errors == counted
    assert result.latencies.count == 90
    assert result.sent == 210
    assert result.lag.count == 210


def test_what_is_not_answered_ends_the_run_all_the_same() -> None:
    held = threading.Event()

    def hold(number: int) -> bytes:
        held.wait(30)
        return OK

    began_s = time.monotonic()
    try:
        with answering(hold) as port:
            try:
                result = load(port, rate=50, seconds=0.4, connections=3, timeout_s=0.5)
            finally:
                held.set()
    finally:
        held.set()

    assert sum(result.errors.values()) == result.sent == 20
    assert result.errors["no answer in time"] >= 3
    assert result.latencies.count == 0
    assert time.monotonic() - began_s < 25


def test_a_server_that_is_gone_is_counted_not_hammered() -> None:
    with socket.socket() as holder:  # bound, and not listening
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        closed = load(port, rate=None, seconds=0.5, connections=2)
        opened = load(port, rate=100, seconds=0.2, connections=2)

    assert opened.errors == {"connection refused": 20}
    assert set(closed.errors) == {"connection refused"}
    # Each connection rests 10 ms after a fault.
    assert 1 <= closed.errors["connection refused"] <= 2 * 51


def test_a_large_request_is_sent_piece_by_piece() -> None:
    seen: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))
    body = b"x" * (8 << 20)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            taken = 0
            while taken < len(head) + len(body):
                time.sleep(0.0005)  # so slow that the kernel's buffers fill
                taken += len(connection.recv(1 << 20))
            seen.append(taken)
            connection.sendall(OK)

    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        config = LoadConfig(rate_per_s=1, seconds=1, connections=1)
        address = (socket.AF_INET, listener.getsockname())
        result = run_load(config, address, [head + body], stopped=lambda: False)
    thread.join()

    assert result.latencies.count == 1
    assert seen == [len(head) + len(body)]


def bench(served: Any, *arguments: object) -> int:
    flags = [str(a) for a in arguments]
    return invoke(["bench", served.rest, *flags], debug=False)


def test_bench_against_the_real_server(
    served: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows, picture = tmp_path / "rows.json", tmp_path / "latency.svg"
    rows.write_text("[1.0, NaN, 3.0]")
    code = bench(
        served, "--model", "half", "--data", rows, "--rate", 100, "--seconds", 1, "--json",
        "--plot", picture, "--batch", 2, "--version", 1,
    )  # fmt: skip
    facts = json.loads(capfd.readouterr().out)

    assert code == 0
    assert facts["sent"] == facts["answered"] == 100
    assert facts["errors"] == {}
    ms = facts["latency_ms"]
    assert 0 < ms["p50"] <= ms["p90"] <= ms["p99"] <= ms["p99.9"] <= ms["max"]
    assert ET.parse(picture).getroot().tag.endswith("svg")

    assert bench(served, "--model", "half", "--data", rows, "--closed", "--seconds", 0.3) == 0
    table = capfd.readouterr().out
    for word in ("answers", "p50", "p99.9", "closed loop", "CPU of the load generator"):
        assert word in table


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "--model must name"),
        (("--model", "half"), "needs either --rate or --closed"),
        (("--model", "half", "--rate", "1", "--closed"), "Received: both"),
        (("--model", "half", "--closed"), "neither --data nor --image"),
        (("--model", "no", "--closed", "--data", "ROWS"), "HTTP 404"),
        (("--model", "taxi", "--closed", "--data", "ROWS"), "HTTP 400"),
        (
            ("--model", "half", "--closed", "--data", "ROWS", "--batch", "0"),
            "from 1 to 100,000 rows",
        ),
        # Not made first, and killed for the memory.
        (("--model", "half", "--closed", "--data", "ROWS", "--batch", "1" + 10 * "0"), "from 1 to"),
        (("--model", "half", "--closed", "--data", "ROWS", "--plot", "/proc"), "must be a file"),
        (("--model", "half", "--closed", "--data", "ROWS", "--plot", "/proc/a.svg"), "be written"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    served: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text("[1.0]")

    assert bench(served, *(str(rows) if a == "ROWS" else a for a in arguments)) == 2
    said = capfd.readouterr().err
    assert reason in said
    assert said.count("\n") == 1


def test_ctrl_c_ends_it_with_its_result(tmp_path: Path) -> None:
    rows, busy = tmp_path / "rows.json", threading.Event()
    rows.write_text("[1.0]")
    body = b'{"predictions": [1.0]}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def count(number: int) -> bytes:
        if number == 20:  # the load is under way
            busy.set()
        return answer

    with answering(count) as port:
        command = [sys.executable, "-m", "stoker", "bench", f"127.0.0.1:{port}", "--json"]
        command += ["--model", "half", "--data", str(rows), "--rate", "200", "--seconds", "120"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert busy.wait(300)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    facts = json.loads(out)

    assert process.returncode == 0
    assert facts["stopped"] is True
    assert 0 < facts["answered"] <= facts["sent"] < 200 * 120
    assert "stopped by hand" in facts["notes"][0]
