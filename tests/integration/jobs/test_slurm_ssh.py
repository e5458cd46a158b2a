"""Jobs on a real Slurm through a real sshd, from a folder that the cluster does not use, without Slurm's programs."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.integration.jobs.conftest import Counting, comments
from tests.port_server import ANSWER, answer_of, port_server
from tests.slurm_cluster import wait_until
from tests.small_lock import PYTHON_FOLDER, small_lock, uv_folder
from tests.ssh_server import SshServer, ssh_server

from stoker.cli.main import invoke
from stoker.core.errors import UserError
from stoker.jobs.archive import Archive
from stoker.jobs.forward import PortPair, forwarded, reach_worker
from stoker.jobs.job import Job, Resources
from stoker.jobs.overview import find_job, read_here, state_of
from stoker.jobs.provider import Phase
from stoker.jobs.providers.slurm import port_forward
from stoker.jobs.providers.slurm.machine import Here
from stoker.jobs.providers.slurm.provider import SlurmProvider
from stoker.jobs.providers.slurm.remote import ssh
from stoker.jobs.submission import Receipt, submit
from stoker.jobs.sweep import Element, Sweep
from stoker.jobs.sweep_submission import SweepReceipt, submit_sweep
from stoker.jobs.targets import Target

OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)
SCRATCH = "scratch of O'Neil $x"
CODE = b"code of the job"

CUTTING_SBATCH = """#!/bin/bash
printf '%s\n' "$*" >> ~/called
# Where there is a file `cut-now`, the connection and its server end as soon as Slurm has the job.
if [ "$1" != --parsable ] || [ ! -e ~/cut-now ]; then exec REAL "$@"; fi
rm ~/cut-now
REAL "$@" > ~/answer
kill -9 "$(cat SERVER/sshd.pid)"
pid=$$
while [ "$(cat /proc/$pid/comm)" != sshd ]; do pid=$(cut -d ' ' -f 4 /proc/$pid/stat); done
kill -9 $pid
"""


@dataclass
class Laptop:
    """A machine that reaches the cluster by ssh only."""

    counting: Counting
    server: SshServer
    folder: Path
    targets: dict[str, Target]

    def job(self, name: str, *command: str) -> Job:
        """A job that counts."""
        return Job(
            name=name,
            command=("count", *command),
            folder=self.folder,
            runs=self.folder / "runs",
            code=hashlib.sha256(CODE).hexdigest(),
            resources=Resources(workers=2, cpus=1),
        )

    def submit(self, job: Job, to: str = "far") -> Receipt:
        """Submit it as the command does."""
        archive = Archive(content=CODE, sizes={})
        return submit(job, archive, target=self.targets[to], targets=self.targets)

    def submit_sweep(self, jobs: list[Job]) -> tuple[Sweep, SweepReceipt]:
        """Submit jobs as a sweep, of which one runs at a time."""
        elements = [Element(job=job.id, settings=(job.command[1],)) for job in jobs]
        sweep = Sweep(name=jobs[0].name, runs=jobs[0].runs, elements=tuple(elements))
        archive, far = Archive(content=CODE, sizes={}), self.targets["far"]
        return sweep, submit_sweep(
            sweep, jobs, archive, at_once=1, target=far, targets=self.targets
        )

    def on_cluster(self, job: Job) -> Path:
        """The folder of a job there."""
        (found,) = (self.server.home / SCRATCH / job.name / "runs" / ".jobs").iterdir()
        return found

    def wait(self, job: Job, *phases: Phase) -> None:
        """Wait until a job is in one of these phases."""
        wait_until(lambda: state_of(job.place, self.targets).phase in phases, f"{phases}")


@pytest.fixture(scope="module")
def laptop(counting: Counting) -> Iterator[Laptop]:
    folder = Path(tempfile.mkdtemp(prefix="ssh-", dir="/tmp"))
    real = shutil.which("sbatch")
    environ = f"SLURM_CONF={counting.cluster.environ['SLURM_CONF']}"
    try:
        with ssh_server(folder, environ) as server, pytest.MonkeyPatch.context() as patch:
            (server.home / ".bash_profile").write_text(
                "echo Welcome; export ONLY_THERE=known\n"
                f"export PATH=$HOME/bin:{uv_folder()}:$PATH:{PYTHON_FOLDER} UV_CACHE_DIR=$HOME/cache\n"
            )
            (server.home / "bin").mkdir()
            sbatch = server.home / "bin" / "sbatch"
            sbatch.write_text(
                CUTTING_SBATCH.replace("REAL", str(real)).replace("SERVER", str(folder))
            )
            sbatch.chmod(0o755)
            own = folder / "laptop"
            own.mkdir()
            far = {
                "provider": "slurm",
                "via": "ssh:login",
                "remote_folder": str(server.home / SCRATCH),
            }
            targets = {
                "far": far | {"grace_s": 20, "python": str(counting.python)},
                "locked": far | {"environment_from": "lock"},
            }
            (own / "stoker.yaml").write_text(json.dumps({"targets": targets}))
            small_lock(own)
            patch.setenv("PATH", str(folder / "client"))
            patch.setenv("XDG_RUNTIME_DIR", str(folder))
            patch.setenv("XDG_STATE_HOME", str(folder / "state"))
            patch.delenv("SLURM_CONF")
            patch.chdir(own)
            assert shutil.which("squeue") is None, "the programs are behind ssh only"
            yield Laptop(counting, server, own, dict(read_here(own).targets))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_is_submitted_watched_and_stopped_through_ssh(
    laptop: Laptop, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = laptop.job("short", "30"), laptop.job("long", "100000")
    locked = laptop.job("locked", "3")
    assert laptop.submit(locked, "locked").already is False
    assert laptop.submit(short).already is False
    assert laptop.submit(long).already is False
    assert laptop.submit(long).already is True
    laptop.wait(long, Phase.RUNNING)

    assert invoke(["logs", "-f", short.id], debug=False) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "[worker 1] start 1 goes on from 0" in printed
    assert len(printed) == len(set(printed)), "no line twice"
    assert any(line.endswith("done") for line in printed), printed
    laptop.wait(short, Phase.DONE)
    there = laptop.on_cluster(short)
    assert (there / "numbers-1").read_text().split() == [str(each) for each in range(30)]
    assert (there / "code.tar.gz").read_bytes() == CODE

    laptop.wait(locked, *OVER)
    prefix = Path((laptop.on_cluster(locked) / "prefix-job-task-1").read_text())
    assert prefix.parent == laptop.server.home / SCRATCH / "locked" / "runs" / ".environments"

    assert invoke(["stop", long.id], debug=False) == 0
    assert "is stopped" in capsys.readouterr().out
    assert {path.name for path in laptop.on_cluster(long).glob("saved-*")} == {
        "saved-1-0",
        "saved-1-1",
    }
    assert invoke(["logs", f"{long.id}/0"], debug=False) == 0
    assert "start 1 goes on from 0" in capsys.readouterr().out
    assert invoke(["jobs"], debug=False) == 0
    listed = capsys.readouterr().out
    assert [line.split()[:3] for line in listed.splitlines()] == [
        [long.id, "far", "stopped"],
        [short.id, "far", "done"],
        [locked.id, "locked", "done"],
    ]


def test_a_sweep_with_a_secret_is_one_array_and_the_secret_is_in_no_file_that_others_can_read(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "hunter2 'of' the \"laptop\""
    monkeypatch.setenv("TOKEN_OF_TEST", value)
    jobs = [
        replace(laptop.job("swept", end, "needs", "TOKEN_OF_TEST"), secrets=("TOKEN_OF_TEST",))
        for end in ("3", "4", "100000")
    ]
    sweep, receipt = laptop.submit_sweep(jobs)
    assert receipt.submitted == tuple(job.id for job in jobs)
    assert laptop.submit_sweep(jobs)[1].submitted == ()
    laptop.wait(jobs[2], Phase.RUNNING, *OVER)

    holders = [
        path
        for folder in (laptop.counting.cluster.folder, laptop.server.folder)
        for path in folder.rglob("*")
        if path.is_file() and b"hunter2" in path.read_bytes()
    ]
    assert {path.name for path in holders} <= {"environment"}, "what slurmctld keeps"
    assert all(path.stat().st_mode & 0o077 == 0 for path in holders)
    there = laptop.counting.cluster.run("scontrol", "show", "job", "--details")
    assert "hunter2" not in there + (laptop.server.home / "called").read_text()

    assert invoke(["stop", sweep.id], debug=False) == 0
    assert capsys.readouterr().out == f"sweep {sweep.id}: 2 done, 1 stopped\n"
    assert invoke(["logs", f"{sweep.id}/1"], debug=False) == 0
    assert f"[worker 1] TOKEN_OF_TEST has {len(value)} characters" in capsys.readouterr().out
    folder = laptop.server.home / SCRATCH / "swept" / "runs" / ".jobs" / sweep.id
    for number, end in enumerate((3, 4)):
        assert len((folder / str(number) / "numbers-1").read_text().split()) == end
        assert (folder / str(number) / "code.tar.gz").read_bytes() == CODE


def test_a_port_of_a_worker_is_reached_through_ssh_and_from_a_login_node(laptop: Laptop) -> None:
    job = laptop.job("ports", "100000")
    laptop.submit(job)
    laptop.wait(job, Phase.RUNNING)
    connect = reach_worker(find_job(job.id, read_here(laptop.folder)), 1)
    assert connect is not None
    with (
        port_server() as remote,
        forwarded([PortPair(local=0, remote=remote)], connect, on_problem=print) as (port,),
    ):
        with socket.create_connection(("127.0.0.1", port)) as broken:
            broken.sendall(b"hold")
        assert [answer_of(port) == ANSWER for _ in range(2)] == [True, True]

        provider = laptop.targets["far"].open()
        assert isinstance(provider, SlurmProvider)
        there = provider.where_is(job.id, 1)
        with forwarded(
            [PortPair(local=0, remote=remote)],
            lambda number: port_forward.connect(Here(), there, number),
            on_problem=print,
        ) as (plain,):
            assert answer_of(plain) == ANSWER
    with pytest.raises(UserError, match=f"must listen on port {remote} of {there}"):
        port_forward.connect(Here(), there, remote)
    provider.stop(job.id)


def test_a_connection_that_is_cut_while_a_job_is_submitted_makes_no_second_one(
    laptop: Laptop,
) -> None:
    job = laptop.job("cut", "5")
    (laptop.server.home / "cut-now").touch()

    with pytest.raises(
        UserError, match=r"^the login node login must be reachable\. Received: ssh: "
    ):
        laptop.submit(job)
    laptop.server.start()
    number = (laptop.server.home / "answer").read_text().strip()

    receipt = laptop.submit(job)
    assert receipt.state.scheduler_id == number
    laptop.wait(job, Phase.DONE)
    made = [each for each in comments(laptop.counting.cluster) if each.startswith("cut-")]
    assert len(made) == 1


def test_a_login_that_does_not_work_is_one_line_and_submits_nothing(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, job = laptop.server, laptop.job("never", "5")
    elsewhere = server.folder / "elsewhere"
    elsewhere.mkdir()
    config = (server.folder / "ssh_config").read_text()
    cases = {
        "must be reachable": config.replace(f"Port {server.port}", "Port 1"),
        "must let you in without a question": config.replace("/user\n", "/other\n"),
    }
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(elsewhere))  # not the connection that there is
    ssh._options.cache_clear()
    try:
        for words, text in cases.items():
            (server.folder / "ssh_config").write_text(text)
            require_line(laptop, job, words)
        (server.folder / "ssh_config").write_text(config)
        server.known_key("other")
        require_line(laptop, job, "the host key of login must be the one that this machine knows")
    finally:
        (server.folder / "ssh_config").write_text(config)
        server.known_key("host")
        ssh._options.cache_clear()
    assert not job.place.exists()


def test_a_secret_that_is_set_neither_here_nor_there_is_one_line_and_submits_nothing(
    laptop: Laptop,
) -> None:
    called = (laptop.server.home / "called").read_text()
    job = replace(laptop.job("secretless", "5"), secrets=("ONLY_THERE", "NOT_SET_ANYWHERE"))

    require_line(laptop, job, "Received: no NOT_SET_ANYWHERE. Set it: export NOT_SET_ANYWHERE=")

    assert not job.place.exists()
    assert (laptop.server.home / "called").read_text() == called
    laptop.targets["far"].open().validate(replace(job, secrets=("ONLY_THERE",)))


def require_line(laptop: Laptop, job: Job, words: str) -> None:
    with pytest.raises(UserError) as caught:
        laptop.submit(job)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_calls_use_one_connection(laptop: Laptop) -> None:
    log = laptop.server.folder / "sshd.log"
    before = log.read_text().count("Accepted publickey")
    for _ in range(3):
        assert invoke(["jobs"], debug=False) == 0

    assert log.read_text().count("Accepted publickey") - before <= 1
