"""The address of a server, and the settings of a connection to it."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import ConfigError

REST_URL = "http://127.0.0.1:8501"
"""Default REST address of `stoker serve` and TensorFlow Serving."""

GRPC_URL = "127.0.0.1:8500"
"""Default gRPC address of `stoker serve` and TensorFlow Serving."""

TOKEN_VARIABLE = "STOKER_TOKEN"  # noqa: S105 - the variable's name
"""Environment variable with the token. The token has no command-line option, because every process of the machine can
read command lines."""

TIMEOUT_S = 30.0
"""Default maximum time to wait for an answer, seconds."""

MAX_TIMEOUT_S = 7 * 86_400.0
"""Largest accepted time-out, seconds; operating systems cannot represent much larger values."""

_PORTS = {"http": 80, "https": 443, "grpc": 8500, "grpcs": 8500}
_SECURE = ("https", "grpcs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """PEM files for an encrypted connection."""

    ca: Path | None = None
    """Certificate of the authority (CA) that signed the server's certificate; None: the system's list of
    authorities."""

    cert: Path | None = None
    """The client's certificate, for servers that require one."""

    key: Path | None = None
    """Private key of `cert`."""

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
    """Settings of a client's connection."""

    timeout_s: float = TIMEOUT_S
    """Maximum time to wait for an answer, seconds."""

    token: str = ""
    """Sent as `Authorization: Bearer ...`; "" for none."""

    tls: Tls = Tls()
    """Files for `https://` and `grpcs://`."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"the time-out must be above 0 and at most {MAX_TIMEOUT_S:,.0f} seconds",
                got=self.timeout_s,
            )
        if not self.token.isprintable() or not self.token.isascii():
            # Other characters would end the header or are not allowed in it. The message does not show the token.
            raise ConfigError("a token must be one line of printable ASCII")

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers to send with every call."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The parts of a URL."""

    host: str
    port: int
    secure: bool
    """Whether the connection is encrypted."""
    path: str
    """The path before `/v1/...`, without a trailing slash."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(url: str, *, scheme: str) -> Address:
    """Parse a URL.

    Args:
        url: `http://host:port`, or `host:port` alone.
        scheme: The scheme to use if the URL has none.

    Raises:
        ConfigError: the text is not the URL of a server.
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
    """Return the parts of a URL; None if it is invalid or has parts that a client cannot use."""
    try:
        parsed = urllib.parse.urlsplit(url)
        host, port = parsed.hostname or "", parsed.port
        # Refuse host names with an empty or very long part, as the resolver does.
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
