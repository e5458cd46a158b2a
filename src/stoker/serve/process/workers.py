"""The process that starts and watches the workers of a server.

There is one worker, or there are several on the same ports, among which the kernel distributes connections.

This process loads no model. It holds the ports, starts the workers, replaces workers that have died or are stuck, and
ends all workers on a signal.

A single worker inherits the sockets of this process. They also listen while no worker runs, so connections wait for the
next worker. Several workers have sockets of their own: after a worker has died, the other workers get the connections.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stoker.core.errors import EXIT_BUG, ConfigError, Plain
from stoker.core.files import read_json, write_json
from stoker.serve.config import ServeConfig
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.process.gpu_shares import GpuShare, gpu_shares, usable_gpus
from stoker.serve.process.ready import Ready
from stoker.serve.process.rollout_watch import RolloutWatch
from stoker.serve.process.signals import ending_on_signals
from stoker.serve.process.worker import Worker
from stoker.serve.routing import Supervisor
from stoker.serve.runtime.sockets import bound_socket

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""Seconds between two checks for a signal and for workers that have ended."""

_MAX_BACKOFF_S = 30.0
"""Maximum delay before the next worker starts in a slot whose workers keep failing, seconds."""

_LASTED_S = 300.0
"""If a worker ran this long, seconds, the next worker in its slot starts without a delay."""

_GRACE_S = 5.0
"""Time that a worker gets to end in addition to its own drain limit, seconds; then it is killed."""

PARENT = "parent"
"""The label of this process in the metrics."""


def run_workers(
    config: ServeConfig,
    command: Sequence[str],
    on_ready: Callable[[Ready], None] = lambda _: None,
    *,
    supervisor: Supervisor | None = None,
) -> None:
    """Serve with worker processes until SIGTERM or SIGINT. Must be called in the main thread.

    Args:
        config: The configuration.
        command: `stoker serve` with all its options; the options of each worker are added to it.
        on_ready: Called once, when every worker is ready.
        supervisor: Supervises the rollouts; None: no rollouts.

    Raises:
        ConfigError: a port is taken.
        WorkerEndedError: a worker ended before it was ready; its output says why.
    """
    asked_to_end = threading.Event()
    with (
        ending_on_signals(asked_to_end),
        _held(config.host, config.rest_port, shared=config.workers > 1) as rest,
        _held(config.host, config.grpc_port, shared=config.workers > 1) as grpc,
        tempfile.TemporaryDirectory(prefix="stoker-serve-") as folder,
    ):
        rest_port, grpc_port = (each.getsockname()[1] for each in (rest, grpc))
        ports = ["--rest_api_port", str(rest_port), "--port", str(grpc_port)]
        pool = WorkerPool(
            config, [*command, *ports], Path(folder), sockets=(rest, grpc), supervisor=supervisor
        )
        try:
            pool.wait_until_ready(asked_to_end)
            if not asked_to_end.is_set():
                ready = Ready(
                    host=config.host,
                    rest_port=rest_port,
                    grpc_port=grpc_port,
                    pid=os.getpid(),
                    models=pool.models(),
                )
                if config.ready_file is not None:
                    write_json(config.ready_file, ready.as_json())
                on_ready(ready)
            while not asked_to_end.wait(_LOOK_S):
                pool.look()
        finally:
            pool.end()


class WorkerEndedError(Exception):
    """A worker ended before it was ready; it has reported why."""

    def __init__(self, code: int) -> None:
        """Args: code: the worker's exit code; below 0 if a signal ended it."""
        self.code = code if code > 0 else EXIT_BUG
        super().__init__(f"a worker ended by {code}")


class WorkerPool:
    """All workers of a server: a worker in each slot, and workers that are starting or ending."""

    def __init__(
        self,
        config: ServeConfig,
        command: Sequence[str],
        folder: Path,
        *,
        sockets: Sequence[socket.socket] = (),
        supervisor: Supervisor | None = None,
    ) -> None:
        """Start a worker in each slot.

        Args:
            config: The configuration.
            command: Starts a worker.
            folder: The folder that the workers share.
            sockets: Sockets that hold the ports of REST and gRPC; closed by `end`, before the workers end.
            supervisor: Supervises the rollouts; None: no rollouts.
        """
        self._command, self._folder, self._sockets = command, folder, sockets
        self._listeners = [each.fileno() for each in sockets] if config.workers == 1 else []
        self._patience_s = config.lame_duck_s + config.drain_s + _GRACE_S
        gpus = usable_gpus(os.environ)
        # Two workers cannot share a Unix socket: its path belongs to the last process that bound it.
        self._may_overlap = not config.grpc_socket_path
        self._metrics = ServeMetrics(folder, worker=PARENT, max_series=config.max_series)
        self._retired: list[Worker] = []
        self._slots: list[_WorkerSlot] = []
        shares = gpu_shares(
            gpus, workers=config.workers, fraction=config.per_process_gpu_memory_fraction
        )
        for share in shares:
            self._slots.append(_WorkerSlot(self._started(share), share))
        _log_gpus(gpus, shares)
        self._rollouts = (
            None if supervisor is None else RolloutWatch(supervisor, folder, self._living)
        )

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that the first worker serves."""
        return tuple(read_json(self._slots[0].worker.ready_file)["models"])

    def wait_until_ready(self, asked_to_end: threading.Event) -> None:
        """Wait until every worker is ready, or a signal arrives.

        Raises:
            WorkerEndedError: a worker ended before it was ready.
        """
        while not all(slot.worker.child.is_ready for slot in self._slots):
            for slot in self._slots:
                if slot.worker.ended is None and slot.worker.is_stuck:
                    slot.worker.end()  # stuck while it loads a version under rollout
                if slot.worker.ended is None:
                    continue
                if not self._died_of_a_version(slot.worker):
                    raise WorkerEndedError(slot.worker.ended)
                slot.worker = self._started(slot.share)
            if asked_to_end.wait(_LOOK_S):
                return

    def look(self) -> None:
        """Find dead and stuck workers, and continue to replace them."""
        for worker in [w for w in self._retired if w.ended is not None or w.is_overdue]:
            worker.end()
            self._retired.remove(worker)
        for slot in self._slots:
            self._look_at(slot)

    def end(self) -> None:
        """End all workers, and wait until they have ended."""
        if self._rollouts is not None:
            self._rollouts.end()
        # Closed first, because connections would otherwise wait for a worker that never starts.
        for each in self._sockets:
            each.close()
        workers = [*self._retired, *(w for slot in self._slots for w in slot.workers())]
        for worker in workers:
            worker.ask_to_end(self._patience_s)
        for worker in workers:
            worker.end()

    def _look_at(self, slot: _WorkerSlot) -> None:
        worker, following = slot.worker, slot.following
        if following is not None:
            self._bring_in(slot, worker, following)
        elif slot.start_at_s is not None:
            if time.monotonic() >= slot.start_at_s:
                slot.start_at_s = None
                slot.following = self._started(slot.share, "--listen-when-tried")
        elif (reason := self._trouble_of(worker)) is not None:
            _log.error("worker %d %s; a new worker replaces it", worker.child.pid, reason)
            self._died_of_a_version(worker)
            self._metrics.workers_replaced.add(reason=reason)
            slot.start_at_s = time.monotonic() + slot.backoff_s()

    def _trouble_of(self, worker: Worker) -> str | None:
        # A stuck worker may hold all memory of a GPU, so its replacement can start only after its end.
        if worker.is_stuck and (worker.is_stuck_on_gpu or not self._may_overlap):
            worker.ask_to_end(self._patience_s)
            if worker.ended is None and not worker.is_overdue:
                return None  # do not wait: a later call sees that the worker has ended
            worker.end()
            return "is stuck"
        if worker.ended is not None:
            return f"ended by {worker.ended}"
        return "is stuck" if worker.is_stuck else None

    def _bring_in(self, slot: _WorkerSlot, worker: Worker, following: Worker) -> None:
        """Replace a worker when its successor is ready. Until then, a stuck worker still answers what it can."""
        if following.ended is not None:
            _log.error("worker %d ended by %d", following.child.pid, following.ended)
            self._died_of_a_version(following)
            slot.following, slot.start_at_s = None, time.monotonic() + slot.backoff_s()
        elif following.child.is_ready:
            slot.worker, slot.following = following, None
            if worker.ended is None:
                worker.ask_to_end(self._patience_s)
                self._retired.append(worker)

    def _died_of_a_version(self, worker: Worker) -> bool:
        """Whether a worker ended because of a version under rollout. This version then gets no more traffic."""
        return self._rollouts is not None and self._rollouts.died_of_a_version(worker)

    def _living(self) -> list[Worker]:
        """Return the running workers, including workers that are starting."""
        return [w for slot in list(self._slots) for w in slot.workers() if w.ended is None]

    def _started(self, share: GpuShare, *more: str) -> Worker:
        """Start a worker with the lowest number that no running worker has."""
        living = {w.number for slot in self._slots for w in slot.workers() if w.ended is None}
        living |= {worker.number for worker in self._retired if worker.ended is None}
        number = next(n for n in range(len(living) + 1) if n not in living)
        return Worker(
            [*self._command, *more],
            self._folder,
            number,
            share=share,
            listeners=self._listeners,
        )


class _WorkerSlot:
    """Holds one worker, and its successor while the worker is replaced."""

    def __init__(self, worker: Worker, share: GpuShare) -> None:
        self.worker = worker
        self.share = share
        self.following: Worker | None = None
        self.start_at_s: float | None = None
        self._failures = 0
        self._last_failed_s = time.monotonic()

    def workers(self) -> list[Worker]:
        return [self.worker] if self.following is None else [self.worker, self.following]

    def backoff_s(self) -> float:
        """Return the delay before the next start in this slot, seconds: 0, then 1, 3, 7 and so on."""
        now_s = time.monotonic()
        if now_s - self._last_failed_s > _LASTED_S:
            self._failures = 0
        wait_s = min(2.0**self._failures - 1.0, _MAX_BACKOFF_S)
        self._failures += 1
        self._last_failed_s = now_s
        return wait_s


def _log_gpus(gpus: Sequence[str], shares: Sequence[GpuShare]) -> None:
    """Log which worker uses which GPU, and which GPUs are unused."""
    if not gpus:
        return
    for number, share in enumerate(shares):
        limit = f"{share.fraction:.1%} of its memory" if share.fraction else "no memory limit"
        _log.info("worker %d has GPU %s, with %s", number, share.gpu, limit)
    unused = [gpu for gpu in gpus if gpu not in {share.gpu for share in shares}]
    if unused:
        _log.warning(
            "GPU %s is unused, because a worker uses one GPU; --workers %d uses all",
            ", ".join(unused),
            len(gpus),
        )


@contextmanager
def _held(host: str, port: int, *, shared: bool) -> Iterator[socket.socket]:
    """Reserve a port with a bound socket, which gets no connections until it listens.

    Args:
        host: The address.
        port: The port; 0: a free port.
        shared: Whether each worker binds the port, too.
    """
    try:
        held = bound_socket(host, port)
        if shared:
            with held as alone:  # checks that no other server of this user shares the port
                port = alone.getsockname()[1]
            held = bound_socket(host, port, shared=True)
    except OSError as error:
        raise ConfigError(
            "a port must be free on this machine",
            got=Plain(f"{host}:{port} ({error.strerror})"),
            fix="Choose another --rest_api_port and --port, or 0 for free ones.",
        ) from error
    with held:
        yield held
