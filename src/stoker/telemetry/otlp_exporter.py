"""Finds the OpenTelemetry exporter that the environment names; it needs the extra `otel`."""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal

from stoker.core.errors import ConfigError, Plain

_ANY = "OTEL_EXPORTER_OTLP_PROTOCOL"
_PACKAGES = {"http/protobuf": "http", "grpc": "grpc"}
"""Protocol -> the package of its exporters, below `opentelemetry.exporter.otlp.proto`."""


def exporter_module(signal: Literal["metric", "trace"]) -> Any:
    """Return the module of the exporter for the protocol that the environment names.

    Raises:
        ConfigError: The protocol is unknown, or its exporter is not installed.
    """
    own = f"OTEL_EXPORTER_OTLP_{signal.upper()}S_PROTOCOL"
    protocol = os.environ.get(own) or os.environ.get(_ANY) or "http/protobuf"
    if protocol not in _PACKAGES:
        raise ConfigError(f"{_ANY} must be one of {', '.join(_PACKAGES)}", got=protocol)
    try:
        return importlib.import_module(
            f"opentelemetry.exporter.otlp.proto.{_PACKAGES[protocol]}.{signal}_exporter"
        )
    except ImportError as error:
        raise ConfigError(
            f"{_ANY}={protocol} needs an exporter that the extra 'otel' installs",
            got=Plain(str(error)),
            fix="Run `pip install 'stoker[otel]'`.",
        ) from error
