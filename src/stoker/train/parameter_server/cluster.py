"""Runs workers and parameter servers of a training run, and connects the chief to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tensorflow as tf

from stoker.cluster.resolver import LOOPBACK, ClusterSpec
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.user_code import first_line
from stoker.data.feed.service.server import listening_ports

PROTOCOL = "grpc"
"""The only protocol that TensorFlow's wheels contain; it is neither encrypted nor authenticated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConnection:
    """A chief's connection to its workers and servers."""

    strategy: tf.distribute.ParameterServerStrategy
    """Places variables on the servers in turn; models are built in its scope."""

    coordinator: tf.distribute.coordinator.ClusterCoordinator
    """Runs functions on free workers, and repeats them if a worker died."""

    workers: int
    """Number of workers."""


def serve_parameter_role(cluster: ClusterSpec) -> None:
    """Serve as a worker or a parameter server until the process ends; this needs no user code.

    A process that was killed should be started again with the same arguments. The chief uses a worker that
    returns. If a server is killed, its variables are lost, and the run fails.

    Args:
        cluster: All tasks, and the task of this process.

    Raises:
        ConfigError: This process is neither a worker nor a parameter server.
        UserError: The address is not on this machine, or is in use.
    """
    if not cluster.serves:
        raise ConfigError(
            "only a worker or a parameter server can be started here",
            got=Plain(f"task {cluster.job} in TF_CONFIG"),
        )
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(_jobs(cluster)),
            job_name=cluster.job,
            task_index=cluster.index,
            protocol=PROTOCOL,
        )
    except tf.errors.OpError as error:
        raise UserError(
            f"{cluster.name} must be able to listen at {cluster.address}",
            got=Plain(first_line(error)),
            fix="Stop the process that listens there, or use another port in TF_CONFIG.",
        ) from error
    # Close the port for other machines: TensorFlow listens on every address, and any client can run operations.
    listening_ports(only_loopback=cluster.address.startswith(f"{LOOPBACK}:"))
    server.join()


def connect(cluster: ClusterSpec) -> ClusterConnection:
    """Connect to every worker and server; call this before any other TensorFlow operation.

    It waits for processes that are still starting.

    Args:
        cluster: All tasks; this process is the chief.

    Raises:
        ConfigError: The chief, the workers or the servers are missing, or cannot be reached.
    """
    if cluster.job != "chief" or not cluster.workers or not cluster.servers:
        raise ConfigError(
            "train.strategy: parameter_server needs a chief, workers and servers in TF_CONFIG",
            got=Plain(f"{cluster.name} of {', '.join(cluster.jobs)}"),
            fix="`stoker train --workers 2 --parameter-servers 1` starts them here.",
        )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(_jobs(cluster)), task_type="chief", task_id=0, rpc_layer=PROTOCOL
    )
    try:
        strategy = tf.distribute.ParameterServerStrategy(resolver)
    except (RuntimeError, ValueError, tf.errors.OpError) as error:
        raise ConfigError(
            "the chief must reach every worker and parameter server of TF_CONFIG",
            got=Plain(first_line(error)),
            fix="Start the missing processes, or correct their addresses.",
        ) from error
    if strategy.num_replicas_in_sync > 1:
        raise ConfigError(
            "train.strategy: parameter_server needs workers with at most one GPU",
            got=Plain(f"{strategy.num_replicas_in_sync} GPUs a worker"),
            fix="Start a worker for each GPU, with CUDA_VISIBLE_DEVICES.",
        )
    return ClusterConnection(
        strategy=strategy,
        coordinator=tf.distribute.coordinator.ClusterCoordinator(strategy),
        workers=len(cluster.workers),
    )


@contextmanager
def server_loss_as_error() -> Iterator[None]:
    """Report a lost server as an error in one line. A lost worker is not an error: its work is repeated.

    Raises:
        UserError: A server is lost, and the variables with it.
    """
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        if "/job:ps" not in str(error):
            raise
        raise UserError(
            "a parameter server is lost, and with it the variables",
            got=Plain("no connection to it"),
            fix="Start all processes again: training resumes from the last checkpoint.",
        ) from error


def _jobs(cluster: ClusterSpec) -> dict[str, list[str]]:
    # An evaluator is not part of the training cluster.
    return {job: list(names) for job, names in cluster.jobs.items() if job != "evaluator"}
