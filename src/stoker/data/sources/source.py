"""The source that `data.source` names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from stoker.data.sources.config import Format, IngestConfig
from stoker.data.sources.files.listing import Listing
from stoker.data.sources.formats.csv_files import CsvFiles
from stoker.data.sources.formats.jsonl_files import JsonlFiles
from stoker.data.sources.formats.parquet_files import ParquetFiles
from stoker.data.sources.formats.tfrecord_files import TfrecordFiles
from stoker.data.sources.images.folder import ImageFolder
from stoker.data.sources.records import Source
from stoker.data.sources.stores.local import list_local
from stoker.data.sources.stores.remote import list_remote
from stoker.data.sources.uri import is_uri
from stoker.data.sources.workers import InThreads, Workers, started

_TABLES: dict[str, Callable[..., Source]] = {
    "csv": CsvFiles,
    "parquet": ParquetFiles,
    "tfrecord": TfrecordFiles,
}


_MANY_CALLS: dict[Format, tuple[int, int]] = {
    "images": (128 << 20, 2000),
    "jsonl": (8 << 20, 2000),
}
"""Formats that are read by many small Python calls, which the GIL serializes in threads. Sources
smaller than so many bytes and files are read before worker processes would be ready."""


def list_source(config: IngestConfig) -> Listing:
    """Find the files of `data.source`, here or in a store.

    Raises:
        DataError: there is none, or something there is no plain file inside the source.
        ConfigError: the files are of several formats, or of none that is known.
        UserError: a store fails, or refuses.
    """
    return list_remote(config) if is_uri(config.source) else list_local(config)


@contextlib.contextmanager
def workers_for(config: IngestConfig, listing: Listing) -> Iterator[Workers]:
    """Workers that read a source while the context is open: `data.workers` of them.

    Args:
        config: What to read.
        listing: Its files.
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
    """Find the files and choose how they are read.

    Args:
        config: What to read.
        labels: The columns that no record may miss; those that the data has not are ignored.
        listing: The files, where they were found before.
        workers: Read the source; threads by default.

    Raises:
        DataError: there is nothing, or nothing that can be read.
        ConfigError: the files are of no known format, or of several.
    """
    listing = listing or list_source(config)
    workers = workers or InThreads(config.workers)
    if listing.format == "images":
        return ImageFolder(listing=listing, config=config, workers=workers)
    if listing.format == "jsonl":
        return JsonlFiles(listing=listing, config=config, labels=labels, workers=workers)
    return _TABLES[listing.format](listing=listing, config=config, labels=labels)
