"""Sends one HTTP request to a user's service, with a limit on time and on bytes read, and without redirects."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import ssl
import time
from base64 import b64encode
from dataclasses import dataclass
from functools import partial
from urllib.parse import SplitResult, unquote, urlsplit

from stoker.core.errors import ConfigError
from stoker.core.threads import called_after

MAX_BYTES = 1 << 20
"""Maximum number of bytes of an answer that are read."""

_VARIABLE = "env:"
_HOST = re.compile(r"[A-Za-z0-9._:-]+")
"""A host name, an IPv4 or an IPv6 address."""

_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&()*+,;=%-]+")
"""Characters allowed in a URL (RFC 3986), except the single quote, which usually comes from wrong quoting in a shell or
YAML."""

_SUCCESS = range(200, 300)


class NoAnswerError(Exception):
    """The service did not answer; the message says why, as one clause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAnswer:
    """The answer of a service."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return self.status in _SUCCESS


def check_url(url: str, *, where: str) -> None:
    """Check that a URL can be called.

    Args:
        url: `http://...`, `https://...`, or `env:NAME`: the controller reads the URL from this environment variable.
        where: Name of the setting, for the message.

    Raises:
        ConfigError: the URL has none of these forms.
    """
    if url.startswith(_VARIABLE) and url[len(_VARIABLE) :].isidentifier():
        return
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in ("http", "https")
            and _HOST.fullmatch(parts.hostname or "")
            and parts.port != 0
        )
    except ValueError:
        good = False
    if not good or not _CHARACTERS.fullmatch(url):
        raise ConfigError(
            f"{where} must be a URL that begins with http:// or https://",
            got=url,
            fix="Write http://HOST/..., https://HOST/... (quotes, spaces and other special characters as %XX), or env:NAME for a "
            "variable of the server's environment.",
        )


def send(
    url: str,
    *,
    body: bytes | None = None,
    media_type: str = "application/json",
    token: str = "",
    timeout_s: float,
    max_bytes: int = MAX_BYTES,
) -> HttpAnswer:
    """Send a request: POST with a body, else GET.

    Args:
        url: A URL that `check_url` accepts. A user and password in it are sent as Basic authentication.
        body: Body of the request; None: send a GET.
        media_type: Media type of the body.
        token: Sent as `Authorization: Bearer ...`; "" for none.
        timeout_s: Maximum time of the whole call, seconds.
        max_bytes: Maximum number of bytes of the answer that are read.

    Raises:
        NoAnswerError: no HTTP answer came in time.
    """
    end_s = time.monotonic() + timeout_s
    try:
        parts = urlsplit(_resolved(url))
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        try:
            connection.connect()
            # The socket's timeout restarts with each byte, so a timer limits the whole call.
            with called_after(end_s - time.monotonic(), partial(_cut, connection.sock)):
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                headers = {} if body is None else {"Content-Type": media_type}
                if token:
                    headers["Authorization"] = f"Bearer {token}"
                elif parts.username is not None:
                    headers["Authorization"] = f"Basic {_basic(parts)}"
                connection.request("GET" if body is None else "POST", path, body, headers)
                return _read(connection, end_s, max_bytes)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ssl.SSLError, ValueError) as error:
        if isinstance(error, TimeoutError) or time.monotonic() >= end_s:
            raise NoAnswerError(f"no answer within {timeout_s:g} s") from None
        # The message leaves out the URL, which may contain a secret.
        raise NoAnswerError(_reason(error)) from None


def _basic(parts: SplitResult) -> str:
    """Return the header value that sends a URL's user and password by Basic authentication.

    Source: RFC 7617.
    """
    return b64encode(unquote(f"{parts.username}:{parts.password or ''}").encode()).decode()


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer has closed the connection
        # not TLS's shutdown: another thread is reading
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _read(connection: http.client.HTTPConnection, end_s: float, max_bytes: int) -> HttpAnswer:
    response = connection.getresponse()
    body = b""
    while len(body) < max_bytes and (part := response.read1(max_bytes - len(body))):
        body += part
    if time.monotonic() >= end_s:  # the timer ended the connection, so the answer may be incomplete
        raise TimeoutError
    return HttpAnswer(status=response.status, body=body)


def _resolved(url: str) -> str:
    if not url.startswith(_VARIABLE):
        return url
    name = url[len(_VARIABLE) :]
    try:
        found = os.environ[name]
    except KeyError:
        raise NoAnswerError(f"the variable {name} is not set on the server") from None
    check = urlsplit(found)
    if check.scheme not in ("http", "https"):
        raise NoAnswerError(f"the variable {name} does not hold a URL")
    return found


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join((text or type(error).__name__).split())[:200]
