"""`stoker jobs port-forward`: ports of pods, by the real client and WebSockets."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.integration.jobs.kubernetes_jobs import KubernetesJobs
from tests.kubernetes_api.server.faults import Fault
from tests.port_server import ANSWER, answer_of, port_server

from stoker.cli.main import invoke
from stoker.core.errors import UserError
from stoker.jobs.forward import PortPair, forwarded, reach_worker
from stoker.jobs.job import Job
from stoker.jobs.overview import KnownJob
from stoker.jobs.places import Submitted, write_submitted
from stoker.jobs.provider import Phase
from stoker.jobs.providers.kubernetes import port_forward
from stoker.jobs.targets import Target


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


@pytest.fixture
def elsewhere(
    kubernetes: KubernetesJobs, running: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder from which the job is reached as a user does."""
    target = {
        "provider": "kubernetes",
        "image": "registry.test/stoker:1",
        "kubeconfig": str(kubernetes.kubeconfig),
        "volumes": [{"claim": "runs", "path": str(kubernetes.runs)}],
    }
    (tmp_path / "stoker.yaml").write_text(json.dumps({"targets": {"test": target}}))
    write_submitted(
        running.place,
        Submitted(
            target="test", scheduler_id=kubernetes.state(running).scheduler_id, submitted_s=1.0
        ),
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_answers_come_whole_and_one_broken_connection_ends_no_other(
    kubernetes: KubernetesJobs, known: KnownJob
) -> None:
    connect = reach_worker(known, 1)
    assert connect is not None
    problems: list[UserError] = []
    with (
        port_server() as remote,
        forwarded([PortPair(local=0, remote=remote)], connect, on_problem=problems.append) as ports,
    ):
        broken = socket.create_connection(("127.0.0.1", ports[0]))
        broken.sendall(b"hold")
        answers: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: answers.append(answer_of(ports[0]))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        broken.close()
        for thread in threads:
            thread.join()
        assert [each == ANSWER for each in answers] == [True] * 3
        kubernetes.cluster.restart_server(0.1)
        assert answer_of(ports[0]) == ANSWER
    assert problems == []


def test_a_connection_that_is_reset_in_the_middle_ends_here_too(
    kubernetes: KubernetesJobs, known: KnownJob
) -> None:
    connect = reach_worker(known, 1)
    assert connect is not None
    problems: list[UserError] = []
    with socket.create_server(("127.0.0.1", 0)) as remote:
        pair = PortPair(local=0, remote=remote.getsockname()[1])
        with (
            forwarded([pair], connect, on_problem=problems.append) as (port,),
            socket.create_connection(("127.0.0.1", port), timeout=30.0) as near,
        ):
            far, _ = remote.accept()
            with far:
                far.sendall(b"x")
                assert near.recv(1) == b"x"
                kubernetes.cluster.restart_server(0.1)
                with contextlib.suppress(ConnectionResetError):
                    assert near.recv(1) == b""
    assert problems == []


def test_a_proxy_that_swallows_the_request_for_a_port_is_one_line(
    kubernetes: KubernetesJobs, known: KnownJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_forward, "OPEN_S", 0.5)
    connect = reach_worker(known, 0)
    assert connect is not None
    kubernetes.cluster.faults.plan(Fault.SILENT, "/portforward")
    with pytest.raises(UserError, match=r"must forward ports of pods\. Received: no answer within"):
        connect(80)


def test_a_port_of_a_worker_is_reached_by_the_command_until_ctrl_c(
    running: Job, elsewhere: Path
) -> None:
    with port_server() as remote:
        argv = [sys.executable, "-m", "stoker", "jobs", "port-forward", f"{running.id}/1"]
        process = subprocess.Popen(
            [*argv, f"0:{remote}"], cwd=elsewhere, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        here = line.partition(" ")[0].rpartition(":")[2]
        assert line == f"127.0.0.1:{here} -> port {remote} of worker 1\n"
        assert answer_of(int(here)) == ANSWER
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        process.stdout.close()


def test_what_cannot_be_forwarded_is_one_line(
    kubernetes: KubernetesJobs,
    running: Job,
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*words: str) -> str:
        assert invoke(["jobs", "port-forward", *words], debug=False) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 must be free" in refused(running.id, f"{port}:80")
    assert "a port is [LOCAL:]REMOTE" in refused(running.id, "metrics")
    assert "the workers of job" in refused(f"{running.id}/2", "9100")
    assert "must serve its metrics if no REMOTE is given" in refused(running.id)
    (elsewhere / "stoker.yaml").write_text("{}")
    assert "must be at a target that is known here" in refused(running.id, "9100")


def test_a_connection_that_fails_says_why_and_the_others_go_on(
    kubernetes: KubernetesJobs, known: KnownJob, capsys: pytest.CaptureFixture[str]
) -> None:
    connect = reach_worker(known, 0)
    assert connect is not None
    problems: list[UserError] = []
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        pair = PortPair(local=0, remote=closed.getsockname()[1])
        with forwarded([pair], connect, on_problem=problems.append) as (port,):
            assert answer_of(port) == b""
            assert "Connection refused" in capsys.readouterr().err
            rules = kubernetes.cluster.access.rules
            kubernetes.cluster.access.rules = [
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
            ]
            try:
                assert answer_of(port) == b""
            finally:
                kubernetes.cluster.access.rules = rules
    (problem,) = problems
    assert problem.line().startswith("you must have the rights that jobs need. Received: pods")


def test_a_job_that_is_over_has_no_ports(kubernetes: KubernetesJobs, known: KnownJob) -> None:
    kubernetes.provider().stop(known.job.id)
    assert known.target is not None
    with pytest.raises(UserError, match=r"^worker 0 of job .* must run\. Received: it has no pod"):
        reach_worker(known, 0)
    over = KnownJob(
        place=known.place,
        job=known.job,
        target=known.target,
        state=kubernetes.wait(known.job, Phase.STOPPED),
    )
    with pytest.raises(UserError, match="must run before its ports are reached"):
        reach_worker(over, 0)
