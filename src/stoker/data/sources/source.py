"""Open the source that `data.source` names: list its files, choose their reader, hash their content."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

from stoker.core.fingerprint import fingerprint
from stoker.data.sources.columns.named_records import NamedFiles
from stoker.data.sources.config import Format, IngestConfig
from stoker.data.sources.files.listing import Listing
from stoker.data.sources.formats.csv_files import CsvFiles
from stoker.data.sources.formats.jsonl_files import jsonl_files
from stoker.data.sources.formats.parquet_files import ParquetFiles
from stoker.data.sources.formats.tfrecord_files import tfrecord_files
from stoker.data.sources.images.folder import ImageFolder
from stoker.data.sources.stores.local import list_local
from stoker.data.sources.stores.remote import list_remote
from stoker.data.sources.uri import is_uri
from stoker.data.sources.workers import InThreads, Workers, started

Source = CsvFiles | ParquetFiles | NamedFiles[Any] | ImageFolder
"""The class of a source depends on its format. `listing` has the files, `scan` finds their columns, and `blocks` reads
their records."""

_MANY_CALLS: dict[Format, tuple[int, int]] = {
    "images": (128 << 20, 2000),
    "jsonl": (8 << 20, 2000),
}
"""Format -> (bytes, files). These formats are read with many small Python calls, which the GIL serializes in threads,
so they are read in processes. But a source with fewer bytes and files than this is read in threads: it is read before
processes would be ready."""


def list_source(config: IngestConfig) -> Listing:
    """Find the files of `data.source`, on this machine or in a store.

    Raises:
        DataError: no file exists, or an entry is not a plain file inside the source.
        ConfigError: the files have different formats, or an unknown format.
        UserError: a store fails or refuses the request.
    """
    return list_remote(config) if is_uri(config.source) else list_local(config)


@contextlib.contextmanager
def workers_for(config: IngestConfig, listing: Listing) -> Iterator[Workers]:
    """Start the workers that read a source: processes or threads; they end with the context.

    Args:
        config: The source and the setting `workers`.
        listing: The files of the source.
    """
    small_bytes, small_files = _MANY_CALLS.get(listing.format, (0, 0))
    size, files = sum(file.size_bytes for file in listing.files), len(listing.files)
    is_small = size < small_bytes and files < small_files
    processes = (
        listing.format in _MANY_CALLS
        and listing.files[0].place.is_local
        and (config.workers is not None or not is_small)
    )
    with started(config.workers, processes=processes) as workers:
        yield workers


def open_source(
    config: IngestConfig,
    *,
    labels: Collection[str],
    listing: Listing | None = None,
    workers: Workers | None = None,
) -> Source:
    """Find the files of a source, and return the reader for their format.

    Args:
        config: The source and how to read it.
        labels: The columns in which every record must have a value; unknown columns are ignored.
        listing: The files; None: they are listed now.
        workers: The workers that read the source; threads by default.

    Raises:
        DataError: no file exists, or none can be read.
        ConfigError: the files have different formats, or an unknown format.
    """
    listing = listing or list_source(config)
    workers = workers or InThreads(config.workers)
    if listing.format == "images":
        return ImageFolder(listing=listing, config=config, workers=workers)
    given: dict[str, Any] = {
        "listing": listing,
        "config": config,
        "labels": tuple(labels),
        "workers": workers,
    }
    if listing.format == "jsonl":
        return NamedFiles(format=jsonl_files(config), **given)
    if listing.format == "tfrecord":
        return NamedFiles(format=tfrecord_files(), **given)
    return (CsvFiles if listing.format == "csv" else ParquetFiles)(**given)


def source_fingerprint(config: IngestConfig) -> str:
    """Return a fingerprint of the content of `data.source`: 64 hexadecimal digits.

    Raises:
        DataError: as in `list_source`; or a file was changed while it was hashed.
    """
    return fingerprint_of(list_source(config))


def fingerprint_of(listing: Listing) -> str:
    """Return a fingerprint of the content of listed files.

    With the same listing, `ingest` reads exactly this content, or raises an error.

    Raises:
        DataError: a file was changed since it was listed.
    """
    # One file of a remote store at a time: several files may exceed the cache.
    workers = InThreads(None if listing.files[0].place.is_local else 1)
    hashes = workers.map(lambda file: file.sha256(), listing.files)
    found = fingerprint([[f.name, each] for f, each in zip(listing.files, hashes, strict=True)])
    listing.check_unchanged()
    return found


def listing_warnings(listing: Listing, config: IngestConfig) -> Iterator[str]:
    """Yield warnings: classes without an image; table files that are copies, unless copies are dropped."""
    for name in listing.empty_classes:
        yield f"folder {name} holds no images: the model will not know this class"
    if config.duplicates != "drop":
        yield from _copied_files(listing)


def _copied_files(listing: Listing) -> Iterator[str]:
    by_size = defaultdict(list)
    for file in listing.files if listing.format != "images" else ():
        by_size[file.size_bytes].append(file)
    for alike in by_size.values():
        seen: dict[str, str] = {}
        for file in alike if len(alike) > 1 else ():
            first = seen.setdefault(file.sha256(), file.name)
            if first != file.name:
                yield (
                    f"{file.name} is a copy of {first}, so its records count twice; set "
                    "data.duplicates: drop to leave them out"
                )
