"""Checks that all workers are about to train the same model, with the same data and settings."""

from __future__ import annotations

import json
import logging
from typing import Any

import tensorflow as tf

from stoker.cluster.resolver import LOOPBACK
from stoker.core.errors import Plain, UserError
from stoker.data.feed.service.server import listening_ports
from stoker.train.checkpoints.identity import Identity, IdentityChange, changes
from stoker.train.setup.strategy import Distribution

_LOG = logging.getLogger(__name__)

SHOWN_CHARS = 16
"""Maximum number of characters of a value in a message: enough to distinguish two hashes."""

NAMED = 2
"""Maximum number of differences that a message names, so that it fits in a line."""


def handshake(distribution: Distribution, identity: Identity) -> None:
    """Compare the identities of all workers' runs, before anything else.

    They are exchanged with the strategy's own all-gather. So this works with any launcher, and it shows that
    the workers can reach each other. If all workers are on this machine, this worker's port is first closed on
    every network interface but the loopback, because TensorFlow listens on all addresses, and any client can
    run operations.

    Args:
        distribution: The strategy, and this worker's rank.
        identity: The identity of this worker's run; JSON values.

    Raises:
        UserError: The identities differ. It is raised on every worker, and names the differences, the
            workers and their values.
    """
    if distribution.workers == 1:
        return
    _keep_to_this_machine(distribution)
    identities = _gather(distribution, identity)
    for rank in sorted(identities):
        if differing := changes(identities[0], identities[rank]):
            raise _disagreement(differing, rank)


def _keep_to_this_machine(distribution: Distribution) -> None:
    jobs = distribution.strategy.cluster_resolver.cluster_spec().as_dict()
    if all(a.startswith(f"{LOOPBACK}:") for addresses in jobs.values() for a in addresses):
        try:
            listening_ports(only_loopback=True)
        except PermissionError:
            _LOG.warning(
                "the port of this worker is open to other machines, because on this kernel only root can "
                "close it"
            )


def _gather(distribution: Distribution, identity: Identity) -> dict[int, Identity]:
    message = json.dumps({"rank": distribution.worker, "identity": identity}, sort_keys=True)
    # Send bytes as float32, which represents them exactly: every kind of collective supports it.
    letters = tf.constant(list(message.encode() + b"\n"), tf.float32)

    @tf.function
    def exchange() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(letters, axis=0)

    strategy = distribution.strategy
    received = strategy.experimental_local_results(strategy.run(exchange))[0]
    lines = bytes(received.numpy().astype("uint8")).decode().splitlines()
    parsed = [json.loads(line) for line in lines]
    # All replicas of a worker send the same text, so take the first one's.
    return {one["rank"]: one["identity"] for one in parsed}


def _disagreement(differing: tuple[IdentityChange, ...], rank: int) -> UserError:
    named = [f"{change.part} {change.name}" for change in differing]
    values = [
        f"{name} is {_shown(change.before)} on worker 0 and {_shown(change.now)} on worker {rank}"
        for name, change in zip(named, differing, strict=True)
    ]
    return UserError(
        f"all workers must agree on {' and '.join(named[:NAMED])}",
        got=Plain("; ".join(values[:NAMED])),
        fix="Give every worker the same files, settings and versions.",
    )


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    text = str(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
