"""Where the servers of each version are, for gateways in front of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stoker.core.errors import ConfigError

REST_PORT = 8501
"""The REST port of `stoker serve` and TensorFlow Serving."""

_LARGEST_PORT = 65_535


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """The servers of one version behind one name."""

    host: str
    """Name of a Kubernetes Service, a host's name or an address."""

    port: int = REST_PORT


def parse_backends(texts: Iterable[str]) -> dict[int, Backend]:
    """`7=taxi-v7:8501` of several versions.

    Raises:
        ConfigError: an item cannot be read, or a version is named twice.
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
    """`HOST:PORT`, `[IPV6]:PORT` or `HOST`.

    Raises:
        ConfigError: it is none of these.
    """
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        host, port = text, str(REST_PORT)
    host = host.strip("[]")
    good = host and not set(host) & set(" /\"'@?#") and port.isdecimal()
    if not good or not 0 < int(port) <= _LARGEST_PORT:
        raise ConfigError(f"{flag} must name HOST:PORT", got=text, fix="For example taxi-v7:8501.")
    return Backend(host=host, port=int(port))


def backends_of(
    versions: Iterable[int], named: dict[int, Backend], *, name: str
) -> dict[int, Backend]:
    """Version -> its servers; those that are not named have a Service of the name NAME-vVERSION.

    Args:
        versions: the versions of a split.
        named: by the user.
        name: the model's, as a name of cluster objects.
    """
    return {
        version: named.get(version) or Backend(host=f"{name}-v{version}") for version in versions
    }
