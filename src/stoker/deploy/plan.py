"""What is deployed, where, and on which server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoker.core.config import dns_name
from stoker.core.errors import ConfigError

Target = Literal["compose", "kubernetes", "kserve"]
ServerKind = Literal["stoker", "tensorflow-serving"]

REST_PORT = 8501
GRPC_PORT = 8500

_MEMORY = re.compile(r"[1-9][0-9]*(Mi|Gi)")
_CPU = re.compile(r"[1-9][0-9]*m?|0?\.[0-9]+|[1-9][0-9]*\.[0-9]+")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Of a model's name what neither YAML, nor a Dockerfile, nor Kubernetes's `$(VARIABLE)` reads."""

_IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:@-]*")
"""Of an image's name all that a registry takes, and nothing that YAML or a shell would read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One deployment."""

    model: str
    """The model's name, as clients call it."""

    version: int
    """The version that goes into the image."""

    source: Path
    """Its folder."""

    target: Target
    """What runs containers."""

    server: ServerKind
    """Which server is in the image."""

    image: str
    """The image's name, in the registry that the cluster pulls from."""

    base: str
    """The image that it stands on."""

    replicas: int = 2
    """Fewest servers."""

    max_replicas: int = 10
    """Most servers."""

    cpu: str = "1"
    """Cores that a server requests; Compose's limit."""

    memory: str = "2Gi"
    """Memory that a server may take."""

    gpu: bool = False
    """Whether each server gets a GPU, and its image TensorFlow's CUDA libraries."""

    def __post_init__(self) -> None:
        """Refuse what a manifest could not hold."""
        if not 1 <= self.replicas <= self.max_replicas:
            raise ConfigError(
                "there must be at least 1 replica, and no more than --max-replicas",
                got=f"{self.replicas} to {self.max_replicas}",
            )
        for name, value, pattern, example in (
            ("the model's name", self.model, _MODEL, "taxi_tips-v2"),
            ("--cpu", self.cpu, _CPU, "2 or 500m"),
            ("--memory", self.memory, _MEMORY, "2Gi or 512Mi"),
            ("--image", self.image, _IMAGE, "registry.example.com/team/taxi:3"),
            ("--base-image", self.base, _IMAGE, "python:3.11-slim"),
        ):
            if not pattern.fullmatch(value):
                raise ConfigError(f"{name} must be like {example}", got=value)
        if self.gpu and self.server != "stoker":
            raise ConfigError(
                "--gpu is for --server stoker, whose image gets CUDA from our lock",
                got=self.server,
                fix="For TensorFlow Serving name its own image: --base-image "
                "tensorflow/serving:VERSION-gpu, and add the GPU to the manifest.",
            )
        if self.target == "compose" and self.cpu.endswith("m"):
            raise ConfigError("--cpu of Compose must be in cores, like 0.5", got=self.cpu)

    @property
    def name(self) -> str:
        """The model's name as the cluster's objects have it."""
        return dns_name(self.model)

    @property
    def base_path(self) -> str:
        """Where the model's versions lie in the image."""
        return f"/models/{self.model}"

    @property
    def arguments(self) -> list[str]:
        """The server's flags."""
        flags = [f"--model_name={self.model}", f"--model_base_path={self.base_path}"]
        ports = [f"--port={GRPC_PORT}", f"--rest_api_port={REST_PORT}"]
        # In a container the loopback is nobody's: who gets in is said by the network's policy.
        own = ["serve", *flags, "--host=0.0.0.0", "--allow-unauthenticated", *ports]
        return own if self.server == "stoker" else [*flags, *ports]
