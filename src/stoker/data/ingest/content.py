"""What the files of a source hold, by the hash of their bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stoker.core.fingerprint import fingerprint
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.listing import Listing
from stoker.data.sources.source import list_source
from stoker.data.sources.workers import InThreads


def source_files(config: IngestConfig) -> list[str]:
    """The paths or URIs of the files of `data.source`, sorted by the bytes of their names.

    Raises:
        DataError: there is none, or something there is no plain file.
        ConfigError: the files are of no known format, or of several.
    """
    return [file.location for file in list_source(config).files]


def source_fingerprint(config: IngestConfig) -> str:
    """One name for the content of `data.source`, wherever it lies: 64 hexadecimal digits.

    Raises:
        DataError: as `source_files`; or a file was written while it was hashed.
    """
    return fingerprint_of(list_source(config))


def fingerprint_of(listing: Listing) -> str:
    """One name for the content of files that are listed already.

    `ingest` given the same listing reads what this name stands for, or refuses.

    Raises:
        DataError: a file was written since it was listed.
    """
    # Several files of a remote store at once may exceed the cache.
    workers = InThreads(None if listing.files[0].place.is_local else 1)
    hashes = workers.map(lambda file: file.sha256(), listing.files)
    found = fingerprint([[f.name, each] for f, each in zip(listing.files, hashes, strict=True)])
    listing.check_unchanged()
    return found


def listing_warnings(listing: Listing, config: IngestConfig) -> Iterator[str]:
    """Name the folders without an image, and the files of a table that are copies if copies count."""
    for name in listing.empty_classes:
        yield f"folder {name} holds no image: the model will not know this class"
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
                    f"{file.name} is a copy of {first}: its records count twice; "
                    "data.duplicates: drop leaves them out"
                )
