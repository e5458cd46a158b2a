"""Attempts until the work is done: who failed is said, and all start again from the last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.cluster.launch.asked import AskedToEnd, asked_to_end
from stoker.cluster.launch.beats import Beat
from stoker.cluster.launch.group import Group
from stoker.cluster.launch.member import Command, Log
from stoker.cluster.launch.outcome import Failure, Outcome
from stoker.cluster.limits import Refusals, allow_open_files, kernel_refusals
from stoker.cluster.machine.gpus import read_gpus
from stoker.cluster.machine.visible import visible_names
from stoker.cluster.resolver import VARIABLE, ClusterSpec, held_ports, local_cluster
from stoker.cluster.shares import GPUS, share_cores, share_gpus, share_threads
from stoker.core.errors import EXIT_BUG, ConfigError, Plain, UserError

MOST_WORKERS = 1024
"""Beyond it a number of workers is a slip of the keyboard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """How many processes train together on this machine, and what is done when one fails."""

    workers: int
    """Processes that compute steps."""

    servers: int = 0
    """Parameter servers; with them comes a chief."""

    cluster: ClusterSpec | None = None
    """A cluster that somebody else starts: only its own task is started here."""

    pin: bool = False
    """Give each process cores of its own."""

    max_restarts: int = 3
    """How often all start again; what is taken away (exit 75) does not count once it got on."""

    watchdog_s: float = 300.0
    """Longest without a sign of life, or while training without a step, seconds."""

    grace_s: float = 30.0
    """Longest from being asked to end to the end, seconds."""

    @property
    def processes(self) -> int:
        """How many are started."""
        if self.cluster is not None:
            return 1
        return self.workers + (self.servers + 1 if self.servers else 0)

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise ConfigError(f"--workers must be from 1 to {MOST_WORKERS}", got=self.workers)
        if not 0 <= self.servers <= MOST_WORKERS:
            raise ConfigError(
                f"--parameter-servers must be from 0 to {MOST_WORKERS}", got=self.servers
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """How it went."""

    preempted: bool
    """Whether it ended because it was asked to, before the work was done."""

    restarts: tuple[str, ...]
    """Why all were started again, one clause each time."""


class WorkerFailed(UserError):
    """A worker failed, and another attempt is not worth it; `failure` says which and how."""

    def __init__(self, failure: Failure, *, after: str) -> None:
        """Say whose fault it is.

        Args:
            failure: The last one.
            after: What was tried before, a clause or "".
        """
        self.failure = failure
        self.exit_code = failure.code if failure.is_final and failure.code else EXIT_BUG
        last = next((line for line in reversed(failure.tail) if line.strip()), "it said nothing")
        super().__init__(
            f"{failure.name} must not fail, but it {failure.reason}{after}",
            got=Plain(last),
            fix="Its last lines are above.",
        )


def launch(
    argv: Sequence[str],
    *,
    settings: LaunchSettings,
    log: Log,
    on_beat: Callable[[Beat], None],
    environ: Mapping[str, str] = os.environ,
) -> Launched:
    """Run a program as several processes that train together, until their work is done.

    Each gets `TF_CONFIG`, `STOKER_RANK` and its share of cores, threads and GPUs. The program is
    expected to go on from its last checkpoint when it is started again, to end with exit code 75
    when it is ended by SIGTERM, and to beat (`stoker.train.context.heartbeat`).

    Args:
        argv: The program and its arguments.
        settings: How many, and what is done when one fails.
        log: Takes the lines of all of them, `[worker 1] ...`, and what happens to them.
        on_beat: Takes every worker's beats.
        environ: What they get beside.

    Returns:
        That the work is done, or that it was ended by a signal to this process.

    Raises:
        WorkerFailed: one failed, by a fault that another attempt would meet again, or once too
            often.
        UserError: the machine's limits do not allow so many processes.
    """
    allow_open_files(settings.processes)
    restarts: list[str] = []
    left, step = settings.max_restarts, 0
    with asked_to_end() as asked:
        while True:
            before = kernel_refusals()
            outcome = _attempt(argv, settings, asked, log=log, on_beat=on_beat, environ=environ)
            # Another task's notice of the end is one for all of them.
            if outcome.asked or (settings.cluster is not None and outcome.preempted):
                return Launched(preempted=outcome.preempted, restarts=tuple(restarts))
            if outcome.failure is None:
                return Launched(preempted=False, restarts=tuple(restarts))
            failure = _with_kernel(outcome.failure, before, kernel_refusals())
            _tell(failure, log)
            # One that was taken away while it got on is no fault; one that is always is.
            if not (outcome.preempted and outcome.step > step):
                left -= 1
            step = max(step, outcome.step)
            if failure.is_final or left < 0 or not _may_go_better(outcome):
                raise WorkerFailed(failure, after=_tried(restarts))
            restarts.append(f"{failure.name} {failure.reason}")
            log(
                f"all workers start again from the last checkpoint (and after that {left} more times at most)"
            )


def _attempt(
    argv: Sequence[str],
    settings: LaunchSettings,
    asked: AskedToEnd,
    *,
    log: Log,
    on_beat: Callable[[Beat], None],
    environ: Mapping[str, str],
) -> Outcome:
    def run(commands: Sequence[Command]) -> Outcome:
        return Group(
            commands,
            asked=asked,
            watchdog_s=settings.watchdog_s,
            grace_s=settings.grace_s,
            alone_restarts=settings.max_restarts,
            log=log,
            on_beat=on_beat,
        ).run()

    if settings.cluster is not None:
        return run([_own_task(argv, settings.cluster, environ)])
    with held_ports(settings.processes) as ports:
        cluster = local_cluster(ports, workers=settings.workers, servers=settings.servers)
        return run(_commands(argv, settings, cluster, environ))


def _own_task(argv: Sequence[str], cluster: ClusterSpec, environ: Mapping[str, str]) -> Command:
    """One process, which keeps what its launcher gave it."""
    own = {
        VARIABLE: cluster.to_tf_config(),
        "STOKER_RANK": "0",  # its place among those that are started here
        "STOKER_LOCAL_WORKERS": str(max(1, cluster.near)),
    }
    return Command(
        name=cluster.name,
        argv=tuple(argv),
        environ={**_DEFAULTS, **environ, **own},
    )


def _commands(
    argv: Sequence[str],
    settings: LaunchSettings,
    cluster: Sequence[ClusterSpec],
    environ: Mapping[str, str],
) -> list[Command]:
    computing = [spec for spec in cluster if spec.job == "worker"]
    cores = sorted(os.sched_getaffinity(0))
    shares = share_cores(cores, len(computing)) if settings.pin else [()] * len(computing)
    threads = share_threads(environ, cores=len(cores), processes=len(computing))
    names = visible_names(read_gpus().states, environ)
    devices = share_gpus(names, processes=len(computing))
    commands = []
    for rank, spec in enumerate(cluster):
        share = spec.index if spec.job == "worker" else None
        own = {
            VARIABLE: spec.to_tf_config(),
            "STOKER_RANK": str(rank),
            "STOKER_LOCAL_WORKERS": str(len(computing)),
            **threads,
            **(devices[share] if share is not None else {GPUS: "-1"}),
        }
        commands.append(
            Command(
                name=spec.name,
                argv=tuple(argv),
                environ={**_DEFAULTS, **environ, **own},
                cores=shares[share] if share is not None else (),
                serves=spec.serves,
                # A chief finds a worker that is back; with a server its variables are gone.
                alone=spec.serves and spec.job == "worker",
            )
        )
    return commands


_DEFAULTS = {
    # Lines are seen when they are said, and a crash in native code shows where Python was.
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    # gRPC then reports a peer that is gone instead of waiting for it.
    "GRPC_FAIL_FAST": "use_caller",
}
"""Environment of every process, where the user has not set it."""


def _with_kernel(failure: Failure, before: Refusals, after: Refusals) -> Failure:
    notes = []
    if (killed := after.out_of_memory - before.out_of_memory) > 0:
        notes.append(
            f"out of memory: the kernel killed {killed} process(es); lower train.batch_size, or "
            "what the feed holds"
        )
    if after.too_many_processes > before.too_many_processes:
        notes.append("the limit of processes and threads was reached; raise it (pids.max)")
    return replace(failure, reason="; ".join([failure.reason, *notes]))


def _tell(failure: Failure, log: Log) -> None:
    log(f"{failure.name} {failure.reason}. Its last lines:")
    for line in failure.tail:
        log(f"  | {line}")


def _may_go_better(outcome: Outcome) -> bool:
    """Whether another attempt is worth it: an error before the first step will come again."""
    code = outcome.failure.code if outcome.failure else None
    return outcome.began or outcome.preempted or code is None or code < 0


def _tried(restarts: Sequence[str]) -> str:
    return f", after {len(restarts)} restarts" if restarts else ""
