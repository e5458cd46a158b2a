"""A worker beats from a thread of its own, and ends only when all are done."""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from stoker.cluster.launch.member import FD_VARIABLE, STACKS, Beat, read_beat
from stoker.train.context.heartbeat import Heartbeat, open_heartbeat


@dataclass
class Launcher:
    """The two ends of what a launcher and its worker share."""

    ours: socket.socket
    theirs: int


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """One that waits to hear of a worker."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10)
    with ours:
        yield Launcher(ours, theirs.detach())


def beating(launcher: Launcher, *, every_s: float = 0.01) -> Heartbeat:
    return Heartbeat(launcher.theirs, rank=2, every_s=every_s)


def hear(launcher: Launcher) -> Beat:
    return read_beat(launcher.ours.recv(65536))


def test_it_beats_by_itself_and_tells_what_was_said_last(launcher: Launcher) -> None:
    heartbeat = beating(launcher)
    assert hear(launcher).phase == "start"

    heartbeat.enter("train")
    heartbeat.beat(41)
    heartbeat.progress("epoch 1", 0.5)

    while (heard := hear(launcher)).line == "":
        pass
    assert (heard.rank, heard.phase, heard.step, heard.share) == (2, "train", 41, 0.5)
    assert hear(launcher).at_s > heard.at_s
    heartbeat.close()


def test_a_new_phase_is_reported_at_once(launcher: Launcher) -> None:
    heartbeat = beating(launcher, every_s=60)
    hear(launcher)
    begun_s = time.monotonic()

    heartbeat.enter("validate")

    assert hear(launcher).phase == "validate"
    assert time.monotonic() - begun_s < 30
    heartbeat.close()


def test_a_worker_that_is_done_waits_for_the_launcher(launcher: Launcher) -> None:
    heartbeat = beating(launcher)
    finished = threading.Thread(target=heartbeat.finish)
    finished.start()

    while hear(launcher).phase != "done":
        pass
    finished.join(0.2)
    assert finished.is_alive()
    launcher.ours.shutdown(socket.SHUT_WR)
    finished.join(10)
    assert not finished.is_alive()
    heartbeat.close()


def test_a_launcher_that_does_not_read_stops_no_worker(launcher: Launcher) -> None:
    launcher.ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    heartbeat = beating(launcher, every_s=0.0001)
    time.sleep(0.3)  # enough beats to fill the socket's buffers

    heartbeat.close()


def test_a_launcher_that_is_gone_stops_no_worker(launcher: Launcher) -> None:
    heartbeat = beating(launcher)
    launcher.ours.close()

    heartbeat.beat(1)
    time.sleep(0.05)  # the beat meets the closed socket
    heartbeat.finish()
    heartbeat.close()


def test_without_a_launcher_a_worker_does_not_wait() -> None:
    heartbeat = open_heartbeat({})

    heartbeat.beat(1)
    heartbeat.finish()
    heartbeat.close()


def test_what_a_worker_starts_does_not_inherit_its_socket(launcher: Launcher) -> None:
    descriptor = launcher.theirs
    os.set_inheritable(descriptor, True)
    environ = {FD_VARIABLE: str(descriptor), "STOKER_RANK": "3"}

    heartbeat = open_heartbeat(environ)

    assert environ == {"STOKER_RANK": "3"}
    assert not os.get_inheritable(descriptor)
    assert hear(launcher).rank == 3
    heartbeat.close()
    faulthandler.unregister(STACKS)
