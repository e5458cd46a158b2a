"""The source that `data.source` names."""

from __future__ import annotations

from collections.abc import Callable, Collection

from stoker.data.sources.config import IngestConfig
from stoker.data.sources.csv_files import CsvFiles
from stoker.data.sources.image_folder import ImageFolder
from stoker.data.sources.jsonl_files import JsonlFiles
from stoker.data.sources.listing import Listing
from stoker.data.sources.local import list_local
from stoker.data.sources.parquet_files import ParquetFiles
from stoker.data.sources.records import Source
from stoker.data.sources.remote import list_remote
from stoker.data.sources.tfrecord_files import TfrecordFiles
from stoker.data.sources.uri import is_uri

_TABLES: dict[str, Callable[..., Source]] = {
    "csv": CsvFiles,
    "jsonl": JsonlFiles,
    "parquet": ParquetFiles,
    "tfrecord": TfrecordFiles,
}


def list_source(config: IngestConfig) -> Listing:
    """Find the files of `data.source`, here or in a store.

    Raises:
        DataError: there is none, or something there is no plain file inside the source.
        ConfigError: the files are of several formats, or of none that is known.
        UserError: a store fails, or refuses.
    """
    return list_remote(config) if is_uri(config.source) else list_local(config)


def open_source(
    config: IngestConfig, *, labels: Collection[str], listing: Listing | None = None
) -> Source:
    """Find the files and choose how they are read.

    Args:
        config: What to read.
        labels: The columns that no record may miss; those that the data has not are ignored.
        listing: The files, where they were found before.

    Raises:
        DataError: there is nothing, or nothing that can be read.
        ConfigError: the files are of no known format, or of several.
    """
    listing = listing or list_source(config)
    if listing.format == "images":
        return ImageFolder(listing=listing, config=config)
    return _TABLES[listing.format](listing=listing, config=config, labels=labels)
