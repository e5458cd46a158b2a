"""API keys and bearer tokens, each with a role."""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.config import parse_yaml
from stoker.core.errors import ConfigError, Plain
from stoker.serve.errors import Code, ServeError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MIN_CHARS = 16
"""Minimum length of an accepted key: a shorter key could be guessed over the network."""


class Role(enum.IntEnum):
    """What a key allows. Each role includes the rights of the roles before it."""

    PREDICT = 1
    ADMIN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """An API key, stored as its hash."""

    name: str
    """The owner of the key, for logs."""

    sha256: str
    """SHA-256 of the key, hexadecimal."""

    role: Role
    """What the key allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys of a server."""

    keys: tuple[Key, ...]
    """The keys, at least one."""

    def check(self, headers: Mapping[str, str], *, role: Role) -> Key:
        """Return the key of a request after checking its role.

        Args:
            headers: The request's headers or metadata, names in lower case.
            role: The required role.

        Raises:
            ServeError: the request has no key, an unknown key, or a key with a lower role.
        """
        found = self._find(_key_in(headers))
        if found is None:
            raise ServeError(Code.UNAUTHENTICATED, "a valid key is required: Authorization: Bearer")
        if found.role < role:
            raise ServeError(Code.PERMISSION_DENIED, f"the role {role.name.lower()} is required")
        return found

    def name_of(self, headers: Mapping[str, str]) -> str:
        """Return the owner of a request's key, for logs; "" if the request has no valid key."""
        found = self._find(_key_in(headers))
        return "" if found is None else found.name

    def _find(self, key: str) -> Key | None:
        """Return the known key that equals a key; None if none does.

        Compares in constant time, so that timing reveals nothing.
        """
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
        same = [known for known in self.keys if hmac.compare_digest(known.sha256, digest)]
        return same[0] if key and same else None


def read_keys(path: Path) -> Keys:
    """Read keys from a YAML file: a list of `{name, role, key}` or `{name, role, sha256}`.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the keys must be read from a YAML file", got=Plain(f"{path} ({type(error).__name__})")
        ) from error
    try:
        entries = parse_yaml(text, str(path))
    except ConfigError as error:
        # The error message of YAML is not shown: it quotes the text, which has secrets.
        raise ConfigError(error.rule, got=Plain("text that is not YAML")) from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} must hold a list of keys", got=Plain(type(entries).__name__))
    return Keys(keys=tuple(_key(entry, path, number) for number, entry in enumerate(entries, 1)))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address)).is_loopback for address in found)


def _key(entry: Any, path: Path, number: int) -> Key:
    place = f"key {number} of {path}"
    known = {"name", "role", "key", "sha256"}
    if not isinstance(entry, dict) or not set(entry) <= known or not {"name", "role"} <= set(entry):
        raise ConfigError(f"{place} must have name, role, and key or sha256")
    roles = {role.name.lower(): role for role in Role}
    if not isinstance(entry["role"], str) or entry["role"] not in roles:
        # The value is not shown, because it may be a key in the wrong field.
        raise ConfigError(
            f"the role of {place} must be predict or admin", got=Plain("another value")
        )
    if ("key" in entry) == ("sha256" in entry):
        raise ConfigError(f"{place} must have either key or sha256")
    digest = entry.get("sha256") or _digest(entry["key"], place)
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ConfigError(f"the sha256 of {place} must have 64 hexadecimal digits")
    return Key(name=str(entry["name"]), sha256=digest, role=roles[entry["role"]])


def _digest(key: Any, place: str) -> str:
    if not isinstance(key, str) or len(key) < _MIN_CHARS:
        raise ConfigError(f"{place} must be a string of at least {_MIN_CHARS} characters")
    return hashlib.sha256(key.encode()).hexdigest()


def _key_in(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "")
