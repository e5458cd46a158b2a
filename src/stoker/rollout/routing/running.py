"""Counts running requests that are already slow, because a version that hangs gives no answers to count."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stoker.rollout.counts.counted_keys import Once, StageKeys
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.statistics.histogram import buckets_of
from stoker.serve.routing import RunningRequest


def count_slow_running(
    counts: dict[int, VersionCounts],
    running: Iterable[RunningRequest],
    *,
    slow_s: float,
    counted: StageKeys,
) -> int:
    """Add running requests that are already slow to the latencies of a stage.

    Args:
        counts: Version -> its counts in the stage, which are increased.
        running: The running requests of the model.
        slow_s: Latency above which a request is slow, seconds.
        counted: Keys that were already counted as slow; each key is counted once.

    Returns:
        How many requests were added.
    """
    keys, added = set[int](), 0
    for each in running:
        key = each.route.key
        if not each.route.counts or each.took_s <= slow_s:
            continue
        if key is not None:
            if key in keys or counted.has(key, Once.SLOW):
                continue
            keys.add(key)
        version = counts.setdefault(each.route.version, VersionCounts())
        version.latency.update(buckets_of(np.array([each.took_s])).tolist())
        added += 1
    return added
