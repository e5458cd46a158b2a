"""Output of commands: checks of output paths, and streams that tolerate a closed pipe or a full disk."""

from __future__ import annotations

import atexit
import errno
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, TextIO, cast

from stoker.core.errors import ConfigError, Plain
from stoker.core.files import full_disk_is_named


def require_new_folder(out: Path, *, fix: str = "Name another one, or remove this one.") -> None:
    """Reject an `--out` that exists or cannot be created.

    Raises:
        ConfigError: the path exists, even as a dangling link; or the folder cannot be created.
        FullDisk: the disk is full.
    """
    if os.path.lexists(out):
        rule = "--out must be a folder that does not exist yet"
        raise ConfigError(rule, got=str(out), fix=fix)
    _require_writable(out, flag="--out")


def require_writable_file(path: Path, *, flag: str) -> None:
    """Reject a file that cannot be written, or that is a folder.

    Raises:
        ConfigError: the path is a folder, or its parent cannot be created or written.
        FullDisk: the disk is full.
    """
    if path.is_dir():
        raise ConfigError(f"{flag} must be a file", got=Plain(f"the folder {path}"))
    _require_writable(path, flag=flag)


def _require_writable(path: Path, *, flag: str) -> None:
    """Create and delete a temporary folder next to the path. Permission bits are not checked: root ignores them."""
    with full_disk_is_named(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The temporary name contains the path's name, which may be too long or invalid on this file system.
            with tempfile.TemporaryDirectory(
                prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
            ):
                pass
        except OSError as error:
            if error.errno not in _USER_ERRORS:
                raise
            raise ConfigError(
                f"{flag} must be in a folder that can be written",
                got=Plain(f"{path}: {error.strerror}"),
            ) from None


_USER_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),  # not writable
    *(errno.EEXIST, errno.ENOTDIR, errno.ELOOP),  # a part of the path is a file or a cycle of links
    errno.ENOENT,  # e.g. below /proc, where nothing can be created
    *(errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ),  # invalid name on this file system
)


class TolerantStream:
    """Forwards writes to a stream, and drops the text that cannot be written.

    A closed pipe (`| head -1`), a full disk or a closed terminal must not stop hours of work or make
    the command fail.
    """

    def __init__(self, stream: TextIO) -> None:
        """Wrap a stream."""
        self._stream = stream
        self._failed = False

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._fails()
        return len(text)

    def flush(self) -> None:
        """Flush, ignoring a failure."""
        try:
            self._stream.flush()
        except OSError:
            self._fails()

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the stream."""
        return getattr(self._stream, name)

    def _fails(self) -> None:
        if not self._failed:
            self._failed = True
            atexit.register(self._settle)

    def _settle(self) -> None:
        # Python flushes once more on exit, and exits with 120 if that fails.
        try:
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def tolerant(stream: TextIO | None) -> IO[str]:
    """Wrap a stream so that failed writes are ignored; None: the stream was closed before Python started."""
    return cast(IO[str], TolerantStream(stream or Path(os.devnull).open("w")))


def print_result(text: str) -> None:
    """Print a command's result on stdout; ignore a closed pipe or a full disk."""
    stdout = tolerant(sys.stdout)
    stdout.write(text + "\n")
    stdout.flush()
