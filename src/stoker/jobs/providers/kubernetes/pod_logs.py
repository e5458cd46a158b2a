"""Reads the logs of a job's pods from the API, for a machine without access to the folder of runs.

A thread reads the log of each pod. If its connection breaks, the log is requested again from the time of the last
line. A watch finds pods that are created later. If the watch breaks, or its version is too old, the pods are listed
again.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from stoker.core.errors import UserError
from stoker.jobs.logs import SILENT_S
from stoker.jobs.providers.kubernetes.client import Cluster
from stoker.jobs.providers.kubernetes.names import CONTAINER
from stoker.jobs.providers.kubernetes.problems import AnswerLost, Gone, NotFound
from stoker.jobs.providers.kubernetes.reasons import rank_of
from stoker.jobs.providers.kubernetes.watch import AGAIN_S, watch

LOOK_S = 0.5
"""Time without a new line after which the reader checks whether the job is over, seconds."""

QUIET_S = 60.0
"""Time without a new line after which a log is opened again, seconds: its connection may hang."""

_PRINTED = ("Running", "Succeeded", "Failed")
"""Phases of a pod in which it has a log."""


def log_lines(
    cluster: Cluster, selector: str, *, worker: int | None, until: Callable[[], bool] | None
) -> Iterator[str]:
    """Yield the lines of a job's pods; without following, the oldest pods first.

    Args:
        cluster: The cluster.
        selector: Selector of the job's pods.
        worker: Rank of a worker; None: all workers, with `[worker N] ` before each line.
        until: Follow the logs until this function returns True; None: only the current lines.
    """
    if until is not None:
        yield from _Follower(cluster, selector, worker).lines(until)
        return
    pods = cluster.all(cluster.path("v1", "pods"), labelSelector=selector)
    for pod in sorted(pods, key=lambda each: str(each["metadata"].get("creationTimestamp"))):
        if _is_wanted(pod, worker):
            yield from (f"{_prefix(pod, worker)}{line}" for line in _printed(cluster, pod))


def _printed(cluster: Cluster, pod: dict[str, Any]) -> Iterator[str]:
    path = f"{cluster.path('v1', 'pods', pod['metadata']['name'])}/log"
    yield from _printed_before(cluster, pod)
    try:
        yield from cluster.stream(path, container=CONTAINER, timestamps="true")
    except NotFound:  # the pod was removed in the meantime
        return


def _printed_before(cluster: Cluster, pod: dict[str, Any]) -> Iterator[str]:
    """Yield the log of the container's previous start, if the container was restarted inside its pod."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    if not any(each.get("restartCount") for each in statuses):
        return
    path = f"{cluster.path('v1', 'pods', pod['metadata']['name'])}/log"
    with contextlib.suppress(UserError):  # the node has removed that log
        yield from cluster.stream(path, container=CONTAINER, timestamps="true", previous="true")


class _Follower:
    """Follows the logs of all pods of a job."""

    def __init__(self, cluster: Cluster, selector: str, worker: int | None) -> None:
        self._cluster, self._selector, self._worker = cluster, selector, worker
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._readers: dict[str, threading.Thread] = {}
        self._over = threading.Event()
        self._silent_s: float | None = None

    def lines(self, until: Callable[[], bool]) -> Iterator[str]:
        """Yield the lines of all pods in the order in which they arrive."""
        finder = threading.Thread(target=self._find_pods, name="pods of the job", daemon=True)
        finder.start()
        try:
            while True:
                try:
                    line = self._lines.get(timeout=LOOK_S)
                except queue.Empty:
                    if self._is_over(until):
                        break
                    continue
                if line is not None:
                    yield line
        finally:
            self._over.set()
        # When the job is over, the readers read the rest of the logs, and then end by themselves.
        for reader in list(self._readers.values()):
            reader.join(timeout=10 * AGAIN_S)
        while not self._lines.empty():
            if (line := self._lines.get()) is not None:
                yield line

    def _is_over(self, until: Callable[[], bool]) -> bool:
        try:
            over = until()
        except AnswerLost as error:  # the server restarts: the next check may succeed
            now_s = time.monotonic()
            if self._silent_s is None:
                self._silent_s = now_s
                why = f"the cluster's API does not answer ({error.got})"
                print(f"stoker: {why}; the log continues when it does", file=sys.stderr)
            if now_s - self._silent_s > SILENT_S:
                raise
            return False
        self._silent_s = None
        return over

    def _find_pods(self) -> None:
        path = self._cluster.path("v1", "pods")
        while not self._over.is_set():
            try:
                for pod in watch(self._cluster, path, labelSelector=self._selector):
                    self._follow(pod)
                    if self._over.is_set():
                        return
            except UserError:  # the server restarts: the next request may succeed
                self._over.wait(AGAIN_S)

    def _follow(self, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        phase = (pod.get("status") or {}).get("phase")
        if uid in self._readers or phase not in _PRINTED or not _is_wanted(pod, self._worker):
            return
        self._readers[uid] = reader = threading.Thread(
            target=self._read, args=(pod,), name=f"log of {pod['metadata']['name']}", daemon=True
        )
        reader.start()

    def _read(self, pod: dict[str, Any]) -> None:
        """Pass on the log of a pod until the pod has ended; a broken connection is opened again."""
        prefix, last = _prefix(pod, self._worker), _Last()
        path = f"{self._cluster.path('v1', 'pods', pod['metadata']['name'])}/log"
        for line in last.new(_printed_before(self._cluster, pod)):
            self._lines.put(f"{prefix}{line}")
        while True:
            query = {"container": CONTAINER, "timestamps": "true", "follow": "true"} | last.query
            try:
                for line in last.new(self._cluster.stream(path, silent_s=QUIET_S, **query)):
                    self._lines.put(f"{prefix}{line}")
                if self._has_ended(pod):
                    return
            except (NotFound, Gone):
                return
            except UserError:  # the connection broke, or the server restarts
                if self._over.is_set():
                    return
            time.sleep(AGAIN_S)  # more frequent requests would not help a server that restarts

    def _has_ended(self, pod: dict[str, Any]) -> bool:
        path = self._cluster.path("v1", "pods", pod["metadata"]["name"])
        found = self._cluster.all(
            self._cluster.path("v1", "pods"),
            fieldSelector=f"metadata.name={path.rpartition('/')[2]}",
        )
        same = [each for each in found if each["metadata"]["uid"] == pod["metadata"]["uid"]]
        return not same or same[0]["status"].get("phase") in ("Succeeded", "Failed")


class _Last:
    """The time of the last line that was passed on, and how many lines had this time."""

    def __init__(self) -> None:
        self._at, self._count = "", 0

    @property
    def query(self) -> dict[str, str]:
        """Query with the time from which to read the log. It has whole seconds, so some lines come again."""
        return {"sinceTime": f"{self._at[:19]}Z"} if self._at else {}

    def new(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield only the lines that were not yielded before."""
        known_at, known, seen = self._at, self._count, 0
        for line in lines:
            at = line.partition(" ")[0]
            if known_at and _nanoseconds(at) < _nanoseconds(known_at):
                continue
            if at == known_at:
                seen += 1
                if seen <= known:
                    continue
            self._count = self._count + 1 if at == self._at else 1
            self._at = at
            yield line


def _nanoseconds(at: str) -> str:
    """Write an RFC 3339 time in UTC with nine decimals, so that strings compare in the order of the times."""
    whole, _, fraction = at.rstrip("Z").partition(".")
    return f"{whole}.{fraction:0<9}"


def _is_wanted(pod: dict[str, Any], worker: int | None) -> bool:
    return worker is None or rank_of(pod) == str(worker)


def _prefix(pod: dict[str, Any], worker: int | None) -> str:
    return "" if worker is not None else f"[worker {rank_of(pod)}] "
