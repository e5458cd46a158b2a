"""Settings of a Slurm target."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain
from stoker.jobs.job import VARIABLE
from stoker.jobs.providers.slurm.container import Container

OWN_OPTIONS = (
    *("--array", "--chdir", "--comment", "--error", "--export", "--job-name", "--no-requeue"),
    *("--ntasks", "--open-mode", "--output", "--parsable", "--requeue", "--signal", "--wrap"),
)
"""Options of sbatch that Stoker sets itself: with another value it would lose the job or its state."""

VIA_SSH = "ssh:"

MAX_RESTARTS = 1000
"""A larger number of restarts is certainly a typing error."""

_HIDDEN = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmTarget:
    """The part of a cluster on which jobs run, and how a worker's environment is made there."""

    partition: str | None = None
    """Partition; default: the cluster's default."""

    account: str | None = None
    """Account that pays for the job; default: the user's default."""

    qos: str | None = None
    """Quality of service; default: the user's default."""

    nodes: int | None = None
    """Machines of a job, over which the workers are distributed evenly; default: one machine for each worker."""

    gpus_by: Literal["gres", "gpus-per-task"] = "gres"
    """How GPUs are requested: `--gres` of each machine, which elastic jobs always use, or `--gpus-per-task`."""

    gpu_type: str | None = None
    """The cluster's name of the kind of GPU, e.g. `a100`; default: any."""

    modules: tuple[str, ...] = ()
    """Environment modules that are loaded before the workers start, e.g. `cuda/12.5`."""

    setup: tuple[str, ...] = ()
    """Lines of shell that run before the workers start, after `modules`."""

    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, passed on unchanged, e.g. `--constraint=ib`."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every worker, e.g. `NCCL_*` and `TF_*`; those of the job take precedence."""

    network_interface: str | None = None
    """Interface whose address the workers use among themselves, on machines with several; default: that of the host name."""

    python: str | None = None
    """Python of the environment that has Stoker on the machines; default: the Python that submits the job. With `environment_from: lock`:
    the version or path of the Python of which uv makes the environment."""

    environment_from: Literal["python", "lock"] = "python"
    """`lock`: uv makes the environment from a lock of the experiment, once for each lock."""

    environments_folder: str | None = None
    """Folder of environments of locks, on the shared file system; default: `.environments` in the folder of runs."""

    environment_on_local_disk: bool = False
    """Whether each machine copies the environment of the lock to its own disk (`$SLURM_TMPDIR`, `$TMPDIR` or /tmp)."""

    container: Container | None = None
    """`{image: ..., runtime: pyxis or apptainer, mounts: [/FROM:/TO:ro]}`: the workers run in a container that has Stoker; `python` is the image's."""

    via: str | None = None
    """`ssh:LOGIN`: submission from a machine that does not share the cluster's file system, by your own ssh; LOGIN as ssh takes it."""

    remote_folder: str | None = None
    """With `via`: folder on the cluster's shared file system; an experiment's data and runs are in its folder NAME."""

    grace_s: int = 120
    """Time before the time limit at which the workers save, seconds. Slurm may be up to 60 s early."""

    max_restarts: int = 3
    """How often a job restarts after a worker failed; preemptions and time limits do not count."""

    def __post_init__(self) -> None:
        _require_plain(self)
        if self.via is not None or self.remote_folder is not None:
            _require_via(self)
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError("nodes must be at least 1", got=self.nodes)
        if not 10 <= self.grace_s <= 65535:
            raise ConfigError("grace_s must be from 10 to 65535 seconds", got=self.grace_s)
        if not 0 <= self.max_restarts <= MAX_RESTARTS:
            raise ConfigError(
                f"max_restarts must be from 0 to {MAX_RESTARTS}", got=self.max_restarts
            )
        if self.environments_folder is not None and not self.environments_folder.startswith("/"):
            raise ConfigError(
                "environments_folder must be an absolute path", got=self.environments_folder
            )
        if self.environment_on_local_disk and self.environment_from != "lock":
            raise ConfigError(
                "environment_on_local_disk must come with environment_from: lock",
                got=Plain(f"environment_from: {self.environment_from}"),
            )
        if self.container is not None and self.environment_from != "python":
            raise ConfigError(
                "environment_from must be python where the target has a container",
                got=self.environment_from,
                fix="The environment is that of the image: remove one of the two.",
            )
        for name in self.environment:
            require_variable(name, "environment")
        for option in self.sbatch:
            _require_option(option)


def require_variable(name: str, where: str) -> None:
    """Refuse what cannot be the name of an environment variable.

    Raises:
        ConfigError: the name is invalid.
    """
    if not VARIABLE.fullmatch(name):
        raise ConfigError(f"{where} must name environment variables", got=name)


def require_printable(text: str, where: str) -> None:
    """Refuse a line break or another control character, which would end a line of the script.

    Raises:
        ConfigError: the text has one.
    """
    if _HIDDEN.search(text):
        raise ConfigError(f"{where} must not contain line breaks or control characters", got=text)


def _require_plain(target: SlurmTarget) -> None:
    names = ("partition", "account", "qos", "gpu_type", "network_interface", "python", "via")
    for name in (*names, "environments_folder"):
        value = getattr(target, name)
        if value is not None:
            require_printable(value, name)
            if not value or value.startswith("-"):
                raise ConfigError(f"{name} must not be empty or begin with -", got=value)
    for name in ("modules", "setup", "sbatch"):
        for line in getattr(target, name):
            require_printable(line.replace("\t", " "), name)
    for variable, value in target.environment.items():
        require_printable(value, f"environment.{variable}")


def _require_via(target: SlurmTarget) -> None:
    via, folder = target.via or "", target.remote_folder or ""
    if not re.fullmatch(rf"{VIA_SSH}[^\s-]\S*", via):
        raise ConfigError(
            "via must be ssh:LOGIN", got=target.via, fix="E.g. via: ssh:me@login.example.org."
        )
    if not folder.startswith("/"):
        raise ConfigError(
            "remote_folder must be an absolute path on the cluster where the target has `via`",
            got=target.remote_folder,
        )
    require_printable(folder, "remote_folder")
    if target.environment_from != "lock" and target.python is None and target.container is None:
        raise ConfigError(
            "python, container or environment_from: lock must be set where the target has `via`",
            got=Plain("none of them"),
            fix="Name the Python on the cluster that has Stoker: python: /shared/envs/stoker/bin/python.",
        )


def _require_option(option: str) -> None:
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if not re.fullmatch(r"--[a-z][a-z0-9-]*", name):
        raise ConfigError(
            "options of sbatch must be long options", got=option, fix="E.g. `--constraint=ib`."
        )
    if name in OWN_OPTIONS:
        raise ConfigError(
            f"sbatch must leave {name} to Stoker", got=option, fix="Remove it from the target."
        )
    if any(own.startswith(name) for own in OWN_OPTIONS):
        raise ConfigError(
            "options of sbatch must have their full names",
            got=option,
            fix=nearest(name, list(OWN_OPTIONS)),
        )
