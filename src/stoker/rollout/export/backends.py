"""Addresses of the servers of each version, for gateways in front of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stoker.core.errors import ConfigError

REST_PORT = 8501
"""The REST port of `stoker serve` and TensorFlow Serving."""

_LARGEST_PORT = 65_535


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Address of the servers of one version."""

    host: str
    """Name of a Kubernetes Service, host name or address."""

    port: int = REST_PORT


def parse_backends(texts: Iterable[str]) -> dict[int, Backend]:
    """Parse items of the form `7=taxi-v7:8501`, one per version.

    Raises:
        ConfigError: an item does not have this form, or a version is named twice.
    """
    found: dict[int, Backend] = {}
    for text in texts:
        version, _, place = text.partition("=")
        if not version.isdecimal() or not place or int(version) in found:
            raise ConfigError(
                "--backend must be VERSION=HOST:PORT, once for each version",
                got=text,
                fix="For example --backend 7=taxi-v7:8501.",
            )
        found[int(version)] = parse_place(place, flag="--backend")
    return found


def parse_place(text: str, *, flag: str) -> Backend:
    """Parse `HOST:PORT`, `[IPV6]:PORT` or `HOST`.

    Raises:
        ConfigError: the text has none of these forms.
    """
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        host, port = text, str(REST_PORT)
    host = host.strip("[]")
    good = host and not set(host) & set(" /\"'@?#") and port.isdecimal()
    if not good or not 0 < int(port) <= _LARGEST_PORT:
        raise ConfigError(f"{flag} must be HOST:PORT", got=text, fix="For example taxi-v7:8501.")
    return Backend(host=host, port=int(port))


def backends_of(
    versions: Iterable[int], named: dict[int, Backend], *, name: str
) -> dict[int, Backend]:
    """Return version -> its servers. For a version that the user did not name, it is the Service NAME-vVERSION.

    Args:
        versions: The versions of a split.
        named: Version -> the servers that the user named.
        name: Name of the model, in a form that is valid for cluster objects.
    """
    return {
        version: named.get(version) or Backend(host=f"{name}-v{version}") for version in versions
    }
