"""Workers tell each other what they are about to train, and end where they do not agree."""

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
"""Of a value that differs: enough to tell two hashes apart."""

NAMED = 2
"""Most differences that are named: one is enough to look, and a line is short."""


def handshake(distribution: Distribution, identity: Identity) -> None:
    """Compare what all workers are about to train, before anything else is done.

    The identities travel by the strategy's own all-gather, so it works under whatever started the
    workers, and shows that they can reach each other. Where all of them are on this machine, its
    port is first taken off every network device but the loopback one: TensorFlow listens on all
    addresses, and whoever reaches it can run operations.

    Args:
        distribution: The strategy, and this worker's place in it.
        identity: What this worker is about to train, as a checkpoint knows it; JSON values.

    Raises:
        UserError: on every worker: what differs, between which, and both values.
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
                "this kernel lets only root keep a worker's port to this machine: it is open"
            )


def _gather(distribution: Distribution, identity: Identity) -> dict[int, Identity]:
    said = json.dumps({"rank": distribution.worker, "identity": identity}, sort_keys=True)
    # Float32 is what every kind of collective can send, and holds a byte exactly.
    letters = tf.constant(list(said.encode() + b"\n"), tf.float32)

    @tf.function
    def tell() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(letters, axis=0)

    strategy = distribution.strategy
    heard = strategy.experimental_local_results(strategy.run(tell))[0]
    lines = bytes(heard.numpy().astype("uint8")).decode().splitlines()
    parsed = [json.loads(line) for line in lines]
    # Each replica of a worker says the same.
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
