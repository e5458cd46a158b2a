"""Files on this machine's disk.

These entries are refused before any byte is read: FIFOs, devices and sockets (reading could hang), links that
lead out of the source, links to folders (they may lead in a circle), folders in a folder of files, and files of
different formats.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stoker.core.errors import DataError, Plain
from stoker.core.files import sha256_file
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.listing import (
    Listing,
    SourceFile,
    are_classes,
    is_mark,
    listed,
    no_class,
    no_match,
    not_plain,
)

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class LocalDisk:
    """The place of files on this machine's disk, which are opened directly."""

    is_local = True

    @contextlib.contextmanager
    def opened(self, file: SourceFile) -> Iterator[Path]:
        """Provide the path of the file itself."""
        yield Path(file.location)

    def sha256(self, file: SourceFile) -> str:
        """Return the SHA-256 of the file's content; the whole file is read."""
        return sha256_file(Path(file.location))

    def statuses(self, files: Sequence[SourceFile]) -> list[tuple[int, int]]:
        """Return the current size, bytes, and modification time, ns, of each file."""
        found = (_status(file.location) for file in files)
        return [(status.st_size, status.st_mtime_ns) for status in found]


_DISK = LocalDisk()


def list_local(config: IngestConfig) -> Listing:
    """Find the files of a `data.source` that is a path.

    Raises:
        DataError: no file exists, or an entry is not a plain file inside the source.
        ConfigError: the files have different formats, or an unknown format.
    """
    path = Path(config.source)
    if not os.path.lexists(path):
        if not glob.has_magic(config.source):
            raise DataError(
                f"data.source {path} must exist",
                got=Plain("no such file or folder"),
                fix="Set data.source to a file, a folder or a glob.",
            )
        return _listed_glob(config)
    if path.is_dir():
        return _listed_folder(config, path)
    return listed(config, [_source_file(path, path.parent, named_by_user=True)])


def _listed_glob(config: IngestConfig) -> Listing:
    parts = Path(config.source).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed]) if fixed else Path()
    found = set(_matches(root, parts[fixed:])) if root.is_dir() else set()
    if not found:
        raise no_match(config.source)
    return listed(config, [_source_file(path, root) for path in found])


def _matches(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    head, rest = parts[0], parts[1:]
    entries = _entries(folder)
    folders = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
    if head == "**":
        if rest:
            yield from _matches(folder, rest)
        else:
            yield from (Path(e.path) for e in entries if not e.is_dir(follow_symlinks=False))
        for below in folders:
            yield from _matches(below, parts)
    elif rest:
        for below in folders:
            if fnmatch.fnmatchcase(below.name, head):
                yield from _matches(below, rest)
    else:
        yield from (Path(e.path) for e in entries if fnmatch.fnmatchcase(e.name, head))


def _listed_folder(config: IngestConfig, root: Path) -> Listing:
    entries = _entries(root)
    folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    if are_classes(config, [entry.name for entry in entries], folders):
        return _listed_classes(config, root, entries)
    paths = [Path(entry.path) for entry in entries if not is_mark(entry.name)]
    return listed(config, [_source_file(path, root) for path in paths])


def _listed_classes(
    config: IngestConfig, root: Path, entries: Iterable[os.DirEntry[str]]
) -> Listing:
    files: list[SourceFile] = []
    empty: list[str] = []
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            raise no_class(root, f"{entry.name}, which is {_kind(entry)}")
        images = [_source_file(Path(image.path), root) for image in _entries(Path(entry.path))]
        files += images
        empty += [] if images else [entry.name]
    return listed(config, files, known="images", empty_classes=empty)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "a link"
    return _KINDS.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode), "a file")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from error
    return sorted(entries, key=lambda entry: os.fsencode(entry.name))


def _source_file(path: Path, root: Path, *, named_by_user: bool = False) -> SourceFile:
    """Check one entry; if the user named it in `data.source`, it may be a link to anywhere."""
    if not named_by_user and path.is_symlink():
        _check_link(path, root)
    status = _status(path)
    if not stat.S_ISREG(status.st_mode):
        raise not_plain(path, _KINDS.get(stat.S_IFMT(status.st_mode), "something else"))
    name = path.relative_to(root).as_posix()
    if not name.isascii() and name.encode("utf-8", "replace").decode() != name:
        raise DataError(
            f"the name of every file in {root} must be UTF-8",
            got=os.fsencode(name),
            fix="Rename the file.",
        )
    return SourceFile(
        location=str(path),
        name=name,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        place=_DISK,
    )


def _check_link(path: Path, root: Path) -> None:
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"link {path} must lead to a file",
            got=Plain(getattr(error, "strerror", None) or str(error)),
            fix="Remove the link from the source.",
        ) from None
    if not target.is_relative_to(root.resolve()):
        raise DataError(
            f"link {path} must lead to a file inside {root}",
            got=Plain(f"a link to {path.readlink()}"),
            fix="Replace the link with a copy of the file, or remove it.",
        )


def _status(path: str | Path) -> os.stat_result:
    try:
        return os.stat(path)  # noqa: PTH116  # a Path takes longer to make than this takes
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str | Path, error: OSError) -> DataError:
    return DataError(
        f"{path} must be readable",
        got=Plain(error.strerror or str(error)),
        fix="Check that it exists and that you may read it.",
    )
