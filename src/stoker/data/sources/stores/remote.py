"""Files in a bucket of an object store: they are listed as if in folders, and downloaded before they are read.

A store has no folders, only names with slashes. The same names are refused or left out as in a local folder, so
that the same files are the same source, locally and in a store.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyarrow import fs

from stoker.core.errors import DataError, Plain
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.listing import (
    Listing,
    SourceFile,
    are_classes,
    changed,
    is_mark,
    listed,
    no_class,
    no_match,
    not_plain,
)
from stoker.data.sources.stores.cache import Wanted, sha256_in, shared_cache
from stoker.data.sources.stores.cache_folder import cache_folder
from stoker.data.sources.stores.store import ChangedMeanwhile, Store, is_ending
from stoker.data.sources.uri import StoreUri, parse_uri

FETCHERS = 16
"""Number of files that are downloaded at the same time: most of the time for a small file is waiting."""

AHEAD_FILES = 64
"""Maximum number of files that are downloaded before they are needed."""

AHEAD_BYTES = 512 << 20
"""Maximum total size of the files that are downloaded before they are needed, bytes."""

AHEAD_SHARE = 0.25
"""Maximum share of the cache for files that are downloaded before they are needed. With a larger share, files would
be evicted before they are read."""


class Bucket:
    """The place of files in a bucket, which are downloaded into the cache."""

    is_local = False

    def __init__(self, config: IngestConfig) -> None:
        """Keep the settings; nothing is sent before the first request.

        Args:
            config: The settings; the source is the URI of a bucket, or of an object or folder in it.
        """
        self.uri = parse_uri(config.source)
        attempts, backoff_s = config.store_attempts, config.store_backoff_s
        self._store = Store(self.uri, attempts=attempts, backoff_s=backoff_s)
        self._cache = shared_cache(cache_folder(config), limit_bytes=config.cache_bytes)
        self._ahead_bytes = min(AHEAD_BYTES, round(config.cache_bytes * AHEAD_SHARE))
        self._list_again: Callable[[], list[fs.FileInfo]] = list
        self._files: tuple[SourceFile, ...] = ()
        self._positions: dict[str, int] = {}
        self._prefetched_until = 0
        self._prefetch_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="fetch")

    def file_type(self, key: str) -> fs.FileType:
        """Return whether a key is an object, a folder or nothing."""
        return self._store.status(key).type

    def files_below(self, folder: str) -> list[SourceFile]:
        """Return all files in a folder, at any depth, without hidden files."""
        self._list_again = lambda: self._store.below(folder)
        found = (info for info in self._list_again() if info.type == fs.FileType.File)
        files = (self._file(info, folder) for info in found)
        return [file for file in files if not f"/{file.name}".count("/.")]

    def file_at(self, key: str) -> SourceFile:
        """Return the object with this key."""
        self._list_again = lambda: [self._store.status(key)]
        return self._file(self._list_again()[0], key.rpartition("/")[0])

    def read_in_order(self, files: Sequence[SourceFile]) -> None:
        """Set the order in which the files will be read, so that the next files are downloaded in advance."""
        self._files = tuple(files)
        self._positions = {file.name: at for at, file in enumerate(files)}

    @contextlib.contextmanager
    def opened(self, file: SourceFile) -> Iterator[Path]:
        """Provide the file's entry in the cache until the end of the `with` block; download the next files meanwhile."""
        self._prefetch_from(self._positions.get(file.name, 0) + 1)
        with contextlib.ExitStack() as held:
            try:
                path = held.enter_context(self._cache.pinned(self._wanted(file), self._fetch))
            except ChangedMeanwhile:
                raise changed(file) from None
            yield path

    def sha256(self, file: SourceFile) -> str:
        """Return the SHA-256 of the file's content; it is downloaded, unless this process has used it before."""
        known = self._cache.known_sha256(self._wanted(file))
        if known is not None:
            return known
        with self.opened(file) as path:
            return sha256_in(path)

    def statuses(self, files: Sequence[SourceFile]) -> list[tuple[int, int]]:
        """Return the current size and time of each file.

        They are listed in the same way as before, because MinIO gives times in milliseconds in a list, but in
        seconds for a single object.
        """
        found = {self._store.key_of(info): info for info in self._list_again()}
        infos = (found.get(self._key(file)) for file in files)
        return [(-1, -1) if info is None else (info.size, info.mtime_ns) for info in infos]

    def _file(self, info: fs.FileInfo, folder: str) -> SourceFile:
        key = self._store.key_of(info)
        return SourceFile(
            location=self.uri.location(key),
            name=key.removeprefix(f"{folder}/"),
            size_bytes=info.size,
            mtime_ns=info.mtime_ns,
            place=self,
        )

    def _key(self, file: SourceFile) -> str:
        return file.location.removeprefix(self.uri.location(""))

    def _wanted(self, file: SourceFile) -> Wanted:
        return Wanted(
            endpoint=self._store.endpoint,
            location=file.location,
            size_bytes=file.size_bytes,
            mtime_ns=file.mtime_ns,
        )

    def _fetch(self, wanted: Wanted) -> Iterator[bytes]:
        key = wanted.location.removeprefix(self.uri.location(""))
        return self._store.pieces(key, size_bytes=wanted.size_bytes, mtime_ns=wanted.mtime_ns)

    def _prefetch_from(self, start: int) -> None:
        """Download files in threads, beginning with number `start`, each file once per pass."""
        with self._prefetch_lock:
            if not start <= self._prefetched_until <= start + AHEAD_FILES:
                self._prefetched_until = start  # another pass has started
            room = self._ahead_bytes - sum(
                file.size_bytes for file in self._files[start : self._prefetched_until]
            )
            while self._prefetched_until < min(start + AHEAD_FILES, len(self._files)):
                file = self._files[self._prefetched_until]
                if file.size_bytes > room:
                    return
                room -= file.size_bytes
                self._prefetched_until += 1
                self._pool.submit(self._hold_ready, file)

    def _hold_ready(self, file: SourceFile) -> None:
        """Download a file in advance; errors are ignored, because they are reported when the file is read."""
        if not is_ending():
            self._cache.prefetch(self._wanted(file), self._fetch)


def list_remote(config: IngestConfig) -> Listing:
    """Find the files of a `data.source` that is a URI.

    Raises:
        DataError: no file exists, or an entry is not a plain file inside the source.
        ConfigError: the files have different formats, or an unknown format.
        UserError: the store fails or refuses the request.
    """
    bucket = Bucket(config)
    listing = _found(config, bucket)
    bucket.read_in_order(listing.files)
    return listing


def _found(config: IngestConfig, bucket: Bucket) -> Listing:
    uri = bucket.uri
    kind = bucket.file_type(uri.key)
    if kind == fs.FileType.File:
        return listed(config, [bucket.file_at(uri.key)])
    if kind == fs.FileType.NotFound and glob.has_magic(uri.key):
        return _listed_glob(config, bucket)
    files = bucket.files_below(uri.key)
    if not files:
        raise DataError(
            f"data.source {uri.location(uri.key)} must exist",
            got=Plain("no such bucket, or no object with this name"),
            fix="Set data.source to an object, a folder or a glob.",
        )
    return _listed_folder(config, uri, files)


def _listed_glob(config: IngestConfig, bucket: Bucket) -> Listing:
    parts = tuple(bucket.uri.key.split("/"))
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    below = bucket.files_below("/".join(parts[:fixed]))
    files = [file for file in below if matches(file.name, parts[fixed:])]
    if not files:
        raise no_match(bucket.uri.location(bucket.uri.key))
    return listed(config, files)


def matches(name: str, pattern: Sequence[str]) -> bool:
    """Return whether a glob matches a name. `**` matches any number of folders; at the end, it matches everything.

    Args:
        name: Name of the file, relative to the folder in which the glob begins.
        pattern: The parts of the glob, between slashes.
    """
    parts, head, rest = name.split("/"), pattern[0], pattern[1:]
    if head == "**":
        if not rest:
            return True
        return any(matches("/".join(parts[at:]), rest) for at in range(len(parts)))
    if not fnmatch.fnmatchcase(parts[0], head):
        return False
    return matches("/".join(parts[1:]), rest) if rest and parts[1:] else not rest and not parts[1:]


def _listed_folder(config: IngestConfig, uri: StoreUri, files: list[SourceFile]) -> Listing:
    tops = sorted({file.name.partition("/")[0] for file in files})
    folders = sorted({file.name.partition("/")[0] for file in files if "/" in file.name})
    root = uri.location(uri.key)
    if are_classes(config, tops, folders):
        for file in files:
            if "/" not in file.name:
                raise no_class(root, f"{file.name}, which is a file")
            if file.name.count("/") > 1:
                raise not_plain(file.location.rpartition("/")[0], "a folder")
        return listed(config, files, known="images")
    if folders:
        raise not_plain(f"{root.rstrip('/')}/{folders[0]}", "a folder")
    return listed(config, [file for file in files if not is_mark(file.name)])
