"""The ready file, which says where a server listens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The address and ports of a ready server."""

    host: str
    """The address."""

    rest_port: int
    """The REST port that the server listens on."""

    grpc_port: int
    """The gRPC port that the server listens on."""

    pid: int
    """The process ID; signals go to this process."""

    models: tuple[str, ...]
    """Names of the served models."""

    def as_json(self) -> dict[str, object]:
        """The content of the ready file."""
        return {
            "host": self.host,
            "rest_port": self.rest_port,
            "grpc_port": self.grpc_port,
            "pid": self.pid,
            "models": list(self.models),
        }
