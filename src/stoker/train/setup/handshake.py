"""Checks that all workers are about to train the same."""

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
"""Most characters of a value: enough to distinguish two hashes."""

NAMED = 2
"""Most differences in a message: one is enough to start with, and a line is short."""


def handshake(distribution: Distribution, identity: Identity) -> None:
    """Compare what all workers are about to train, before anything else.

    The identities are exchanged with the strategy's own all-gather, so this works however the
    workers were started, and shows that they can reach each other. If all are on this machine, its
    port is first closed on every network interface but the loopback: TensorFlow listens on all
    addresses, and any client can run operations.

    Args:
        distribution: The strategy, and this worker's rank.
        identity: The identity of this worker's run; JSON values.

    Raises:
        UserError: On every worker: the difference, the workers, and both values.
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
                "this kernel lets only root close a worker's port to other machines: it is open"
            )


def _gather(distribution: Distribution, identity: Identity) -> dict[int, Identity]:
    message = json.dumps({"rank": distribution.worker, "identity": identity}, sort_keys=True)
    # Every kind of collective can send float32, which represents a byte exactly.
    letters = tf.constant(list(message.encode() + b"\n"), tf.float32)

    @tf.function
    def exchange() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(letters, axis=0)

    strategy = distribution.strategy
    received = strategy.experimental_local_results(strategy.run(exchange))[0]
    lines = bytes(received.numpy().astype("uint8")).decode().splitlines()
    parsed = [json.loads(line) for line in lines]
    # All replicas of a worker send the same.
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
