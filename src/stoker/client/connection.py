"""Where a server is, and how it is reached."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import ConfigError

REST_URL = "http://127.0.0.1:8501"
"""Where `stoker serve` and TensorFlow Serving answer over REST, by default."""

GRPC_URL = "127.0.0.1:8500"
"""Where they answer over gRPC, by default."""

TIMEOUT_S = 30.0
"""Longest wait for one answer, seconds."""

MAX_TIMEOUT_S = 7 * 86_400.0
"""Longest that can be asked for, seconds; far longer ones no system's clock can hold."""

_PORTS = {"http": 80, "https": 443, "grpc": 8500, "grpcs": 8500}
_SECURE = ("https", "grpcs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Files of a connection that is encrypted, PEM."""

    ca: Path | None = None
    """Who vouches for the server; the system's own list if None."""

    cert: Path | None = None
    """The client's own certificate, for servers that ask for one."""

    key: Path | None = None
    """Its key."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError(
                "a client's certificate and its key must be given together",
                got=str(self.cert or self.key),
            )
        for path in (self.ca, self.cert, self.key):
            if path is not None and not path.is_file():
                raise ConfigError("a certificate or key must be a file", got=str(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How a client asks."""

    timeout_s: float = TIMEOUT_S
    """Longest wait for one answer, seconds."""

    token: str = ""
    """Sent as `Authorization: Bearer ...`; "" sends none."""

    tls: Tls = Tls()
    """For `https://` and `grpcs://`."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"the time-out must be above 0 and at most {MAX_TIMEOUT_S:,.0f} seconds",
                got=self.timeout_s,
            )
        if not self.token.isprintable() or not self.token.isascii():
            # It would end the header, or could not stand in it. The token itself is not shown.
            raise ConfigError("a token must be one line of printable ASCII")

    @property
    def headers(self) -> dict[str, str]:
        """What goes with every call."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A URL, taken apart."""

    host: str
    port: int
    secure: bool
    """Whether the connection is encrypted."""
    path: str
    """What stands before `/v1/...`, without a slash at its end."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(url: str, *, scheme: str) -> Address:
    """Take a URL apart.

    Args:
        url: `http://host:port`, or `host:port` alone.
        scheme: What is meant where none is named.

    Raises:
        ConfigError: it is no URL of a server.
    """
    found = _parsed(url if "://" in url else f"{scheme}://{url}")
    if found is None:
        raise ConfigError(
            "a server's URL must be scheme://host:port, or host:port",
            got=url,
            fix=f"For example {scheme}://127.0.0.1:{GRPC_URL[-4:] if scheme == 'grpc' else 8501}.",
        )
    return found


def _parsed(url: str) -> Address | None:
    """The parts of a URL; None of what is none, or has more than a client could send."""
    try:
        parsed = urllib.parse.urlsplit(url)
        host, port = parsed.hostname or "", parsed.port
        # As the resolver would have it, which knows no name of an empty or a very long part.
        host.encode("idna")
    except ValueError:
        return None
    more = parsed.query or parsed.fragment or parsed.username is not None
    if parsed.scheme not in _PORTS or not host or not host.isprintable() or " " in host or more:
        return None
    return Address(
        host=host,
        port=port or _PORTS[parsed.scheme],
        secure=parsed.scheme in _SECURE,
        path=urllib.parse.quote(parsed.path.rstrip("/"), safe="/%:@!$&'()*+,;="),
    )
