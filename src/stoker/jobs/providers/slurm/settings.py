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
"""Options of sbatch that only Stoker may set: with other values, it could not find the job or read its state."""

VIA_SSH = "ssh:"

MAX_RESTARTS = 1000
"""Maximum of `max_restarts`; a larger number is certainly a typo."""

_HIDDEN = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmTarget:
    """Settings of a target with `provider: slurm`: on which machines jobs run, and in which environment."""

    partition: str | None = None
    """Partition; default: the cluster's default partition."""

    account: str | None = None
    """Account that is charged for the job; default: the user's default account."""

    qos: str | None = None
    """Quality of service (QOS); default: the user's default QOS."""

    nodes: int | None = None
    """Number of machines of a job; workers are distributed evenly over them. Default: one machine per worker."""

    gpus_by: Literal["gres", "gpus-per-task"] = "gres"
    """Option of sbatch that requests GPUs: `gres` requests them per machine, `gpus-per-task` per worker. Elastic jobs
    always use `gres`."""

    gpu_type: str | None = None
    """Name of the kind of GPU on the cluster, e.g. `a100`; default: any kind."""

    modules: tuple[str, ...] = ()
    """Environment modules that are loaded before the workers start, e.g. `cuda/12.5`."""

    setup: tuple[str, ...] = ()
    """Shell lines that run after `modules` and before the workers start."""

    sbatch: tuple[str, ...] = ()
    """More options of sbatch, which are passed on unchanged, e.g. `--constraint=ib`."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every worker, e.g. `NCCL_*` and `TF_*`; variables of the job take precedence."""

    network_interface: str | None = None
    """Network interface through which the workers reach each other; default: the one with the address of the host
    name."""

    python: str | None = None
    """Python on the machines that has Stoker; default: the Python that submits the job. With `environment_from: lock`:
    version or path of the Python on which uv bases the environment."""

    environment_from: Literal["python", "lock"] = "python"
    """`lock`: uv makes the environment from the experiment's lock file, once for each content of the lock file."""

    environments_folder: str | None = None
    """Folder on the shared file system for environments from lock files; default: `.environments` in the folder of
    runs."""

    environment_on_local_disk: bool = False
    """Whether each machine copies the environment from the lock file to its own disk (`$SLURM_TMPDIR`, `$TMPDIR` or
    /tmp)."""

    container: Container | None = None
    """Container in which the workers run: `{image: ..., runtime: pyxis or apptainer, mounts: [/FROM:/TO:ro]}`. The
    image must have Stoker; `python` is a Python in the image."""

    via: str | None = None
    """`ssh:LOGIN`: submit through your own ssh, from a machine that does not share the cluster's file system. LOGIN is
    a destination of ssh."""

    remote_folder: str | None = None
    """With `via`: folder on the cluster's shared file system. REMOTE_FOLDER/NAME holds the data and runs of the
    experiment NAME."""

    grace_s: int = 120
    """Workers save this many seconds before the time limit. Slurm may announce the limit up to 60 s earlier."""

    max_restarts: int = 3
    """Maximum number of restarts after failures of workers; preemptions and time limits are not counted."""

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
                "environment_on_local_disk needs environment_from: lock",
                got=Plain(f"environment_from: {self.environment_from}"),
            )
        if self.container is not None and self.environment_from != "python":
            raise ConfigError(
                "environment_from must be python if the target has a container",
                got=self.environment_from,
                fix="The image already has an environment: remove one of the two settings.",
            )
        for name in self.environment:
            require_variable(name, "environment")
        for option in self.sbatch:
            _require_option(option)


def require_variable(name: str, where: str) -> None:
    """Refuse a text that cannot be the name of an environment variable.

    Raises:
        ConfigError: the name is invalid.
    """
    if not VARIABLE.fullmatch(name):
        raise ConfigError(f"{where} must name environment variables", got=name)


def require_printable(text: str, where: str) -> None:
    """Refuse a text with a line break or another control character, which would end a line of the script.

    Raises:
        ConfigError: the text has such a character.
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
            "remote_folder must be an absolute path on the cluster if the target has `via`",
            got=target.remote_folder,
        )
    require_printable(folder, "remote_folder")
    if target.environment_from != "lock" and target.python is None and target.container is None:
        raise ConfigError(
            "python, container or environment_from: lock must be set if the target has `via`",
            got=Plain("none of them"),
            fix="Set the Python on the cluster that has Stoker: python: /shared/envs/stoker/bin/python.",
        )


def _require_option(option: str) -> None:
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if not re.fullmatch(r"--[a-z][a-z0-9-]*", name):
        raise ConfigError(
            "options of sbatch must be long options", got=option, fix="E.g. `--constraint=ib`."
        )
    if name in OWN_OPTIONS:
        raise ConfigError(
            f"`sbatch` must not contain {name}, which Stoker sets",
            got=option,
            fix="Remove it from the target.",
        )
    if any(own.startswith(name) for own in OWN_OPTIONS):
        raise ConfigError(
            "options of sbatch must have their full names",
            got=option,
            fix=nearest(name, list(OWN_OPTIONS)),
        )
