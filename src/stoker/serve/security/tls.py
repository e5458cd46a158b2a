"""TLS and mutual TLS on both ports, by TensorFlow Serving's `ssl_config_file`."""

from __future__ import annotations

import ssl
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from stoker.core.errors import ConfigError, Plain
from stoker.serve.text_files import read_text_file

HANDSHAKES = 256
"""Connections that may shake hands beside those that have; one more is closed without a word."""


class CountingContext(ssl.SSLContext):
    """Counts who shakes hands too: the servers above it are told of a connection when that is over.

    So many that stay silent would else take every descriptor of the process.
    """

    most = 0
    """Connections at once, with those that shake hands."""

    def __init__(self, *_: object) -> None:
        """Nobody is connected."""
        super().__init__()
        self._alive: weakref.WeakSet[ssl.SSLObject] = weakref.WeakSet()

    def wrap_bio(self, *args: object, **kwargs: object) -> ssl.SSLObject:
        """As it is; raises `ssl.SSLError` where there are too many."""
        if len(self._alive) >= self.most:
            raise ssl.SSLError("too many connections")
        made = super().wrap_bio(*args, **kwargs)  # type: ignore[arg-type]  # as they came
        self._alive.add(made)
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """What a server shows, and asks of its clients."""

    key: str = field(repr=False)
    """The private key, PEM."""

    certificate: str
    """The certificate and those that lead to its authority, PEM."""

    authority: str = ""
    """The authority that clients' certificates must be from, PEM."""

    client_verify: bool = False
    """Whether every client must show a certificate."""

    def context(self, *, connections: int = 0) -> ssl.SSLContext:
        """What a port needs.

        Args:
            connections: How many it may have at once; `HANDSHAKES` more may be at their begin.

        Raises:
            ConfigError: a part is not what it must be.
        """
        context = CountingContext(ssl.PROTOCOL_TLS_SERVER)
        context.most = connections + HANDSHAKES
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # OpenSSL reads a key from a file only; this one is the owner's alone, and gone at once.
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
                "server_key, server_cert and custom_ca must be PEM and belong together",
                got=Plain(type(error).__name__),
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED if self.client_verify else ssl.CERT_NONE
        return context


def read_tls(path: Path) -> Tls:
    """The file; its parts are the texts of PEM files.

    Raises:
        ConfigError: the file is not there, not in its form, or a part is missing or wrong.
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
