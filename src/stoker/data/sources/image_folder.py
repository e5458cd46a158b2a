"""A folder of images with one sub-folder for each class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from stoker.core.errors import ConfigError
from stoker.data.columns import Column
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.image_check import BadImage, ImageHeader, check_image, read_header
from stoker.data.sources.images import (
    ImageTally,
    Outcome,
    batched_by_bytes,
    in_threads,
    needs_headers,
)
from stoker.data.sources.listing import Listing, SourceFile
from stoker.data.sources.records import (
    SHOWN_FAULTS,
    WORKERS,
    Block,
    Fault,
    Progress,
    Scan,
    shard_schema,
)

IMAGE_COLUMNS = (
    Column(name="image", dtype="image"),
    Column(name="label", dtype="string"),
    Column(name="path", dtype="string"),
)
"""The encoded bytes as they lie in the file, the folder's name, the file's relative name."""

BLOCK_FILES = 256
"""Images that are read at a time, unless their bytes are many."""

BLOCK_BYTES = 32 << 20
"""Bytes of images that are read at a time."""

MAX_FILE_BYTES = 256 << 20
"""Longest image file: several times what 50 million pixels take up."""

_HEAD_BYTES = 64 << 10
"""Where nearly every header ends; a JPEG with a long preview or profile is read whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFolder:
    """The source that gives one record for each image file."""

    listing: Listing
    """The files; the first part of each name is its class."""

    config: IngestConfig
    """How they are read."""

    def scan(self, progress: Progress) -> Scan:
        """Read the images' headers, where their shape is not configured.

        Raises:
            ConfigError: the sizes differ and none is configured; or there is `data.types`.
        """
        if self.config.types:
            raise ConfigError(
                "data.types must be left out for a folder of images",
                got=dict(self.config.types),
                fix="Its columns are image, label and path.",
            )
        files, tally = self.listing.files, ImageTally()
        if needs_headers(self.config.images):
            with ThreadPoolExecutor(WORKERS) as pool:
                for start in range(0, len(files), BLOCK_FILES):
                    part = files[start : start + BLOCK_FILES]
                    for file, found in zip(part, in_threads(self._header, part, pool), strict=True):
                        if found.value is not None:
                            tally.add(found.value, file.name)
                    progress(start + len(part), None)
        return Scan(
            columns=IMAGE_COLUMNS,
            readings=("image", "string", "string"),
            rows=len(files),
            image=tally.shape(self.config.images),
        )

    def blocks(self, scan: Scan) -> Iterator[Block]:
        """Every image with its class, or named with what is wrong with it."""
        channels = None if scan.image is None else scan.image[2]
        files = self.listing.files

        def read(file: SourceFile) -> bytes:
            data = _read(file)
            check_image(data, max_pixels=self.config.images.max_pixels, channels=channels)
            return data

        with ThreadPoolExecutor(WORKERS) as pool:
            for part in batched_by_bytes(
                [file.size_bytes for file in files], most=BLOCK_FILES, most_bytes=BLOCK_BYTES
            ):
                outcomes = list(in_threads(read, files[part], pool))
                yield _block(files[part], outcomes, self.config.max_bad_rows + SHOWN_FAULTS)

    def classes(self) -> dict[str, int]:
        """Class -> number of its files, in the order of their names."""
        found: dict[str, int] = {}
        for file in self.listing.files:
            label = class_of(file)
            found[label] = found.get(label, 0) + 1
        return found

    def _header(self, file: SourceFile) -> ImageHeader:
        try:
            header = read_header(_read(file, _HEAD_BYTES))
        except BadImage:
            header = read_header(_read(file))
        if header.height * header.width > self.config.images.max_pixels:
            raise BadImage("is too large")
        return header


def class_of(file: SourceFile) -> str:
    """The sub-folder in which an image lies."""
    return file.name.partition("/")[0]


def _read(file: SourceFile, size: int = -1) -> bytes:
    if size < 0 and file.size_bytes > MAX_FILE_BYTES:
        raise BadImage(f"is {file.size_bytes >> 20} MiB long; {MAX_FILE_BYTES >> 20} are the most")
    try:
        with file.opened() as path, path.open("rb") as stream:
            return stream.read(size)
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror or error}") from error


def _block(files: Sequence[SourceFile], outcomes: Sequence[Outcome[bytes]], limit: int) -> Block:
    good = [at for at, outcome in enumerate(outcomes) if outcome.value is not None]
    faults = [
        Fault(file=file.name, row=1, column="image", reason=outcome.reason)
        for file, outcome in zip(files, outcomes, strict=True)
        if outcome.value is None
    ]
    table = pa.Table.from_arrays(
        [
            pa.array([outcomes[at].value for at in good], pa.binary()),
            pa.array([class_of(files[at]) for at in good], pa.string()),
            pa.array([files[at].name for at in good], pa.string()),
        ],
        schema=shard_schema(IMAGE_COLUMNS),
    )
    return Block(table=table, faults=tuple(faults[:limit]), bad=len(faults))
