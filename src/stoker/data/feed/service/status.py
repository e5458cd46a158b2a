"""Query a dispatcher and its workers for their state, without TensorFlow.

Source: tensorflow/core/data/service/{dispatcher,worker}.proto, TensorFlow 2.21.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from stoker.core.errors import ConfigError, Plain
from stoker.data.sources.config import split_address

POLL_S = 0.2
"""Pause between queries to a dispatcher that is still starting, seconds."""

_WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"
_TASKS = "/tensorflow.data.WorkerService/GetWorkerTasks"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """One worker that a dispatcher knows."""

    address: str
    """`host:port` at which readers reach the worker."""

    answers: bool
    """Whether the worker answered in time; the dispatcher's list also has killed workers."""

    tasks: int
    """Number of pipelines that the worker runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStatus:
    """A dispatcher and its workers."""

    address: str
    """`host:port` of the dispatcher."""

    workers: tuple[WorkerStatus, ...]
    """All workers that ever reported to the dispatcher, sorted by address."""

    @property
    def answering(self) -> int:
        """Number of workers that answer."""
        return sum(worker.answers for worker in self.workers)

    @property
    def silent(self) -> tuple[str, ...]:
        """Addresses of the workers that do not answer; readers wait for these workers."""
        return tuple(worker.address for worker in self.workers if not worker.answers)


def service_status(address: str, *, timeout_s: float) -> ServiceStatus:
    """Query a dispatcher for its workers, and each worker for its tasks.

    Args:
        address: `host:port` of the dispatcher.
        timeout_s: Maximum wait for each answer, seconds.

    Raises:
        ConfigError: no dispatcher answers at the address.
    """
    host, port = split_address(address)
    where = f"{host}:{port}"
    answer = _ask(where, _WORKERS, timeout_s)
    if answer is None:
        raise ConfigError(
            f"the dispatcher of a tf.data service must answer at {where} within {timeout_s:g} s",
            got=Plain("no answer" if _is_open(host, port) else "nothing listens there"),
            fix="Start it with `stoker data-service start`, or correct the address.",
        )
    found = sorted(_worker_address(worker) for worker in _messages(answer))
    return ServiceStatus(
        address=where, workers=tuple(_worker(address, timeout_s) for address in found)
    )


def wait_until_ready(address: str, *, workers: int, timeout_s: float) -> ServiceStatus:
    """Wait until a dispatcher has at least `workers` workers, and every worker that it knows answers.

    A dispatcher also assigns records to a worker that has ended; readers would wait for that worker forever.

    Raises:
        ConfigError: the dispatcher, or enough workers, do not answer in time, or a known worker is silent.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        left_s = end_s - time.monotonic()
        try:
            status = service_status(address, timeout_s=max(left_s, POLL_S))
        except ConfigError:
            if time.monotonic() + POLL_S > end_s:
                raise
        else:
            if status.answering >= workers and not status.silent:
                return status
            if time.monotonic() + POLL_S > end_s:
                raise _not_ready(status, workers=workers, timeout_s=timeout_s)
        time.sleep(POLL_S)  # workers announce nothing to this process


def _not_ready(status: ServiceStatus, *, workers: int, timeout_s: float) -> ConfigError:
    if status.answering < workers:
        return ConfigError(
            f"the tf.data service at {status.address} must have {workers} worker(s) that "
            f"answer within {timeout_s:g} s",
            got=Plain(f"answers of {status.answering} of {len(status.workers)} known workers"),
            fix="Start a worker with `stoker data-service start --dispatcher "
            f"{status.address} --workers 1`.",
        )
    port = status.silent[0].rpartition(":")[2]
    return ConfigError(
        f"every worker that the tf.data service at {status.address} knows must answer, because "
        "records are assigned to all of them",
        got=Plain(f"no answer from {', '.join(status.silent)}"),
        fix=f"Start the worker again at its old address (--worker-port {port}), or restart the service.",
    )


def _worker(address: str, timeout_s: float) -> WorkerStatus:
    answer = _ask(address, _TASKS, timeout_s)
    tasks = 0 if answer is None else len(_messages(answer))
    return WorkerStatus(address=address, answers=answer is not None, tasks=tasks)


def _worker_address(worker: bytes) -> str:
    return _messages(worker)[0].decode()


def _ask(address: str, method: str, timeout_s: float) -> bytes | None:
    """Send an empty request and return the answer; None if no answer comes in time."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return channel.unary_unary(method)(b"", timeout=timeout_s)
        except grpc.RpcError:
            return None


def _is_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _messages(message: bytes) -> list[bytes]:
    """Return the messages in the first field of a protobuf message.

    The field is found by its number, because TensorFlow's wheel lacks the Python classes of these services.
    """
    fields: Any = UnknownFieldSet(Empty.FromString(message))  # the stubs know no `__iter__`
    return [field.data for field in fields if field.field_number == 1]
