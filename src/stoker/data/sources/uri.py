"""Parse `s3://bucket/key` and `gs://bucket/key` in `data.source`, and refuse secrets in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain

SCHEMES = ("s3", "gs")
"""Schemes of URIs in `data.source`."""

OPTIONS = ("anonymous", "endpoint_override", "region", "scheme")
"""Options that may follow `?` in a URI."""

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_OPTION = r"[A-Za-z_]+=[^&?]*"
_OPTIONS = re.compile(rf"(.*)\?({_OPTION}(?:&{_OPTION})*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreUri:
    """The URI of a bucket, or of an object, folder or glob in it."""

    scheme: str
    """`s3` or `gs`."""

    bucket: str
    """The bucket's name."""

    key: str
    """Key of an object, a prefix of keys or a glob; "" for the whole bucket. It is used as written: %20 does not mean
    a space."""

    options: dict[str, str]
    """Options for the access to the store; see `OPTIONS`."""

    def location(self, key: str) -> str:
        """Return the URI of an object of this bucket, for messages."""
        return f"{self.scheme}://{self.bucket}/{key}"


def is_uri(source: str) -> bool:
    """Return whether a source starts with a scheme, and so is not a local path."""
    return _URI.match(source) is not None


def parse_uri(source: str) -> StoreUri:
    """Parse a URI.

    Raises:
        ConfigError: the scheme is not supported, the bucket is missing, an option is unknown, or the URI holds
            credentials; the error does not show possible secrets.
    """
    found = _URI.fullmatch(source)
    scheme = found[1].lower() if found else ""
    if found is None or scheme not in SCHEMES:
        raise ConfigError(
            "data.source must be a local path, or start with s3:// or gs://",
            got=Plain(f"{scheme}://"),
            fix="Copy the data to a local folder or to a bucket, and set data.source to it.",
        )
    with_options = _OPTIONS.fullmatch(found[2])
    path, query = with_options.groups() if with_options else (found[2], "")
    bucket, _, key = path.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise _no_bucket(scheme, has_credentials="@" in path)
    pairs = (option.partition("=") for option in query.split("&") if option)
    options = {name: value for name, _, value in pairs}
    _check_options(options)
    return StoreUri(scheme=scheme, bucket=bucket, key=key.strip("/"), options=options)


def _no_bucket(scheme: str, *, has_credentials: bool) -> ConfigError:
    if has_credentials:
        return ConfigError(
            "data.source must not hold a user name, key or password, because it is written to every run",
            got=Plain(f"{scheme}://...@..."),
            fix="Set credentials in the environment or in the store's own files; "
            f"for public data, write {scheme}://bucket/key?anonymous=true.",
        )
    return ConfigError(
        "data.source must name a bucket, with letters, digits, `.`, `-` and `_`",
        got=Plain(f"no valid name between {scheme}:// and the next /"),
        fix=f"Write {scheme}://bucket/folder.",
    )


def _check_options(options: dict[str, str]) -> None:
    for name, value in options.items():
        if name not in OPTIONS:
            raise ConfigError(
                f"options after `?` in data.source must be one of {', '.join(OPTIONS)}",
                got=name,
                fix=nearest(name, OPTIONS) or "In a glob, write `*` or `[...]` instead of `?`.",
            )
        if "@" in value:
            raise ConfigError(
                f"{name} in data.source must not hold a user name or a password",
                got=Plain("a value with @"),
                fix="Set credentials in the environment or in the store's own files.",
            )
        if name == "anonymous" and value not in ("true", "false"):
            raise ConfigError("anonymous in data.source must be true or false", got=value)
        if name == "scheme" and value not in ("http", "https"):
            raise ConfigError("scheme in data.source must be http or https", got=value)
