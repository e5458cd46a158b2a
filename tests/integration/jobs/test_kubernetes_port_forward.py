"""`stoker jobs port-forward`: ports of pods, by the real client and WebSockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.integration.jobs.kubernetes_jobs import KubernetesJobs
from tests.port_server import port_server

from stoker.cli.main import invoke
from stoker.core.errors import UserError
from stoker.jobs.forward import PortPair, forwarded, reach_worker
from stoker.jobs.job import Job
from stoker.jobs.overview import KnownJob
from stoker.jobs.provider import Phase
from stoker.jobs.providers.kubernetes.provider import KubernetesProvider
from stoker.jobs.targets import Target

ANSWER = bytes(range(256)) * (1 << 14)
"""Larger than all buffers on the way."""


@pytest.fixture(scope="module")
def running(kubernetes: KubernetesJobs) -> Job:
    job = kubernetes.submit("ports", "1000000")
    kubernetes.wait(job, Phase.RUNNING)
    kubernetes.wait_for_number(job, 1, rank=1)
    return job


@pytest.fixture
def known(kubernetes: KubernetesJobs, running: Job) -> KnownJob:
    target = Target(name="test", provider="kubernetes", settings=kubernetes.provider().settings)
    state = kubernetes.state(running)
    return KnownJob(place=running.place, job=running, target=target, state=state)


def asked(port: int, request: bytes) -> bytes:
    """What a port answers, read slowly."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request)
        time.sleep(0.3)  # a slow reader: all buffers on the way are full
        blocks = []
        while block := connection.recv(1 << 16):
            blocks.append(block)
        return b"".join(blocks)


def test_answers_come_whole_and_one_broken_connection_ends_no_other(
    kubernetes: KubernetesJobs, known: KnownJob
) -> None:
    connect = reach_worker(known, 1)
    assert connect is not None
    problems: list[UserError] = []
    with (
        port_server(ANSWER) as remote,
        forwarded(
            [PortPair(local=0, remote=remote)], connect, on_problem=problems.append
        ) as ports,
    ):
        broken = socket.create_connection(("127.0.0.1", ports[0]))
        broken.sendall(b"hold")
        answers: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: answers.append(asked(ports[0], b"all")))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        broken.close()
        for thread in threads:
            thread.join()
        assert [each == ANSWER for each in answers] == [True] * 3
        kubernetes.cluster.restart_server(0.1)
        assert asked(ports[0], b"all") == ANSWER
    assert problems == []
