"""Renders the script for sbatch: options as `#SBATCH` lines, variables with facts of the job, then `job.sh`."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from stoker.core.errors import ConfigError, Plain
from stoker.jobs.job import Job, Resources
from stoker.jobs.provider import Array
from stoker.jobs.providers.slurm.environment.launch import launch_lines, require_lines
from stoker.jobs.providers.slurm.environment.maker import interpreter
from stoker.jobs.providers.slurm.settings import SlurmTarget, require_printable, require_variable

SCRIPT = "job.sbatch"
"""Name of the script in the job's folder."""

BODY = Path(__file__).with_name("job.sh")
SETUP_LINE = "#@ environment, modules and setup of the target\n"
"""Line of `job.sh` that is replaced by the target's setup lines."""

NOTICE = "URG"
"""Signal that announces the end of a job. A script that has not yet set its traps ignores this signal; USR1 and TERM
would kill it."""

LOGIN = f"""\
# The login that `bash -l` does before its first line: a signal meanwhile must not end the script.
received=
for signal in {NOTICE} USR1 TERM; do trap "received=$signal" "$signal"; done
if [ -r /etc/profile ]; then . /etc/profile; fi
for profile in ~/.bash_profile ~/.bash_login ~/.profile; do
	if [ -r "$profile" ]; then
		. "$profile"
		break
	fi
done
"""

MARK = "stoker"
"""Key of the job's ID in a Slurm job's comment, which is JSON."""

SAVE_MARGIN_S = 5
"""Time before the time limit at which the job is requeued even if workers are still saving, seconds."""

PREEMPTED_S = 600
"""Time for which a job that received the signal waits to be preempted, seconds; if it is not preempted, it starts
again. The time is longer than GraceTime of most clusters."""

_NAME_CHARS = 64
_ID_CHARS = 9
_PATTERN = re.compile(r"[%\\]")
_SAFE = re.compile(r"[A-Za-z0-9_./:=@%+,-]+")


def slurm_name(job_id: str) -> str:
    """Return the name of a job in Slurm: letters, digits, `.`, `_` and `-`, with the whole hash of its ID."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "-", job_id[:-_ID_CHARS])[:_NAME_CHARS]
    return readable.lstrip("-") + job_id[-_ID_CHARS:]


def comment(job: Job, name: str) -> str:
    """Return the comment of a job or array in Slurm: a line of JSON in ASCII.

    Args:
        job: The job, or any job of the array.
        name: ID of the job or of the sweep.
    """
    facts = {MARK: name, "gpu_hours": job.resources.gpu_hours, "labels": job.labels}
    return json.dumps({key: value for key, value in facts.items() if value})


def job_id_of(text: str) -> str | None:
    """Return a job's ID from its comment; None if Stoker did not submit it."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    found = value.get(MARK) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def render(
    job: Job, target: SlurmTarget, source: Path | None = None, array: Array | None = None
) -> str:
    """Return the complete script; it does not contain the values of secrets.

    Args:
        job: The job with its paths on the cluster, or any job of an array.
        target: The settings of the target.
        source: The experiment's folder on this machine; None: `job.folder`.
        array: The jobs that are submitted together; None: only `job` is submitted.

    Raises:
        ConfigError: a name or a path cannot be written into a script, or workers cannot be distributed evenly.
    """
    require_printable(str(job.place), "the folder of runs and the experiment's name")
    if _PATTERN.search(str(job.place)):
        raise ConfigError(
            "the path of the folder of runs must contain neither % nor \\, which have a "
            "meaning in the name of Slurm's log",
            got=str(job.place),
            fix="Choose another folder: --set runs=DIR, or remote_folder of the target.",
        )
    options = [*_options(job, target, array), *target.sbatch]
    python = interpreter(job, target, source)
    place = f"place={shlex.quote(str(job.place))}"
    if array is not None:
        place = 'cd "$SLURM_ARRAY_TASK_ID" || exit 1; place=$(pwd -P)'
    name = job.id if array is None else array.id
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        LOGIN,
        f"# Job {printable(name)}, written by `stoker submit`.",
        place,
        f"comment={shlex.quote(comment(job, name))}",
        f"python={shlex.quote(python)}",
        f"workers={_workers(job)}",
        f"max_restarts={target.max_restarts}",
        f"save_s={target.grace_s - SAVE_MARGIN_S}",
        f"preempted_s={PREEMPTED_S}",
        f'step=("--ntasks=$workers" {" ".join(map(shlex.quote, _step_options(job, target)))})',
        *launch_lines(job, target, python),
        f"secrets=({' '.join(job.secrets)})",
        "",
    ]
    return "\n".join(lines) + BODY.read_text().replace(SETUP_LINE, _setup(job, target))


def printable(text: str) -> str:
    """Convert a text to ASCII without control characters, for a comment in the script."""
    return json.dumps(text)[1:-1]


def _options(job: Job, target: SlurmTarget, array: Array | None) -> list[str]:
    needs = job.resources
    name, place, output = job.id, job.place, "logs/slurm.log"
    if array is not None:
        name, place, output = array.id, array.place, f"%a/{output}"
    per_node = workers_per_node(job, target)
    pairs: list[tuple[str, object]] = [
        ("job-name", slurm_name(name)),
        ("comment", comment(job, name)),
        ("array", array and tasks(sorted(array.jobs), array.at_once)),
        ("partition", target.partition),
        ("account", target.account),
        ("qos", target.qos),
        ("nodes", _nodes(job, per_node)),
        # An elastic job must set neither `ntasks` nor `ntasks-per-node`: Slurm would compute a number of tasks from
        # them, and would always allocate the minimum number of machines.
        ("ntasks", None if needs.min_workers else needs.workers),
        ("ntasks-per-node", None if needs.min_workers else per_node),
        ("cpus-per-task", needs.cpus),
        ("mem", needs.memory_gib and f"{math.ceil(needs.memory_gib * per_node * 1024)}M"),
        ("time", needs.time_limit_s and _duration(needs.time_limit_s)),
        ("signal", f"B:{NOTICE}@{target.grace_s}"),
        ("chdir", str(place)),
        ("output", output),
        ("open-mode", "append"),
    ]
    if needs.gpus:
        pairs.append(_gpus(needs, per_node, target))
    values = [f"--{name}={quoted(str(value))}" for name, value in pairs if value is not None]
    return [*values, "--requeue", "--export=ALL"]


def tasks(numbers: Sequence[int], at_once: int | None) -> str:
    """Return the value of `--array`, e.g. `0-2,5%2`.

    Args:
        numbers: Numbers of the tasks, ascending.
        at_once: Maximum number of tasks that run at the same time.
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{text}%{at_once}" if at_once else text


def workers_per_node(job: Job, target: SlurmTarget) -> int:
    """Return how many workers each machine gets.

    Raises:
        ConfigError: workers cannot be distributed evenly, or an elastic job has several workers on each machine.
    """
    nodes = target.nodes or job.resources.workers
    if job.resources.min_workers and nodes != job.resources.workers:
        raise ConfigError(
            "an elastic job must have one worker on each node",
            got=Plain(f"{job.resources.workers} workers on {nodes} nodes"),
            fix="Remove `nodes` of the target, or train.elastic.",
        )
    if job.resources.workers % nodes:
        raise ConfigError(
            f"the workers of a job must be a multiple of the target's nodes ({nodes})",
            got=job.resources.workers,
            fix="Change the number of workers, or `nodes` of the target.",
        )
    return job.resources.workers // nodes


def _nodes(job: Job, per_node: int) -> str:
    needs = job.resources
    if needs.min_workers:
        return f"{needs.min_workers}-{needs.workers}"
    return str(needs.workers // per_node)


def _workers(job: Job) -> str:
    """Return the number of workers, as shell text; for an elastic job, the number of machines that Slurm allocated."""
    return "$SLURM_JOB_NUM_NODES" if job.resources.min_workers else str(job.resources.workers)


def _gpus(needs: Resources, per_node: int, target: SlurmTarget) -> tuple[str, object]:
    kind = f"{target.gpu_type}:" if target.gpu_type else ""
    # An elastic job does not set a number of tasks, so GPUs per task cannot be used.
    if target.gpus_by == "gres" or needs.min_workers:
        return "gres", f"gpu:{kind}{needs.gpus * per_node}"
    return "gpus-per-task", f"{kind}{needs.gpus}"


def _step_options(job: Job, target: SlurmTarget) -> list[str]:
    needs = job.resources
    options = ["--ntasks-per-node=1"] if needs.min_workers else []
    if needs.cpus:
        # `srun` does not take this option from the job.
        options.append(f"--cpus-per-task={needs.cpus}")
    if needs.gpus and target.gpus_by == "gres" and workers_per_node(job, target) > 1:
        # Otherwise each worker sees all GPUs of its machine.
        options.append(f"--gpu-bind=per_task:{needs.gpus}")
    if target.container is not None and target.container.runtime == "pyxis":
        options.extend(target.container.options((job.folder, job.runs), gpus=needs.gpus > 0))
    return options


def _setup(job: Job, target: SlurmTarget) -> str:
    for name in (*job.secrets, *job.environment):
        require_variable(name, "environment and secrets of a job")
    environment = target.environment | job.environment
    if target.network_interface:
        environment = environment | {"STOKER_NETWORK_INTERFACE": target.network_interface}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    for module in map(shlex.quote, target.modules):
        failure = shlex.quote(f"module {module} cannot be loaded")
        lines.append(f"module load {module} || end 2 {failure}")
    lines.extend([*target.setup, *require_lines(target)])
    return "".join(f"{line}\n" for line in lines)


def quoted(value: str) -> str:
    """Quote a value for a `#SBATCH` line, where a backslash escapes the next character, even inside quotes.

    Raises:
        ConfigError: the value has a line break, which would end the line.
    """
    require_printable(value, "what is passed to sbatch")
    if _SAFE.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _duration(seconds: float) -> str:
    """Convert seconds to `D-HH:MM:00`, because Slurm counts time limits in whole minutes."""
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
