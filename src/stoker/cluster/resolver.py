"""The tasks of a training run and their addresses: TensorFlow's `TF_CONFIG`.

Source: TensorFlow, "Multi-worker training with Keras", section `TF_CONFIG`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from stoker.core.errors import BusyError, ConfigError, Plain


def why_taken(port: int) -> str | None:
    """Return why a TensorFlow server cannot use a port alone; None if it can.

    TensorFlow binds a port on all addresses, and would silently share it with another process (SO_REUSEPORT). This
    function binds the port without listening on it, so nothing can connect; binding fails if another process listens.
    """
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - the address that TensorFlow will use
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
    return None


LOOPBACK = "127.0.0.1"
"""Address that only processes on this machine can reach."""

VARIABLE = "TF_CONFIG"
"""Environment variable in which launchers describe the cluster to TensorFlow."""

Job = Literal["chief", "worker", "ps", "evaluator"]
"""The role of a process, as in TF_CONFIG."""

_FIX = "Unset it to train on this machine alone, or let `stoker train --workers N` set it."


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """The addresses of all tasks of a run, and the task of this process."""

    workers: tuple[str, ...] = ()
    """`host:port` of each worker, in the order of the indices."""

    servers: tuple[str, ...] = ()
    """`host:port` of each parameter server."""

    chief: tuple[str, ...] = ()
    """`host:port` of the chief, if there is a separate one; otherwise worker 0 is the chief."""

    evaluator: tuple[str, ...] = ()
    """`host:port` of the evaluator, which is not part of the training cluster."""

    job: Job = "worker"
    """The role of this process."""

    index: int = 0
    """Index of this process among the processes with this role."""

    def __post_init__(self) -> None:
        for job, addresses in self.jobs.items():
            for address in addresses:
                _check_address(address, job)
        twice = [a for a, n in Counter(sum(self.jobs.values(), ())).items() if n > 1]
        if twice:
            raise ConfigError("TF_CONFIG must not name an address twice", got=twice[0], fix=_FIX)
        if len(self.chief) > 1:
            raise ConfigError(
                "TF_CONFIG must name at most one chief", got=list(self.chief), fix=_FIX
            )
        # An evaluator need not be listed, because no task calls it.
        known = len(self.jobs.get(self.job, ()))
        if not 0 <= self.index < known and self.job != "evaluator":
            raise ConfigError(
                f"TF_CONFIG: task.index must be one of the cluster's {known} {self.job} tasks",
                got=self.index,
                fix=_FIX,
            )

    @property
    def jobs(self) -> dict[str, tuple[str, ...]]:
        """Return role -> addresses in TensorFlow's form, without roles that no process has."""
        parts = {
            "chief": self.chief,
            "worker": self.workers,
            "ps": self.servers,
            "evaluator": self.evaluator,
        }
        return {job: addresses for job, addresses in parts.items() if addresses}

    @property
    def trainers(self) -> int:
        """Number of processes that compute steps: the chief and the workers."""
        return len(self.chief) + len(self.workers)

    @property
    def rank(self) -> int:
        """Rank of this process among the trainers; the chief is 0."""
        return self.index if self.job == "chief" else len(self.chief) + self.index

    @property
    def name(self) -> str:
        """Name of this process for messages, e.g. `worker 1`."""
        return self.job if self.job == "chief" else f"{self.job} {self.index}"

    @property
    def leads(self) -> bool:
        """Whether this process is the chief, or, without a separate chief, worker 0."""
        return self.job == "chief" or (self.name == "worker 0" and not self.chief)

    @property
    def leader(self) -> str:
        """Name of the leading process for messages."""
        return "the chief" if self.chief else "worker 0"

    @property
    def near(self) -> int:
        """Number of trainers on this process's machine, including itself."""
        host = self.address.rpartition(":")[0]
        return sum(a.rpartition(":")[0] == host for a in (*self.chief, *self.workers))

    @property
    def serves(self) -> bool:
        """Whether this process works for a chief until a signal ends this process: a parameter server or its worker."""
        return self.job != "chief" and bool(self.servers)

    @property
    def address(self) -> str:
        """`host:port` at which this process listens."""
        return self.jobs[self.job][self.index]

    def to_tf_config(self) -> str:
        """Return the value of `TF_CONFIG` for this process."""
        return json.dumps(
            {"cluster": self.jobs, "task": {"type": self.job, "index": self.index}}, sort_keys=True
        )


def read_tf_config(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Return the cluster that `TF_CONFIG` describes; None if the variable is not set.

    Raises:
        ConfigError: `TF_CONFIG` is set and invalid.
    """
    text = environ.get(VARIABLE, "").strip()
    return parse_tf_config(text) if text else None


def parse_tf_config(text: str) -> ClusterSpec:
    """Read a `TF_CONFIG`.

    Args:
        text: `{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}`;
            roles are chief, worker, ps and evaluator; other keys are ignored.

    Raises:
        ConfigError: the text is not a valid `TF_CONFIG`.
    """
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"TF_CONFIG must be JSON ({error})", got=text, fix=_FIX) from None
    cluster = _section(raw, "cluster")
    task = _section(raw, "task")
    for job, addresses in cluster.items():
        if job not in get_args(Job):
            raise ConfigError(
                f"TF_CONFIG: a job must be one of {', '.join(get_args(Job))}", got=job, fix=_FIX
            )
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ConfigError(
                f"TF_CONFIG: cluster.{job} must be a list of host:port", got=addresses, fix=_FIX
            )
    return ClusterSpec(
        workers=tuple(cluster.get("worker", ())),
        servers=tuple(cluster.get("ps", ())),
        chief=tuple(cluster.get("chief", ())),
        evaluator=tuple(cluster.get("evaluator", ())),
        job=_job(task),
        index=_index(task),
    )


def local_cluster(
    ports: Sequence[int], *, workers: int, servers: int = 0
) -> tuple[ClusterSpec, ...]:
    """Return the tasks of a run on one machine, the chief first.

    Args:
        ports: One port per process: `workers` ports; with parameter servers, which need a separate chief, `workers +
            servers + 1` ports.
        workers: Number of workers.
        servers: Number of parameter servers.
    """
    addresses = [f"{LOOPBACK}:{port}" for port in ports]
    chief = addresses[:1] if servers else []
    rest = addresses[len(chief) :]
    whole = ClusterSpec(
        chief=tuple(chief),
        workers=tuple(rest[:workers]),
        servers=tuple(rest[workers : workers + servers]),
    )
    tasks = [(job, index) for job in whole.jobs for index in range(len(whole.jobs[job]))]
    return tuple(replace(whole, job=_job({"type": job}), index=index) for job, index in tasks)


@contextlib.contextmanager
def held_ports(count: int, *, address: str = LOOPBACK) -> Iterator[list[int]]:
    """Yield free ports of an address, and keep other processes from getting them until the block ends.

    A socket is bound to each port, but does not listen. TensorFlow's server can still bind the port, because both
    sockets set SO_REUSEADDR. A process that lets the kernel choose a free port does not get it.
    """
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for holder in sockets:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((address, 0))
        yield [holder.getsockname()[1] for holder in sockets]


def require_own_port(cluster: ClusterSpec) -> None:
    """Check that no other process listens on this process's port.

    Raises:
        BusyError: the port is taken.
    """
    port = int(cluster.address.rpartition(":")[2])
    if why := why_taken(port):
        raise BusyError(
            f"port {port} of {cluster.job} {cluster.index} in TF_CONFIG must be free",
            got=Plain(why),
            fix="Stop the process that listens there, or set another port in the TF_CONFIG of all workers.",
        )


def _section(raw: Any, name: str) -> dict[str, Any]:
    section = raw.get(name) if isinstance(raw, dict) else None
    if not isinstance(section, dict) or not section:
        raise ConfigError(
            f"TF_CONFIG must hold a mapping `{name}`",
            got=Plain("none") if section is None else section,
            fix=_FIX,
        )
    return section


def _job(task: dict[str, Any]) -> Job:
    for job in get_args(Job):
        if task.get("type") == job:
            return job
    raise ConfigError(
        f"TF_CONFIG: task.type must be one of {', '.join(get_args(Job))}",
        got=task.get("type"),
        fix=_FIX,
    )


def _index(task: dict[str, Any]) -> int:
    index = task.get("index")
    if isinstance(index, str) and index.isdecimal():
        return int(index)
    if isinstance(index, bool) or not isinstance(index, int):
        raise ConfigError("TF_CONFIG: task.index must be a whole number", got=index, fix=_FIX)
    return index


def _check_address(address: str, job: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"TF_CONFIG: cluster.{job} must hold host:port", got=address, fix=_FIX)
