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
"""Shortest key that is taken: a shorter one can be guessed over the network."""


class Role(enum.IntEnum):
    """What somebody may do; each may also do what the ones before may."""

    PREDICT = 1
    ADMIN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key, known by its hash only."""

    name: str
    """Whose it is, for the log."""

    sha256: str
    """The hash of the key, in hexadecimal."""

    role: Role
    """What it allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """All keys of a server."""

    keys: tuple[Key, ...]
    """At least one."""

    def check(self, headers: Mapping[str, str], *, role: Role) -> Key:
        """Let a request pass whose key allows what it asks for.

        Args:
            headers: The request's headers or metadata by their names in lower case.
            role: What is needed.

        Returns:
            The key that it came with.

        Raises:
            ServeError: it has no key, one that is unknown, or one of a lower role.
        """
        found = self._find(_key_in(headers))
        if found is None:
            raise ServeError(Code.UNAUTHENTICATED, "a known key is needed: Authorization: Bearer")
        if found.role < role:
            raise ServeError(Code.PERMISSION_DENIED, f"the role {role.name.lower()} is needed")
        return found

    def name_of(self, headers: Mapping[str, str]) -> str:
        """Whose key a request came with, empty if it is none that is known; for the log."""
        found = self._find(_key_in(headers))
        return "" if found is None else found.name

    def _find(self, key: str) -> Key | None:
        """Every known key is compared with, in time that tells nothing of where they differ."""
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
        same = [known for known in self.keys if hmac.compare_digest(known.sha256, digest)]
        return same[0] if key and same else None


def read_keys(path: Path) -> Keys:
    """The keys in a YAML file: a list of `{name, role, key}` or `{name, role, sha256}`.

    Raises:
        ConfigError: the file is not there or not in that form.
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
        # What YAML says of a text quotes it, and here it is a secret.
        raise ConfigError(error.rule, got=Plain("text that is not YAML")) from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} must hold a list of keys", got=Plain(type(entries).__name__))
    return Keys(keys=tuple(_key(entry, path, number) for number, entry in enumerate(entries, 1)))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
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
        # Not quoted: it may be a key in the wrong field.
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
        raise ConfigError(f"{place} must be a text of at least {_MIN_CHARS} characters")
    return hashlib.sha256(key.encode()).hexdigest()


def _key_in(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "")
