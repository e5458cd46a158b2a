"""A real Slurm of Debian on this machine: munged, slurmctld and four slurmd, as processes of the test.

With accounting (slurmdbd on MariaDB) where it is installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.slurm_accounting import (
    database_command,
    make_database,
    missing,
    require_accounting,
    write_accounting,
)

from stoker.cluster.processes import Child, ProcessOptions

TOOLS = Path(__file__).resolve().parents[1] / ".tools"
NODES = ("n1", "n2", "n3", "n4")
GPUS_OF_A_NODE = 2

UP_S = 60.0
"""Longest wait for a daemon, seconds; the cluster takes 1 to 6, and its accounting 4 more."""

DAEMONS = "/usr/sbin:/sbin"

CONFIGURATION = """
ClusterName=stoker
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=5
KillWait=3
MinJobAge=300
SchedulerParameters=bf_interval=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT Weight=9 CPUs=16 RealMemory=4000 Gres=gpu:fake:2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]}
NodeName=n4 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[4]} Weight=1
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=60
PartitionName=spot Nodes=n3 PriorityTier=1 GraceTime=6
PartitionName=urgent Nodes=n3 PriorityTier=10 PreemptMode=OFF
PartitionName=frail Nodes=n[1,4]
"""
"""`main` for all that is not disturbed, `urgent` preempts `spot`, and `frail` prefers n4, which is to be lost."""


def require_slurm() -> None:
    """Skip the test where Slurm is not installed; in CI, fail where it should be."""
    path = f"{os.environ['PATH']}:{DAEMONS}"
    missing = [
        name
        for name in ("slurmctld", "slurmd", "munged", "sbatch")
        if not shutil.which(name, path=path)
    ]
    if os.geteuid() != 0 and not missing:
        pytest.skip("several slurmd on one machine need root")
    if not missing:
        return
    outcome = TOOLS / "slurm.txt"
    why = outcome.read_text().strip() if outcome.is_file() else "`make test` installs it"
    if os.environ.get("CI") == "true" and why == "installed":
        pytest.fail(f"`make test` installed Slurm, but {', '.join(missing)} is not there")
    pytest.skip(f"no {', '.join(missing)}: {why}")


@dataclass
class Cluster:
    """A running cluster."""

    folder: Path
    environ: dict[str, str]
    """With which its programs and daemons run."""

    daemons: dict[str, Child] = field(default_factory=dict)

    accounting_ports: tuple[int, int] | None = None
    """Of slurmdbd and its database; None: without accounting."""

    def run(self, *command: str) -> str:
        """Run a program of Slurm, and return what it prints."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node, again if it was killed."""
        if f"slurmd-{name}" in self.daemons:
            self.daemons[f"slurmd-{name}"].wait(10.0)
        conf = str(self.folder / "slurm.conf")
        self._start(f"slurmd-{name}", "slurmd", "-D", "-N", name, "-f", conf)

    def start(self) -> None:
        """Start all daemons, and wait until all nodes are idle."""
        socket_path, key = self.folder / "munge.socket", self.folder / "munge.key"
        own = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self._start(
            *("munged", "munged", "--foreground", "--force", f"--socket={socket_path}"),
            *(f"--key-file={key}", *own),
        )
        wait_until(socket_path.exists, "munged")
        if self.accounting_ports is not None:
            self._start_accounting(*self.accounting_ports)
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        wait_until(self._is_up, "idle nodes")

    def require_accounting(self) -> None:
        """Skip the test, or fail, where this cluster has no accounting."""
        require_accounting(self.environ["PATH"], TOOLS / "slurm.txt")

    def forget_jobs(self) -> None:
        """Let the controller forget all jobs, as it does MinJobAge after their ends; the accounting keeps them."""
        self.daemons["slurmctld"].send(signal.SIGTERM)
        self.daemons["slurmctld"].end(10.0)
        self.start_controller("-c")
        wait_until(self._is_up, "idle nodes")

    def start_controller(self, *options: str) -> None:
        """Start the controller, again if it was killed."""
        conf = str(self.folder / "slurm.conf")
        self._start("slurmctld", "slurmctld", "-D", *options, "-f", conf)

    def _start_accounting(self, port: int, database: int) -> None:
        make_database(self.folder, self.environ)
        program, *arguments = database_command(self.folder, database)
        self._start("database", program, *arguments)
        wait_until(lambda: self._answers("database", database), "database")
        self._start("slurmdbd", "slurmdbd", "-D")
        wait_until(lambda: self._answers("slurmdbd", port), "slurmdbd")
        self.run("sacctmgr", "--immediate", "add", "cluster", "stoker")

    def _answers(self, name: str, port: int) -> bool:
        self._require_alive(name)
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5.0):
                return True
        except OSError:
            return False

    def _require_alive(self, name: str) -> None:
        output = self.folder / f"{name}.out"
        assert not self.daemons[name].has_ended(), f"{name} has ended: {output.read_text()}"

    def _is_up(self) -> bool:
        for name in self.daemons:
            self._require_alive(name)
        return self.idle() == set(NODES)

    def idle(self) -> set[str]:
        """Names of the nodes that do nothing; none before the controller answers."""
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %T"],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" idle")}

    def close(self) -> None:
        """End the daemons, and kill every process that one of them has started."""
        for daemon in reversed(self.daemons.values()):
            daemon.send(signal.SIGTERM)
        for daemon in reversed(self.daemons.values()):
            daemon.end(3.0)
        for _ in range(20):
            if not self._kill_remains():
                return
            time.sleep(0.1)  # killed processes need a moment to end

    def _start(self, name: str, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=self.environ["PATH"])
        assert path is not None
        output = self.folder / f"{name}.out"
        options = ProcessOptions(environ=self.environ, output=output, ends_group=False)
        self.daemons[name] = Child(name, [path, *arguments], options)

    def _kill_remains(self) -> bool:
        """Kill processes whose environment or arguments name the cluster's folder; whether there were any."""
        mark, found = str(self.folder).encode(), False
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
                    found = True
        return found


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster until the end of the context.

    Args:
        folder: Of its files, with a short path: a socket's has at most 107 characters.
    """
    require_slurm()
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH"))
    }
    path = f"{os.environ['PATH']}:{DAEMONS}"
    environ |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    _write_files(folder)
    cluster = Cluster(folder, environ)
    if not missing(path):
        with ExitStack() as stack:
            cluster.accounting_ports = _free_port(stack), _free_port(stack)
        write_accounting(
            folder, port=cluster.accounting_ports[0], database=cluster.accounting_ports[1]
        )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def wait_until(claim: object, what: str | Callable[[], str], timeout_s: float = UP_S) -> None:
    """Wait until a function returns something true.

    Args:
        claim: The function.
        what: What is waited for, for the message; a function is called at the end of the time.
        timeout_s: Longest wait, seconds.
    """
    assert callable(claim)
    end_s = time.monotonic() + timeout_s
    while not claim():
        if time.monotonic() >= end_s:
            text = what if isinstance(what, str) else what()
            pytest.fail(f"no {text} within {timeout_s:g} s")
        time.sleep(0.1)


def _write_files(folder: Path) -> None:
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    lines = []
    for node in NODES:
        for number in range(GPUS_OF_A_NODE):
            device = folder / f"gpu-{node}-{number}"
            os.mknod(
                device, 0o600 | 0o020000, os.makedev(1, 3)
            )  # a character device like /dev/null
        lines.append(
            f"NodeName={node} Name=gpu Type=fake File={folder}/gpu-{node}-[0-{GPUS_OF_A_NODE - 1}]"
        )
    (folder / "gres.conf").write_text("\n".join(lines) + "\n")
    host = socket.gethostname().partition(".")[0]
    with ExitStack() as stack:
        ports = [_free_port(stack) for _ in range(len(NODES) + 1)]
    text = CONFIGURATION.format(folder=folder, ports=ports, host=host)
    (folder / "slurm.conf").write_text(text)


def _free_port(stack: ExitStack) -> int:
    probe = stack.enter_context(socket.socket())
    probe.bind(("127.0.0.1", 0))
    return int(probe.getsockname()[1])
