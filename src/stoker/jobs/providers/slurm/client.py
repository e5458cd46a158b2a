"""Runs Slurm's programs and reads their output; every failure becomes a one-line error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import UserError
from stoker.jobs.providers.slurm.machine import Call, Machine
from stoker.jobs.providers.slurm.problems import AnswerLost, problem
from stoker.jobs.providers.slurm.script import NOTICE

ANSWER_S = 60.0
"""Maximum wait for a program, seconds; Slurm's own `MessageTimeout` is 10 s by default, and some programs retry."""

SEPARATOR = "\x1f"
"""Separator of fields. It is not printable, because comments are JSON, and names of other jobs may contain any
printable character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """The controller's record of a job; it is removed `MinJobAge` (by default 5 minutes) after the job's end."""

    id: str
    state: str
    reason: str
    name: str
    user: str
    submitted_s: float | None
    started_s: float | None
    """Time of the newest start; for a waiting job, the time at which Slurm expects to start it."""

    ended_s: float | None
    nodes: str
    """Names of the nodes in Slurm's notation, e.g. `n[1-4]`."""

    comment: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountedStart:
    """The record of a start of a job in Slurm's accounting."""

    id: str
    name: str
    """Submission time of the job: an earlier job may have had the same number in Slurm."""

    state: str
    elapsed_s: float
    gpus: int
    started_s: float | None
    ended_s: float | None

    signal: int = 0
    """Number of the signal that ended the job's script; 0: no signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """A group of identical machines of a partition."""

    partition: str
    is_default: bool
    nodes: int
    gpus: int
    cpus: int
    memory_mib: int
    time_limit: str


class Slurm:
    """Runs Slurm's programs on a machine."""

    def __init__(self, machine: Machine, *, answer_s: float = ANSWER_S) -> None:
        """Store the machine; no program is run.

        Args:
            machine: The machine on which the programs run.
            answer_s: Maximum wait for an answer, seconds.
        """
        self._machine = machine
        self._answer_s = answer_s

    def submit(
        self, script: Path, *, secrets: Sequence[str] = (), options: Sequence[str] = ()
    ) -> str:
        """Submit a script, and return the job's ID in Slurm.

        Args:
            script: Path of the script.
            options: Options of sbatch, in addition to those in the script.
            secrets: Names of variables that the job gets from the environment of this process. The job gets only these
                and the variables of a login, because other variables of this process would change the job.

        Raises:
            AnswerLost: Slurm may or may not have the job.
            UserError: Slurm refused the job.
        """
        answer = self._run("sbatch", "--parsable", *options, str(script), secrets=secrets)
        found = answer.strip().splitlines()[-1:] or [""]
        job_id = found[0].partition(";")[0]
        if not job_id.isdecimal():
            raise AnswerLost("sbatch must print the job's number", got=answer)
        return job_id

    def check(self, script: str) -> None:
        """Let Slurm check a script, without submitting it.

        Raises:
            UserError: Slurm would refuse the script.
        """
        self._run("sbatch", "--test-only", text=script)

    def queue(self, *, ids: Sequence[str] = (), name: str | None = None) -> list[QueuedJob]:
        """Return the controller's records of jobs; without arguments, the records of all jobs of the user.

        Args:
            ids: Numbers of jobs in Slurm, of any user; unknown numbers are left out.
            name: Return only jobs of the user that have this name.
        """
        chosen = [f"--jobs={','.join(ids)}"] if ids else [f"--user={self._machine.user()}"]
        if name is not None:
            chosen.append(f"--name={name}")
        fields = ("%i", "%T", "%r", "%j", "%u", "%V", "%S", "%e", "%N", "%k")
        form = f"--format={SEPARATOR.join(fields)}"
        try:
            answer = self._run("squeue", "--noheader", "--array", "--states=all", form, *chosen)
        except UserError as error:
            if "Invalid job id" in str(error.got):
                return []
            raise
        return [_queued(line) for line in _records(answer, len(fields))]

    def accounting(self, ids: Sequence[str]) -> list[AccountedStart]:
        """Return the records of all starts of jobs, oldest first; none on a cluster without accounting.

        Args:
            ids: Numbers of jobs in Slurm.
        """
        fields = "JobID,JobName,State,ElapsedRaw,AllocTRES,Start,End,ExitCode"
        arguments = ["--duplicates", "--allocations", "--noheader", "--parsable2"]
        chosen = [f"--jobs={','.join(ids)}", f"--delimiter={SEPARATOR}", f"--format={fields}"]
        try:
            answer = self._run("sacct", *arguments, *chosen)
        except UserError:  # no accounting, or it does not answer: other sources remain
            return []
        return [_accounted(line) for line in _records(answer, fields.count(",") + 1)]

    def node_groups(self) -> list[NodeGroup]:
        """Return the machines of all partitions that the user may see."""
        fields = ("%P", "%D", "%G", "%c", "%m", "%l")
        answer = self._run("sinfo", "--noheader", f"--format={SEPARATOR.join(fields)}")
        return [_node_group(line) for line in _records(answer, len(fields))]

    def cancel(self, *job_ids: str, only_waiting: bool = False) -> None:
        """End jobs, or remove them from the queue."""
        self._run("scancel", *(["--state=PENDING"] if only_waiting else []), *job_ids)

    def hold(self, job_id: str) -> None:
        """Keep a waiting job from starting."""
        self._run("scontrol", "hold", job_id)

    def release(self, job_id: str) -> None:
        """Undo `hold`."""
        self._run("scontrol", "release", job_id)

    def signal_scripts(self, job_ids: Sequence[str]) -> None:
        """Send the scripts of running jobs the signal that announces their end, so that their workers save."""
        try:
            self._run("scancel", "--batch", f"--signal={NOTICE}", *job_ids)
        except UserError as error:
            # For a task of an array, scancel 22.05 sends the signal, but prints nothing and exits with 1.
            if not any("_" in each for each in job_ids) or str(error.got) != "exit code 1":
                raise

    def _run(
        self,
        program: str,
        *arguments: str,
        text: str | None = None,
        secrets: Sequence[str] | None = None,
    ) -> str:
        """Run a program, with `secrets` in the environment that a job gets, and return its output."""
        call = Call(
            argv=(program, *arguments),
            text=text,
            for_job=secrets is not None,
            secrets=secrets or (),
            answer_s=self._answer_s,
        )
        answer = self._machine.run(call)
        if answer.code:
            raise problem(program, answer.code, answer.errors or answer.out)
        return answer.out


def _records(answer: str, fields: int) -> list[list[str]]:
    lines = (line.split(SEPARATOR) for line in answer.split("\n"))
    return [[each.strip() for each in line] for line in lines if len(line) == fields]


def _queued(fields: list[str]) -> QueuedJob:
    number, state, reason, name, user, submitted, started, ended, nodes, comment = fields
    return QueuedJob(
        id=number,
        state=state,
        reason=reason,
        name=name,
        user=user,
        submitted_s=_time(submitted),
        started_s=_time(started),
        ended_s=_time(ended),
        nodes=nodes,
        comment=comment,
    )


def _accounted(fields: list[str]) -> AccountedStart:
    number, name, state, elapsed, tres, started, ended, code = fields
    ended_by = code.partition(":")[2]
    return AccountedStart(
        id=number,
        name=name,
        state=state,
        elapsed_s=float(elapsed or 0),
        gpus=_gpus_of_tres(tres),
        started_s=_time(started),
        ended_s=_time(ended),
        signal=int(ended_by) if ended_by.isdecimal() else 0,
    )


def _node_group(fields: list[str]) -> NodeGroup:
    partition, nodes, gres, cpus, memory, limit = fields
    return NodeGroup(
        partition=partition.rstrip("*"),
        is_default=partition.endswith("*"),
        nodes=int(nodes),
        gpus=_gpus_of_gres(gres),
        cpus=int(cpus.rstrip("+")),
        memory_mib=int(memory.rstrip("+")),
        time_limit=limit,
    )


def _gpus_of_gres(text: str) -> int:
    """Return the number of GPUs in a text such as `gpu:a100:4(S:0-1),shard:8`."""
    total = 0
    for part in text.split(","):
        kind, _, rest = part.partition(":")
        count = rest.partition("(")[0].rpartition(":")[2]
        if kind == "gpu" and count.isdecimal():
            total += int(count)
    return total


def _gpus_of_tres(text: str) -> int:
    """Return the number of GPUs in a text such as `billing=4,cpu=4,gres/gpu=2,gres/gpu:a100=2,node=2`."""
    values = dict(part.partition("=")[::2] for part in text.split(","))
    count = values.get("gres/gpu", "0")
    return int(count) if count.isdecimal() else 0


def _time(text: str) -> float | None:
    """Return a time in seconds since the epoch; None for `N/A` and `Unknown`."""
    return float(text) if text.isdecimal() else None
