"""Requests at a fixed rate, and what became of each; one thread, any number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from dataclasses import dataclass, field
from typing import Self

GIVE_UP_S = 40.0
"""A request without an answer is given up then; the server ends it after 30 s."""

LOST = 0
"""Status of a request whose connection ended, or that was given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request."""

    sent_s: float
    """When it was sent, by the monotonic clock."""

    took_s: float
    x: float
    """The input."""

    status: int
    """HTTP status, or `LOST`."""

    key: str
    """The header x-user; empty: none."""

    version: int | None
    """The version that says it answered; None: an error."""

    value: float
    """The prediction, NaN for an error."""

    @property
    def bad(self) -> bool:
        """Whether it is an error, or no number."""
        return self.status != 200 or not math.isfinite(self.value)


@dataclass
class Client:
    """Connections to servers, and all answers of one model."""

    ports: tuple[int, ...]
    """Of the servers: a connection goes to the first one in turn that accepts it."""

    model: str
    answers: list[Answer] = field(default_factory=list)
    """In the order in which they came."""

    under_way: set[asyncio.Task[Answer]] = field(default_factory=set)
    _turn: int = 0
    _idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    async def ask(self, x: float, *, key: str = "", timeout_s: float = GIVE_UP_S) -> Answer:
        """Send a request, and wait for what comes of it."""
        sent_s, status, body = time.monotonic(), LOST, b""
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await self._exchange(x, key)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:  # one that is cancelled counts as lost
            answer = self._keep(sent_s, x=x, key=key, status=status, body=body)
        return answer

    def _keep(self, sent_s: float, *, x: float, key: str, status: int, body: bytes) -> Answer:
        version, value = _read(body) if status == 200 else (None, math.nan)
        answer = Answer(
            sent_s=sent_s,
            took_s=time.monotonic() - sent_s,
            x=x,
            status=status,
            key=key,
            version=version,
            value=value,
        )
        self.answers.append(answer)
        return answer

    async def _exchange(self, x: float, key: str) -> tuple[int, bytes]:
        reader, writer = await self._connection()
        body = json.dumps({"instances": [[x]]})
        head = f"POST /v1/models/{self.model}:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        head += f"\r\nX-User: {key}" if key else ""
        try:
            writer.write(f"{head}\r\n\r\n{body}".encode())
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            headers = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
            content = await reader.readexactly(int(headers[b"content-length"]))
        except BaseException:
            writer.close()
            raise
        if headers.get(b"connection") == b"close":
            writer.close()
        else:
            self._idle.append((reader, writer))
        return int(lines[0].split()[1]), content

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        for _ in self.ports:
            self._turn += 1
            port = self.ports[self._turn % len(self.ports)]
            with contextlib.suppress(ConnectionRefusedError):
                return await asyncio.open_connection("127.0.0.1", port)
        raise ConnectionRefusedError(f"no server listens on {self.ports}")

    def send(self, x: float) -> None:
        """Send a request without waiting for it."""
        task = asyncio.create_task(self.ask(x))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def settle(self, timeout_s: float) -> None:
        """Wait for all requests under way, and give up those that take longer."""
        if self.under_way:
            _, left = await asyncio.wait(self.under_way, timeout=timeout_s)
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def close(self) -> None:
        """Close all connections."""
        writers = [writer for _, writer in self._idle]
        self._idle.clear()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(each.wait_closed() for each in writers), return_exceptions=True)
        await asyncio.sleep(0.1)  # those that ended with an error are closing too


@dataclass
class Stream:
    """An open load: each request at its time, however late the answers are."""

    client: Client
    rate_per_s: float
    outage: float = 0.0
    """Share of the requests that are errors of every version."""

    outage_x: float = 200.0
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End; requests under way are not waited for."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            down = random.random() < self.outage  # noqa: S311 - a load
            x = self.outage_x if down else float(random.randrange(100))  # noqa: S311 - a load
            self.client.send(x)
            due_s = max(due_s + 1.0 / self.rate_per_s, time.monotonic() - 1.0)


def _read(body: bytes) -> tuple[int | None, float]:
    row = json.loads(body)["predictions"][0]
    value = row["answer"][0]
    return int(row["version"][0]), float(value)
