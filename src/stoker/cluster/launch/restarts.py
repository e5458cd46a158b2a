"""Repeats attempts until the work is done: after a failure, all workers restart from the last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import GPUS, share_gpus, visible_names
from stoker.cluster.launch.group import (
    Failure,
    Group,
    GroupLimits,
    Outcome,
    StopRequest,
    stop_requests,
)
from stoker.cluster.launch.member import Beat, Command, Log
from stoker.cluster.limits import (
    Refusals,
    allow_open_files,
    kernel_refusals,
    share_cores,
    share_threads,
)
from stoker.cluster.resolver import VARIABLE, ClusterSpec, held_ports, local_cluster
from stoker.core.errors import EXIT_BUG, ConfigError, Plain, UserError

MAX_WORKERS = 1024
"""Maximum number of workers; a larger number is certainly a typo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """How many processes train together on this machine, and what happens after a failure."""

    workers: int
    """Number of worker processes, which compute the training steps."""

    servers: int = 0
    """Number of parameter servers; if there are any, a chief is started too."""

    cluster: ClusterSpec | None = None
    """A cluster whose other tasks are started elsewhere; None: all tasks are started here."""

    pin: bool = False
    """Whether each worker gets cores of its own."""

    max_restarts: int = 3
    """Maximum number of restarts of all processes. A restart after a preemption (exit code 75) is not counted if
    training had made progress."""

    watchdog_s: float = 300.0
    """Maximum time without a heartbeat, or, during training, without a step, seconds."""

    grace_s: float = 30.0
    """Maximum time between a request to end and the exit of all processes, seconds."""

    @property
    def processes(self) -> int:
        """Number of processes that are started on this machine."""
        if self.cluster is not None:
            return 1
        return self.workers + (self.servers + 1 if self.servers else 0)

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers must be from 1 to {MAX_WORKERS}", got=self.workers)
        if not 0 <= self.servers <= MAX_WORKERS:
            raise ConfigError(
                f"--parameter-servers must be from 0 to {MAX_WORKERS}", got=self.servers
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """How a launch ended."""

    preempted: bool
    """Whether the launch ended because of a signal, before the work was done."""

    restarts: tuple[str, ...]
    """The reason for each restart, as a clause."""


class WorkerFailed(UserError):
    """A worker failed, and the workers are not started again; `failure` says which worker failed, and how."""

    def __init__(self, failure: Failure, *, after: str) -> None:
        """Build the message.

        Args:
            failure: The last failure.
            after: A clause about earlier attempts, or "".
        """
        self.failure = failure
        self.exit_code = failure.code if failure.is_final and failure.code else EXIT_BUG
        last = next((line for line in reversed(failure.tail) if line.strip()), "it printed nothing")
        super().__init__(
            f"{failure.name} {failure.reason}{after}",
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

    Each process gets `TF_CONFIG`, `STOKER_RANK` and its share of cores, threads and GPUs. The program must continue
    from its last checkpoint when it is started again, end with exit code 75 after SIGTERM, and send heartbeats
    (`stoker.train.context.heartbeat`).

    Args:
        argv: The program and its arguments.
        settings: How many processes, and what happens after a failure.
        log: Receives the output lines of all processes, `[worker 1] ...`, and the events.
        on_beat: Receives the heartbeats of all workers.
        environ: Environment of the processes, to which the variables above are added.

    Returns:
        How the launch ended: the work is done, or this process got a signal to end.

    Raises:
        WorkerFailed: workers failed too often, or a worker failed in a way that another attempt would repeat.
        UserError: the limits of this machine do not allow so many processes.
    """
    allow_open_files(settings.processes)
    restarts: list[str] = []
    left, step = settings.max_restarts, 0
    with stop_requests() as stop:
        while True:
            before = kernel_refusals()
            outcome = _attempt(argv, settings, stop, log=log, on_beat=on_beat, environ=environ)
            # If another task got a signal to end, this one must end too.
            if outcome.signaled or (settings.cluster is not None and outcome.preempted):
                return Launched(preempted=outcome.preempted, restarts=tuple(restarts))
            if outcome.failure is None:
                return Launched(preempted=False, restarts=tuple(restarts))
            failure = _with_kernel(outcome.failure, before, kernel_refusals())
            _log_failure(failure, log)
            # A preemption is not counted as a failure as long as training makes progress.
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
    stop: StopRequest,
    *,
    log: Log,
    on_beat: Callable[[Beat], None],
    environ: Mapping[str, str],
) -> Outcome:
    def run(commands: Sequence[Command]) -> Outcome:
        limits = GroupLimits(
            watchdog_s=settings.watchdog_s,
            grace_s=settings.grace_s,
            alone_restarts=settings.max_restarts,
        )
        return Group(commands, limits, stop=stop, log=log, on_beat=on_beat).run()

    if settings.cluster is not None:
        return run([_own_task(argv, settings.cluster, environ)])
    with held_ports(settings.processes) as ports:
        cluster = local_cluster(ports, workers=settings.workers, servers=settings.servers)
        return run(_commands(argv, settings, cluster, environ))


def _own_task(argv: Sequence[str], cluster: ClusterSpec, environ: Mapping[str, str]) -> Command:
    """Return the command of the only process; it keeps the `TF_CONFIG` that another launcher has set."""
    own = {
        VARIABLE: cluster.to_tf_config(),
        "STOKER_RANK": "0",  # its index among the processes that this launcher starts
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
                # Only workers restart alone: a chief reconnects to a restarted worker, but the variables of a
                # parameter server would be lost.
                alone=spec.serves and spec.job == "worker",
            )
        )
    return commands


_DEFAULTS = {
    # Python writes each line immediately, and a crash in native code prints the Python stack.
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    # gRPC reports an error if a peer has ended, instead of waiting for the peer.
    "GRPC_FAIL_FAST": "use_caller",
}
"""Variables that every process gets; values that the user has set take precedence."""


def _with_kernel(failure: Failure, before: Refusals, after: Refusals) -> Failure:
    notes = []
    if (killed := after.out_of_memory - before.out_of_memory) > 0:
        notes.append(
            f"out of memory: the kernel killed {killed} process(es); lower train.batch_size, or "
            "the size of the feed's buffers"
        )
    if after.too_many_processes > before.too_many_processes:
        notes.append("the limit of processes and threads was reached; raise it (pids.max)")
    return replace(failure, reason="; ".join([failure.reason, *notes]))


def _log_failure(failure: Failure, log: Log) -> None:
    log(f"{failure.name} {failure.reason}. Its last lines:")
    for line in failure.tail:
        log(f"  | {line}")


def _may_go_better(outcome: Outcome) -> bool:
    """Whether another attempt may succeed. An error before the first step would occur again."""
    code = outcome.failure.code if outcome.failure else None
    return outcome.began or outcome.preempted or code is None or code < 0


def _tried(restarts: Sequence[str]) -> str:
    plural = "s" if len(restarts) > 1 else ""
    return f", after {len(restarts)} restart{plural}" if restarts else ""
