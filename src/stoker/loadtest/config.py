"""How much load, for how long."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from stoker.core.errors import ConfigError, Plain

MAX_SECONDS = 3600.0
"""Longest run, seconds."""

MAX_REQUESTS = 10_000_000
"""Most requests of one run."""

MAX_CONNECTIONS = 1000
"""Most connections; a process may have 1,024 open files by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """One run of load."""

    rate_per_s: float | None
    """Requests that are due each second; None: every connection sends on when it has its answer."""

    seconds: float = 10.0
    """How long requests are sent."""

    connections: int = 16
    """Connections, each with one request at a time."""

    timeout_s: float = 10.0
    """Longest wait for one answer, and for the last ones after the end."""

    def __post_init__(self) -> None:
        """Refuse what would not end."""
        rate = self.rate_per_s
        if rate is not None and not rate > 0:
            raise ConfigError("the rate must be above 0 requests a second", got=rate)
        if not 0 < self.seconds <= MAX_SECONDS:
            raise ConfigError(
                f"the run must take more than 0 and at most {MAX_SECONDS:.0f} seconds",
                got=self.seconds,
            )
        if rate is not None and not 1 <= rate * self.seconds <= MAX_REQUESTS:
            raise ConfigError(
                f"rate times seconds must be from 1 to {MAX_REQUESTS:,} requests",
                got=rate * self.seconds,
                fix="Lower --rate or --seconds.",
            )
        if not 1 <= self.connections <= MAX_CONNECTIONS:
            raise ConfigError(
                f"the connections must be from 1 to {MAX_CONNECTIONS}", got=self.connections
            )
        if not 0 < self.timeout_s <= MAX_SECONDS:
            raise ConfigError(
                f"the time-out must be above 0 and at most {MAX_SECONDS:.0f} seconds",
                got=self.timeout_s,
            )

    @property
    def requests(self) -> int:
        """Most requests that are sent."""
        if self.rate_per_s is None:
            return MAX_REQUESTS
        return int(self.rate_per_s * self.seconds)


SocketAddress = tuple[socket.AddressFamily, tuple[str, int]]
"""The family, and what `connect` takes."""


def resolved(host: str, port: int, *, allow_remote: bool) -> SocketAddress:
    """The address that load goes to.

    Args:
        host: Name or number.
        port: TCP.
        allow_remote: Whether it may be another machine.

    Raises:
        ConfigError: the name is unknown, or is that of another machine and may not be.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            "the server's name must be known", got=Plain(f"{host}: {error.strerror}")
        ) from None
    addresses = [(family, (str(address[0]), port)) for family, _, _, _, address in found]
    for _, (number, _) in addresses:
        if not allow_remote and not ipaddress.ip_address(number.partition("%")[0]).is_loopback:
            raise ConfigError(
                "load goes to this machine only, unless another is meant",
                got=Plain(f"{host}, which is {number}"),
                fix="Where that server is yours to load, add --allow-remote.",
            )
    # A name may stand for ::1 and 127.0.0.1, and the server listen on one of them.
    several = addresses if len(addresses) > 1 else []
    return next((one for one in several if _listens(one)), addresses[0])


def _listens(address: SocketAddress) -> bool:
    family, where = address
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.settimeout(_TRY_S)
        return attempt.connect_ex(where) == 0


_TRY_S = 5.0
"""Longest wait for one of a name's addresses, seconds."""
