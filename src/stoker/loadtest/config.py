"""The rate and duration of a load test, and its target address."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from stoker.core.errors import ConfigError, Plain

MAX_SECONDS = 3600.0
"""Maximum duration of a load test, seconds."""

MAX_REQUESTS = 10_000_000
"""Maximum number of requests of a load test."""

MAX_CONNECTIONS = 1000
"""Maximum number of connections; by default, a process may open 1,024 files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Settings of a load test."""

    rate_per_s: float | None
    """Due requests per second; None: each connection sends its next request after the last answer (closed loop)."""

    seconds: float = 10.0
    """Time for which requests are sent, seconds."""

    connections: int = 16
    """Number of connections, each with one request at a time."""

    timeout_s: float = 10.0
    """Maximum time to wait for an answer, seconds; it also applies after the last request was sent."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        rate = self.rate_per_s
        if rate is not None and not rate > 0:
            raise ConfigError("the rate must be above 0 requests per second", got=rate)
        if not 0 < self.seconds <= MAX_SECONDS:
            raise ConfigError(
                f"the run must take more than 0 and at most {MAX_SECONDS:.0f} seconds",
                got=self.seconds,
            )
        if rate is not None and not 1 <= rate * self.seconds <= MAX_REQUESTS:
            raise ConfigError(
                f"rate times seconds must be from 1 to {MAX_REQUESTS:,} requests",
                got=rate * self.seconds,
                fix=f"{'Lower' if rate * self.seconds > 1 else 'Raise'} --rate or --seconds.",
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
        """Maximum number of requests to send."""
        if self.rate_per_s is None:
            return MAX_REQUESTS
        return int(self.rate_per_s * self.seconds)


SocketAddress = tuple[socket.AddressFamily, tuple[str, int]]
"""Address family, and the address for `socket.connect`."""


def resolved(host: str, port: int, *, allow_remote: bool) -> SocketAddress:
    """Return the address of the server.

    Args:
        host: Host name or IP address.
        port: TCP port.
        allow_remote: Whether the server may be on another machine.

    Raises:
        ConfigError: the name is unknown, or belongs to another machine without `allow_remote`.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            "the server's host name must be known", got=Plain(f"{host}: {error.strerror}")
        ) from None
    addresses = [(family, (str(address[0]), port)) for family, _, _, _, address in found]
    for _, (number, _) in addresses:
        if not allow_remote and not ipaddress.ip_address(number.partition("%")[0]).is_loopback:
            raise ConfigError(
                "the load test's server must be on this machine, unless --allow-remote is given",
                got=Plain(f"{host}, which is {number}"),
                fix="If you are allowed to put load on that server, add --allow-remote.",
            )
    # A name may resolve to ::1 and 127.0.0.1 while the server listens on one of them.
    several = addresses if len(addresses) > 1 else []
    return next((one for one in several if _listens(one)), addresses[0])


def _listens(address: SocketAddress) -> bool:
    family, where = address
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.settimeout(_TRY_S)
        return attempt.connect_ex(where) == 0


_TRY_S = 5.0
"""Maximum time to try one of the addresses of a host name, seconds."""
