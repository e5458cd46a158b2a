"""Forwards ports of a job's workers to this machine: a listening socket per port, a connection per client."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.jobs.overview import KnownJob
from stoker.jobs.provider import Phase, ReachesPorts, Wire

LOOPBACK = "127.0.0.1"
"""Address of the listening sockets; other machines cannot reach it."""

BLOCK_BYTES = 1 << 16
"""Maximum number of bytes that are copied at a time."""

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class PortPair:
    """A local port and the worker's port."""

    local: int
    """The local port; 0: any free port."""

    remote: int


def parse_ports(text: str) -> PortPair:
    """Parse `[LOCAL:]REMOTE`; without LOCAL both ports have the same number.

    Raises:
        ConfigError: the text has another form.
    """
    local, _, remote = text.rpartition(":")
    numbers = [local or remote, remote]
    if not all(each.isascii() and each.isdecimal() and len(each) <= 5 for each in numbers):
        raise ConfigError("a port is [LOCAL:]REMOTE", got=text, fix="E.g. 9100, or 8080:9100.")
    pair = PortPair(local=int(numbers[0]), remote=int(remote))
    if not (0 <= pair.local <= MAX_PORT and 1 <= pair.remote <= MAX_PORT):
        raise ConfigError(f"a port is a number from 1 to {MAX_PORT}; LOCAL may be 0", got=text)
    return pair


def reach_worker(known: KnownJob, worker: int) -> Callable[[int], Wire] | None:
    """Return a function that connects to a port of a worker; None if the target's jobs run on this machine.

    For each connection the worker is located again: after a restart of the job it may run on another machine.

    Raises:
        ConfigError: the job or the worker does not run, or the job's target is unknown here.
        UserError: the target does not answer.
    """
    job = known.job
    if known.target is None:
        raise ConfigError(
            f"job {job.id} must be at a target that is known here", got=Plain(known.state.reason)
        )
    if worker >= job.resources.workers:
        last = job.resources.workers - 1
        raise ConfigError(f"the workers of job {job.id} are 0 to {last}", got=worker)
    if known.state.phase is not Phase.RUNNING:
        why = f": {known.state.reason}" if known.state.reason else ""
        raise ConfigError(
            f"job {job.id} must run before its ports are reached",
            got=Plain(f"it is {known.state.phase}{why}"),
            fix=f"See what it does: stoker jobs show {job.id}.",
        )
    provider = known.target.open()
    if not isinstance(provider, ReachesPorts):
        return None
    provider.where_is(job.id, worker)
    return lambda port: provider.connect(provider.where_is(job.id, worker), port)


@contextlib.contextmanager
def forwarded(
    pairs: Sequence[PortPair],
    connect: Callable[[int], Wire],
    *,
    on_problem: Callable[[UserError], None],
) -> Iterator[list[int]]:
    """Forward ports inside the `with` block; yield the local ports in the order of `pairs`.

    Args:
        pairs: The ports.
        connect: Connects to a port of the worker.
        on_problem: Called with the reason when a connection fails; the other connections continue.

    Raises:
        ConfigError: a local port is in use.
    """
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(_listening(pair.local)) for pair in pairs]
        for pair, listener in zip(pairs, listeners, strict=True):
            forwarding = _Forwarding(listener, pair.remote, connect, on_problem)
            threading.Thread(target=forwarding.serve, daemon=True).start()
        yield [listener.getsockname()[1] for listener in listeners]


@contextlib.contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"port {port} of {LOOPBACK} must be free",
                got=Plain(error.strerror or str(error)),
                fix="Choose another local port, LOCAL:REMOTE; with 0, a free port is chosen.",
            ) from None
        yield listener
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # makes the thread that accepts connections end


@dataclass(frozen=True, slots=True)
class _Forwarding:
    listener: socket.socket
    remote: int
    connect: Callable[[int], Wire]
    on_problem: Callable[[UserError], None]

    def serve(self) -> None:
        """Accept connections until the listener is shut down."""
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                threading.Thread(target=self._pass_on, args=(near,), daemon=True).start()

    def _pass_on(self, near: socket.socket) -> None:
        with contextlib.closing(near):
            try:
                far = self.connect(self.remote)
            except UserError as error:
                self.on_problem(error)
                return
            with contextlib.closing(far):
                back = threading.Thread(target=_copy, args=(far, near), daemon=True)
                back.start()
                _copy(near, far)
                back.join()


def _copy(source: Wire, sink: Wire) -> None:
    """Copy data until the source ends or a connection breaks; then tell the sink that no more data follows."""
    with contextlib.suppress(OSError):
        while block := source.recv(BLOCK_BYTES):
            sink.sendall(block)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
