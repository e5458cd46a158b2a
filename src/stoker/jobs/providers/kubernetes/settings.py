"""Settings of a Kubernetes target."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from stoker.core.errors import ConfigError
from stoker.jobs.code_store import BUCKETS
from stoker.jobs.job import VARIABLE
from stoker.jobs.providers.kubernetes.pod.git import SOURCE

Kind = Literal["job", "jobset", "tfjob"]
"""The kind of object for a job: an Indexed Job, a JobSet, or a TFJob of the training operator."""

MAX_RESTARTS = 1000
"""Maximum of `max_restarts`; a larger number is certainly a typo."""

LONGEST_GRACE_S = 86400
"""Maximum of `grace_s`; a longer time is certainly a typo."""

MIN, MAX = 0.001, 1_000_000
"""Minimum and maximum of numbers of cores and of GiB. Less than the minimum would be rounded to 0, which means no
limit."""

LONGEST_S = 366 * 86400
"""Maximum of `start_s` and `keep_s`; a longer time is certainly a typo."""

MAX_ID = 2**31 - 1
"""Maximum number of a user or a group."""

_RANGES = {
    **dict.fromkeys(("cpus", "memory_gib", "shm_gib", "ephemeral_gib"), (MIN, MAX, "")),
    "grace_s": (10, LONGEST_GRACE_S, " s"),
    "start_s": (1, LONGEST_S, " s"),
    "keep_s": (1, LONGEST_S, " s"),
    "max_restarts": (0, MAX_RESTARTS, ""),
    "run_as_user": (0, MAX_ID, ""),
    "fs_group": (0, MAX_ID, ""),
}
"""Setting -> minimum, maximum and unit."""

OWN_PATHS = (Path("/tmp"), Path("/dev/shm"), Path("/stoker/code"))  # noqa: S108 - the pod's own volumes
"""Paths in a pod where Stoker itself mounts volumes."""

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
"""Match the key and the value of a label. Source: Kubernetes, "Labels and Selectors"."""

_LOGIN = re.compile(r"//[^/]*@(?=[^/])")
_SECRET = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._a-zA-Z0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A PersistentVolumeClaim that all pods mount. The one with the folder of runs must be ReadWriteMany."""

    claim: str
    """Name of the claim, in the namespace."""

    path: Path
    """Absolute path at which pods mount the volume."""

    sub_path: str = ""
    """Folder on the volume to mount; empty: the whole volume."""

    read_only: bool = False
    """Whether the volume is read-only in the pods."""

    def __post_init__(self) -> None:
        _require_name(self.claim, "claim", _SUBDOMAIN)
        if not self.path.is_absolute() or ".." in self.path.parts or self.path == Path("/"):
            raise ConfigError("path of a volume must be an absolute path", got=str(self.path))
        if ":" in str(self.path):
            raise ConfigError("path of a volume must have no colon", got=str(self.path))
        if self.sub_path.startswith("/") or ".." in PurePosixPath(self.sub_path).parts:
            raise ConfigError("sub_path must be a folder inside the volume", got=self.sub_path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """A taint of nodes that the pods accept; the field names are those of Kubernetes."""

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""

    def __post_init__(self) -> None:
        if self.operator == "Exists" and self.value:
            raise ConfigError(
                "a toleration with a value must have operator Equal",
                got=self.value,
                fix="Add `operator: Equal`.",
            )
        if self.operator == "Equal" and not self.key:
            raise ConfigError("a toleration with operator Equal must have a key", got=self.key)
        if self.key:
            _require_name(self.key, "the key of a toleration", _KEY)


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesTarget:
    """Settings of a target with `provider: kubernetes`: the cluster, and the pods of jobs on it."""

    image: str
    """Image of the pods. It must contain Stoker and TensorFlow: nothing is installed when a pod starts."""

    kubeconfig: Path | None = None
    """File with the credentials; default: `$KUBECONFIG`, else `~/.kube/config`, else the credentials of the submitting
    pod."""

    context: str | None = None
    """Context in the kubeconfig; default: the current context."""

    namespace: str | None = None
    """Namespace of the jobs; default: the namespace of the context, else `default`."""

    kind: Kind | None = None
    """`job`, `jobset` or `tfjob`; default: a JobSet if the cluster knows it, else an Indexed Job."""

    queue: str | None = None
    """LocalQueue of Kueue, which starts all pods of a job together; default: no queue, so each pod starts as soon as
    it finds resources."""

    priority_class: str | None = None
    """PriorityClass of the pods; Kueue also uses it to order its queue."""

    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have, e.g. for a kind of GPU or for spot instances."""

    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that the pods accept, each with `key`, `operator`, `value`, `effect`."""

    gpu_resource: str = "nvidia.com/gpu"
    """Name of the GPU resource in the cluster."""

    cpus: float = 1.0
    """Number of cores of each worker, if the job does not set it."""

    memory_gib: float = 4.0
    """Memory of each worker, GiB, if the job does not set it; used as request and limit."""

    shm_gib: float = 1.0
    """Size of /dev/shm, GiB; what is stored there is part of the worker's memory."""

    ephemeral_gib: float = 10.0
    """Local disk of each worker, GiB, for /tmp, which holds the unpacked code; used as request and limit."""

    volumes: tuple[Volume, ...] = ()
    """Claims that pods mount, each with `claim`, `path`, `sub_path`, `read_only`; the folder of runs must be on one of
    them."""

    code: str = "auto"
    """How code reaches the pods: `configmap` (at most 900 KiB), `volume` (in the folder of runs), `auto`, a folder of
    a bucket (`s3://BUCKET/FOLDER`, `gs://...`), or `git+https://HOST/REPOSITORY@COMMIT#subdirectory=FOLDER`."""

    service_account: str | None = None
    """ServiceAccount of the pods; default: the namespace's default account. Its token is not mounted."""

    image_pull_secrets: tuple[str, ...] = ()
    """Names of secrets with credentials for the image's registry."""

    secrets: dict[str, str] = field(default_factory=dict)
    """Environment variable -> `SECRET/KEY` on the cluster. A job gets a variable by `--secret NAME`. Values are never
    copied."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every worker, e.g. `NCCL_*` and `TF_*`; variables of the job take precedence."""

    run_as_user: int | None = 1000
    """User ID (UID) of the processes and of their files; null: the image's user, which must not be root."""

    fs_group: int | None = None
    """ID of the group (GID) that owns the volumes, if their driver supports that."""

    read_only_root: bool = True
    """Whether the image's own files are read-only; /tmp is always writable."""

    network_policy: bool = True
    """Whether a NetworkPolicy lets only pods of the job reach the job's ports: TensorFlow's servers execute whatever
    any caller sends."""

    disruption_budget: bool = False
    """Whether a PodDisruptionBudget forbids evictions. It blocks every drain of the job's nodes."""

    python: str = "python3"
    """Path or name of the Python in the image that has Stoker."""

    grace_s: int = 120
    """Time that workers get to save, seconds: after a request to end the pod, and before the job's time limit."""

    start_s: int = 600
    """Maximum wait for all pods of a start, seconds; then the job ends, frees its GPUs, and names the missing pods."""

    max_restarts: int = 3
    """Maximum number of restarts after failures of workers; preemptions, evictions and time limits are not counted."""

    keep_s: int = 7 * 86400
    """Time for which the cluster keeps a job that is over, seconds; its state and logs remain in the folder of
    runs."""

    def __post_init__(self) -> None:
        _require_names(self)
        _require_numbers(self)
        known = self.code in ("auto", "configmap", "volume") or self.code.startswith(BUCKETS)
        if not known and not SOURCE.fullmatch(self.code):
            raise ConfigError(
                "code must be auto, configmap, volume, s3:// or gs:// with a bucket and a folder, or "
                "git+https://HOST/REPOSITORY@COMMIT with all 40 digits",
                got=_LOGIN.sub("//***@", self.code),  # it may contain a token
                fix="`git rev-parse HEAD` prints the commit. A login in the URL is refused.",
            )
        for name in (*self.environment, *self.secrets):
            _require_name(name, "environment and secrets", VARIABLE)
        for name, reference in self.secrets.items():
            if not _SECRET.fullmatch(reference):
                raise ConfigError(
                    f"secrets.{name} must be SECRET/KEY",
                    got=reference,
                    fix="The value itself stays on the cluster: kubectl create secret generic SECRET "
                    "--from-file=KEY=FILE.",
                )


def _require_names(target: KubernetesTarget) -> None:
    if not target.image.strip() or any(char.isspace() for char in target.image):
        raise ConfigError("image must name an image", got=target.image, fix="E.g. registry/name:1.")
    if not target.python.strip() or not target.python.isprintable():
        raise ConfigError("python must name a program of the image", got=target.python)
    _require_name(target.gpu_resource, "gpu_resource", _KEY)
    for key, value in target.node_selector.items():
        _require_name(key, "a key of node_selector", _KEY)
        _require_name(value, f"node_selector.{key}", _VALUE)
    for name, value in target.environment.items():
        if "\0" in value:
            raise ConfigError(f"environment.{name} must be text without a zero byte", got=value)
    _require_paths([each.path for each in target.volumes])
    if target.namespace is not None:
        _require_name(target.namespace, "namespace", _LABEL)
    for name in ("queue", "priority_class", "service_account"):
        value = getattr(target, name)
        if value is not None:
            _require_name(value, name, _SUBDOMAIN)
    for secret in target.image_pull_secrets:
        _require_name(secret, "image_pull_secrets", _SUBDOMAIN)


def _require_numbers(target: KubernetesTarget) -> None:
    for name, (least, most, unit) in _RANGES.items():
        number = getattr(target, name)
        if number is not None and not least <= number <= most:
            raise ConfigError(f"{name} must be from {least} to {most}{unit}", got=number)
    if target.shm_gib >= target.memory_gib:
        raise ConfigError(
            "shm_gib must be below memory_gib: /dev/shm counts as memory", got=target.shm_gib
        )
    if target.run_as_user == 0:
        raise ConfigError("run_as_user must not be root", got=0, fix="Set another user, e.g. 1000.")


def _require_paths(paths: list[Path]) -> None:
    for number, path in enumerate(paths):
        if path in paths[:number] or path in OWN_PATHS:
            raise ConfigError(
                "each volume must have a different path in the pods",
                got=str(path),
                fix=f"Choose another path; the pod itself uses {', '.join(map(str, OWN_PATHS))}.",
            )


def _require_name(value: str, where: str, form: re.Pattern[str]) -> None:
    if not form.fullmatch(value) or len(value) > 253:
        raise ConfigError(f"{where} must be a name that Kubernetes takes", got=value)
