"""TLS and mutual TLS on both ports, configured by TensorFlow Serving's `ssl_config_file`."""

from __future__ import annotations

import ssl
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from stoker.core.errors import ConfigError, Plain
from stoker.serve.text_files import read_text_file

HANDSHAKES = 256
"""Maximum number of concurrent TLS handshakes in addition to open connections; a further connection is closed."""


class CountingContext(ssl.SSLContext):
    """Limits the number of connections, including connections in a TLS handshake, which the servers do not count yet.

    Without this limit, silent clients could take all file descriptors of the process.
    """

    max_connections = 0
    """Maximum number of concurrent connections, including connections in a handshake."""

    def __init__(self, *_: object) -> None:
        """Create a context without connections."""
        super().__init__()
        self._alive: weakref.WeakSet[ssl.SSLObject] = weakref.WeakSet()

    def wrap_bio(self, *args: object, **kwargs: object) -> ssl.SSLObject:
        """Wrap a connection, or raise `ssl.SSLError` if there are too many."""
        if len(self._alive) >= self.max_connections:
            raise ssl.SSLError("too many connections")
        made = super().wrap_bio(*args, **kwargs)  # type: ignore[arg-type]  # passed on unchanged
        self._alive.add(made)
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """The key and certificates of a server, and whether clients need certificates."""

    key: str = field(repr=False)
    """The private key, PEM."""

    certificate: str
    """The certificate chain, PEM."""

    authority: str = ""
    """The authority that must have signed clients' certificates, PEM."""

    client_verify: bool = False
    """Whether clients must have a certificate."""

    def context(self, *, connections: int = 0) -> ssl.SSLContext:
        """Return the TLS context of a port.

        Args:
            connections: Maximum number of concurrent connections; up to `HANDSHAKES` more may be in a handshake.

        Raises:
            ConfigError: a key or certificate is invalid.
        """
        context = CountingContext(ssl.PROTOCOL_TLS_SERVER)
        context.max_connections = connections + HANDSHAKES
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # OpenSSL reads keys only from files. This file is private to the user, and is removed at once.
            with tempfile.TemporaryDirectory() as folder:
                key, certificate = Path(folder, "key"), Path(folder, "certificate")
                key.touch(mode=0o600)
                key.write_text(self.key)
                certificate.write_text(self.certificate)
                context.load_cert_chain(certificate, key)
            if self.authority:
                context.load_verify_locations(cadata=self.authority)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                "server_key and server_cert must belong together, and all certificates must be valid PEM",
                got=Plain(type(error).__name__),
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED if self.client_verify else ssl.CERT_NONE
        return context


def read_tls(path: Path) -> Tls:
    """Read an `ssl_config_file`, which contains the text of PEM files.

    Raises:
        ConfigError: the file cannot be read, has another form, or lacks a valid key or certificate.
    """
    found = read_text_file(path, "SSLConfig", full_name="tensorflow.serving.SSLConfig")
    for name in ("server_key", "server_cert"):
        if not getattr(found, name):
            raise ConfigError(f"{path} must have a {name}", got=Plain("none"))
    if found.client_verify and not found.custom_ca:
        raise ConfigError(f"{path} must have a custom_ca for client_verify", got=Plain("none"))
    tls = Tls(
        key=found.server_key,
        certificate=found.server_cert,
        authority=found.custom_ca,
        client_verify=found.client_verify,
    )
    tls.context()
    return tls
