"""The file that says where a ready server listens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Where a server that is ready listens."""

    host: str
    """The address."""

    rest_port: int
    """The real REST port."""

    grpc_port: int
    """The real gRPC port."""

    pid: int
    """The process; the one that the signals go to."""

    models: tuple[str, ...]
    """The models that are served, by name."""

    def as_json(self) -> dict[str, object]:
        """What the ready file holds."""
        return {
            "host": self.host,
            "rest_port": self.rest_port,
            "grpc_port": self.grpc_port,
            "pid": self.pid,
            "models": list(self.models),
        }
