"""Translates errors of Slurm's programs into the user's terms."""

from __future__ import annotations

from stoker.core.errors import ConfigError, Plain, UserError


class AnswerLost(UserError):
    """Slurm may or may not have done what was requested."""


_NO_CONTROLLER = (
    "Slurm's controller must answer",
    "Ask again in a minute, and the cluster's administrators if it lasts. Running jobs go on without it.",
)

_NO_CLUSTER = (
    "this machine must belong to a Slurm cluster",
    "Run it on a login node of the cluster; SLURM_CONF, if it is set, must name the cluster's slurm.conf.",
)

_PROBLEMS = {
    "Unable to contact slurm controller": _NO_CONTROLLER,
    "Socket timed out": _NO_CONTROLLER,
    "Connection refused": _NO_CONTROLLER,
    "Unable to establish controller machine": _NO_CONTROLLER,
    "Zero Bytes were transmitted": _NO_CONTROLLER,
    "Could not establish a configuration source": _NO_CLUSTER,
    "Unable to process configuration file": _NO_CLUSTER,
    "Protocol authentication error": (
        "Slurm must accept this machine's credentials",
        "Munge may not run here; ask the cluster's administrators.",
    ),
    "nvalid partition": ("partition must exist in the cluster", "List them: sinfo --summarize."),
    "Invalid account": (
        "account and partition must be ones that you may use together",
        "List yours: sacctmgr show associations user=$USER.",
    ),
    "Invalid qos": (
        "qos must be one that you may use",
        "List yours: sacctmgr show associations user=$USER.",
    ),
    "Requested node configuration is not available": (
        "machines of the partition must have what the job requests",
        "Request fewer GPUs, cores or workers, less memory, or another gpu_type: sinfo --Node --Format=NodeList,CPUs,Memory,Gres shows what there is.",
    ),
    "More processors requested than permitted": (
        "machines of the partition must have as many cores as the job requests",
        "Request fewer cores or workers.",
    ),
    "Node count specification invalid": (
        "the partition must have as many machines as the job requests",
        "Request fewer workers, or set `nodes` of the target.",
    ),
    "Memory required by task is not available": (
        "machines of the partition must have as much memory as the job requests",
        "Request less memory.",
    ),
    "Requested time limit is invalid": (
        "the time limit must be within that of the partition",
        "Request less time: the job continues in its next start.",
    ),
    "Invalid generic resource": (
        "the cluster must know the kind of GPU that the job requests",
        "See `sinfo --format=%G`, and set gpu_type of the target.",
    ),
    "Access/permission denied": (
        "the job must be your own",
        "It belongs to another user, who may end it.",
    ),
    "Invalid job id": ("the job must be known to Slurm", "It may have ended long ago."),
    "QOS policy": (
        "the job must be within the limits of your account",
        "Request less, or wait until other jobs of yours have ended.",
    ),
}
"""Part of a message of Slurm -> rule and remedy for the user."""

_HINT = 'Try "'
"""Beginning of a line that follows the error about an unknown option: `Try "sbatch --help" for more information`."""

_CONFIG = ("partition", "account", "qos", "machines", "the partition", "the time", "the cluster")


def problem(program: str, code: int, output: str) -> UserError:
    """Return the error to raise for a program that failed.

    Args:
        program: Name of the program.
        code: Exit code, negative for a signal.
        output: Output of the program.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_HINT)] or lines
    said = lines[-1].removeprefix(f"{program}: ").removeprefix("error: ") if lines else ""
    if code < 0 and program == "sbatch":
        return AnswerLost(
            "sbatch must not be killed",
            got=Plain(f"it was killed by signal {-code}"),
            fix="Run the same command again: a job that was submitted is found, and not submitted twice.",
        )
    for part, (rule, fix) in _PROBLEMS.items():
        if part in output:
            kind = ConfigError if rule.startswith(_CONFIG) else UserError
            return kind(rule, got=Plain(said), fix=fix)
    return UserError(
        f"{program} must accept the request",
        got=Plain(said or f"exit code {code}"),
        fix="`sbatch` lines of the target are passed on unchanged; see the program's manual page.",
    )


WAITS = {
    "Resources": "waits until enough machines are free",
    "Priority": "waits for jobs of higher priority",
    "Dependency": "waits for another job that it depends on",
    "DependencyNeverSatisfied": "waits forever: a job that it depends on has failed; stop it",
    "JobArrayTaskLimit": "waits until other jobs of its sweep are over",
    "BeginTime": "waits a moment: Slurm delays a job that starts again (AuthInfo cred_expire, 2 minutes by default)",
    "Cleaning": "waits until its last start is cleaned up",
    "JobHeldUser": "is held by its user: scontrol release JOB",
    "JobHeldAdmin": "is held by an administrator, who can release it",
    "JobHoldMaxRequeue": "could not be started several times and is held: scontrol release JOB",
    "PartitionDown": "waits: the partition is down",
    "PartitionInactive": "waits: the partition is inactive",
    "PartitionNodeLimit": "waits forever: it requests more machines than the partition allows",
    "PartitionTimeLimit": "waits forever: its time limit is longer than the partition's; lower it",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for a license",
    "ReqNodeNotAvail": "waits: machines that it requests are down, drained or reserved",
    "BadConstraints": "waits forever: no machine has what it requests",
    "launch failed requeued held": "could not be started and is held: scontrol release JOB",
}
"""Slurm's reason -> explanation for the user. Source: squeue(1), JOB REASON CODES."""


def why_it_waits(reason: str, job_id: str) -> str:
    """Return why a job waits, in the user's terms, with Slurm's own reason in parentheses."""
    name = reason.partition(",")[0].strip("()")
    if name in ("None", ""):
        return "waits until Slurm has looked at it"
    words = WAITS.get(name)
    if words is None and name.startswith(("QOS", "Assoc", "MaxJobs")):
        words = "waits: a limit of its account or quality of service is reached"
    elif words is None and name.startswith("ReqNodeNotAvail"):
        words = WAITS["ReqNodeNotAvail"]
    if words is None:
        return f"waits: Slurm says {reason}"
    return f"{words.replace('JOB', job_id)} ({reason})"
