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
"""Kubernetes takes no less than a thousandth of a core; more digits are typing errors."""

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Model names without characters that are special in YAML, Dockerfiles or Kubernetes's `$(VARIABLE)`."""

_PATH = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?/)?{_PATH}(?:/{_PATH})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
"""Names of images. Source: github.com/distribution/reference, regexp.go."""

_IMAGE_CHARS = 255
"""Most characters of an image's name, by the same source."""

_MAX = 100_000
"""Most replicas and waiting requests; more is a typing error, and Kubernetes takes 32 bits."""

_LONGEST_JOB = 63
"""Longest name of a Job: its pods have it as a label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One deployment."""

    model: str
    """Name of the model for clients."""

    version: int
    """Version in the image."""

    source: Path
    """Its folder."""

    target: Target
    """The platform."""

    server: ServerKind
    """Server in the image."""

    image: str
    """Name of the image in the registry that the cluster pulls from."""

    base: str
    """Base image."""

    replicas: int = 2
    """Minimum number of servers."""

    max_replicas: int = 10
    """Maximum number of servers."""

    cpu: str = "1"
    """CPU cores that a server requests; a limit in Compose."""

    memory: str = "2Gi"
    """Memory limit of a server."""

    gpu: bool = False
    """Whether each server gets a GPU, and the image TensorFlow's CUDA libraries."""

    shared: SharedVolume | None = None
    """Volume of a repository that all servers share; None: the model is only in the image."""

    queue_target: int | None = None
    """Waiting requests per server above which the autoscaler adds servers; None: it uses only the CPU."""

    def __post_init__(self) -> None:
        """Check what the manifests cannot express or would misread."""
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
                "--gpu is for --server stoker, whose image gets CUDA from our lock",
                got=self.server,
                fix="For TensorFlow Serving name its own image: --base-image "
                "tensorflow/serving:VERSION-gpu, and add the GPU to the manifest.",
            )
        if self.shared is not None and (self.target, self.server) != ("kubernetes", "stoker"):
            raise ConfigError(
                "--shared-repository is for --target kubernetes and --server stoker",
                got=f"--target {self.target} --server {self.server}",
                fix="Leave it out: the model is in the image then.",
            )
        if self.shared is not None and len(f"{self.name}-push-{self.version}") > _LONGEST_JOB:
            raise ConfigError(
                f"with --shared-repository NAME-push-VERSION must have at most {_LONGEST_JOB} characters",
                got=f"{self.name}-push-{self.version}",
                fix="Push the model under a shorter name.",
            )
        if self.queue_target is not None:
            self._check_queue_target(self.queue_target)
        if self.target == "compose" and self.cpu.endswith("m"):
            raise ConfigError("--cpu of Compose must be in cores, like 0.5", got=self.cpu)

    def _check_queue_target(self, target: int) -> None:
        if not 1 <= target <= _MAX:
            raise ConfigError(f"--queue-target must be from 1 to {_MAX}", got=target)
        if (self.target, self.server) != ("kubernetes", "stoker"):
            raise ConfigError(
                "--queue-target is for --target kubernetes and --server stoker, which counts its queue",
                got=f"--target {self.target} --server {self.server}",
                fix="Leave it out: the servers are scaled by CPU then.",
            )

    @property
    def memory_bytes(self) -> int:
        """Memory limit of a server, bytes."""
        return int(self.memory[:-2]) << {"Mi": 20, "Gi": 30}[self.memory[-2:]]

    @property
    def claim(self) -> str:
        """Name of the claim of a shared repository."""
        return (self.shared.claim if self.shared else "") or f"{self.name}-models"

    @property
    def name(self) -> str:
        """The model's name as a valid name of cluster objects."""
        return dns_name(self.model)

    @property
    def image_root(self) -> str:
        """Folder of the models in the image."""
        return ROOT if self.shared is None else IMAGE_ROOT

    @property
    def base_path(self) -> str:
        """Folder of the model's versions in the image."""
        return f"{ROOT}/{self.model}"

    @property
    def arguments(self) -> list[str]:
        """Command line of the server."""
        flags = [f"--model_name={self.model}", f"--model_base_path={self.base_path}"]
        if self.shared is not None:
            flags = [ROOT]  # every model of the repository, with its rollout
        ports = [f"--port={GRPC_PORT}", f"--rest_api_port={REST_PORT}"]
        # A container's loopback address cannot be reached; the network policy controls access.
        own = ["serve", *flags, "--host=0.0.0.0", "--allow-unauthenticated", *ports]
        return own if self.server == "stoker" else [*flags, *ports]
