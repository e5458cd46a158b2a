"""Connects to a port of a worker's node: directly, or through ssh to the login node."""

from __future__ import annotations

import re
import socket

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.jobs.job import Job
from stoker.jobs.provider import JobState, Phase, Wire
from stoker.jobs.providers.slurm.machine import Call, Machine
from stoker.jobs.providers.slurm.remote.ssh import Ssh
from stoker.jobs.providers.slurm.script import workers_per_node
from stoker.jobs.providers.slurm.settings import SlurmTarget

ANSWER_S = 60.0
"""Maximum wait for `scontrol`, seconds."""

CONNECT_S = 10.0
"""Maximum wait for a connection, seconds."""

_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


def address_of(
    job: Job, worker: int, state: JobState, *, target: SlurmTarget, machine: Machine
) -> str:
    """Return the address of a worker's node; srun distributes ranks over the nodes in their order.

    Raises:
        ConfigError: the worker does not run.
    """
    nodes = ",".join(state.nodes)
    found: list[str] = []
    if state.phase is Phase.RUNNING and nodes:
        call = Call(argv=("scontrol", "--oneliner", "show", "node", nodes), answer_s=ANSWER_S)
        found = _ADDRESS.findall(machine.run(call).out)
    index = worker // workers_per_node(job, target)
    if index >= len(found):
        raise ConfigError(
            f"worker {worker} of job {job.id} must run",
            got=Plain(f"the job is {state.phase}, on {nodes or 'no node'}"),
            fix=f"See what it does: stoker jobs show {job.id}.",
        )
    return found[index]


def connect(machine: Machine, host: str, port: int) -> Wire:
    """Connect to a port of a node.

    Raises:
        UserError: nothing listens on the port, or the node is unreachable.
    """
    if isinstance(machine, Ssh):
        return machine.connect(host, port)
    try:
        made = socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        raise UserError(
            f"the worker must listen on port {port} of {host}",
            got=Plain(error.strerror or str(error)),
            fix="A server that listens on 127.0.0.1 cannot be reached: set train.metrics_host, or "
            "`--host` of TensorBoard.",
        ) from None
    made.settimeout(None)
    return made
