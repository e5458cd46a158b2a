"""One deployment: the model, the platform and the server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoker.core.config import dns_name
from stoker.core.errors import ConfigError, Plain
from stoker.deploy.shared import IMAGE_ROOT, ROOT, SharedVolume

Target = Literal["compose", "kubernetes", "kserve"]
ServerKind = Literal["stoker", "tensorflow-serving"]

REST_PORT = 8501
GRPC_PORT = 8500

_MEMORY = re.compile(r"[1-9][0-9]{0,6}(Mi|Gi)")
_CPU = re.compile(r"[1-9][0-9]{0,5}(m|\.[0-9]{1,3})?|0?\.(?!0+$)[0-9]{1,3}")
"""Number of cores (0.5), or thousandths of a core (500m): the smallest unit, so more than 3 decimals are a typo."""

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Matches model names without characters that are special in YAML, in Dockerfiles or in Kubernetes's `$(VARIABLE)`."""

_PATH = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?/)?{_PATH}(?:/{_PATH})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
"""Matches names of images. Source: github.com/distribution/reference, regexp.go."""

_IMAGE_CHARS = 255
"""Maximum number of characters of an image's name. Source: the same as for `_IMAGE`."""

_MAX = 100_000
"""Maximum number of replicas and of waiting requests. More is certainly a typo; Kubernetes stores 32 bits."""

_LONGEST_JOB = 63
"""Maximum length of a Job's name: the name is also the value of a label of the pods, which has this limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one deployment consists of."""

    model: str
    """Name under which clients request the model."""

    version: int
    """Version of the model in the image."""

    source: Path
    """Folder of that version, which is copied into the image."""

    target: Target
    """The platform for which manifests are written."""

    server: ServerKind
    """Server program in the image."""

    image: str
    """Name of the image in the registry that the cluster pulls from."""

    base: str
    """Image on which the Dockerfile builds (`FROM`)."""

    replicas: int = 2
    """Minimum number of servers."""

    max_replicas: int = 10
    """Maximum number of servers."""

    cpu: str = "1"
    """CPU cores that a server requests; a limit in Compose."""

    memory: str = "2Gi"
    """Memory limit of a server."""

    gpu: bool = False
    """Whether each server gets a GPU; then the image contains TensorFlow's CUDA libraries."""

    shared: SharedVolume | None = None
    """Volume with a model repository that all servers share; None: the model is only in the image."""

    queue_target: int | None = None
    """Waiting requests per server above which the autoscaler adds servers; None: it uses only the CPU."""

    def __post_init__(self) -> None:
        """Refuse values that the manifests cannot express, or that the platform would misread."""
        if not 1 <= self.replicas <= self.max_replicas <= _MAX:
            raise ConfigError(
                f"there must be at least 1 replica, no more than --max-replicas, and at most {_MAX}",
                got=Plain(f"{self.replicas} to {self.max_replicas}"),
            )
        for name, value, pattern, example in (
            ("the model's name", self.model, _MODEL, "taxi_tips-v2"),
            ("--cpu", self.cpu, _CPU, "2 or 500m"),
            ("--memory", self.memory, _MEMORY, "2Gi or 512Mi"),
            ("--image", self.image, _IMAGE, "registry.example.com/team/taxi:3"),
            ("--base-image", self.base, _IMAGE, "python:3.11-slim"),
        ):
            if not pattern.fullmatch(value) or len(value) > _IMAGE_CHARS:
                raise ConfigError(f"{name} must be like {example}", got=value)
        if self.gpu and self.server != "stoker":
            raise ConfigError(
                "--gpu needs --server stoker, whose image installs the CUDA libraries that Stoker pins",
                got=self.server,
                fix="For TensorFlow Serving, choose its GPU image: --base-image "
                "tensorflow/serving:VERSION-gpu, and add the GPU to the manifest.",
            )
        if self.shared is not None and (self.target, self.server) != ("kubernetes", "stoker"):
            raise ConfigError(
                "--shared-repository needs --target kubernetes and --server stoker",
                got=f"--target {self.target} --server {self.server}",
                fix="Leave it out: the model is in the image then.",
            )
        if self.shared is not None and len(f"{self.name}-push-{self.version}") > _LONGEST_JOB:
            raise ConfigError(
                "with --shared-repository, the Job's name NAME-push-VERSION must have at most "
                f"{_LONGEST_JOB} characters",
                got=f"{self.name}-push-{self.version}",
                fix="Push the model under a shorter name.",
            )
        if self.queue_target is not None:
            self._check_queue_target(self.queue_target)
        if self.target == "compose" and self.cpu.endswith("m"):
            raise ConfigError(
                "with --target compose, --cpu must be a number of cores, like 0.5", got=self.cpu
            )

    def _check_queue_target(self, target: int) -> None:
        if not 1 <= target <= _MAX:
            raise ConfigError(f"--queue-target must be from 1 to {_MAX}", got=target)
        if (self.target, self.server) != ("kubernetes", "stoker"):
            raise ConfigError(
                "--queue-target needs --target kubernetes and --server stoker, which measures its queue",
                got=f"--target {self.target} --server {self.server}",
                fix="Leave it out: the servers are scaled by CPU then.",
            )

    @property
    def memory_bytes(self) -> int:
        """Memory limit of a server, bytes."""
        return int(self.memory[:-2]) << {"Mi": 20, "Gi": 30}[self.memory[-2:]]

    @property
    def claim(self) -> str:
        """Name of the PersistentVolumeClaim of the shared repository."""
        return (self.shared.claim if self.shared else "") or f"{self.name}-models"

    @property
    def name(self) -> str:
        """The model's name, converted to a valid name of cluster objects."""
        return dns_name(self.model)

    @property
    def image_root(self) -> str:
        """Folder of the models in the image."""
        return ROOT if self.shared is None else IMAGE_ROOT

    @property
    def base_path(self) -> str:
        """Folder of the model's versions in a server's container."""
        return f"{ROOT}/{self.model}"

    @property
    def arguments(self) -> list[str]:
        """Arguments of the server in its container."""
        flags = [f"--model_name={self.model}", f"--model_base_path={self.base_path}"]
        if self.shared is not None:
            flags = [ROOT]  # serve every model of the repository, with its rollout
        ports = [f"--port={GRPC_PORT}", f"--rest_api_port={REST_PORT}"]
        # Listen on all addresses: a container's loopback address cannot be reached from outside. The network policy
        # limits access.
        own = ["serve", *flags, "--host=0.0.0.0", "--allow-unauthenticated", *ports]
        return own if self.server == "stoker" else [*flags, *ports]
