"""Read a folder of images that has a sub-folder for each class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain
from stoker.data.columns import Column
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.listing import Listing, SourceFile
from stoker.data.sources.images.batches import ImageTally, needs_headers
from stoker.data.sources.images.check import check_image
from stoker.data.sources.images.headers import BadImage, ImageHeader, read_header
from stoker.data.sources.records import (
    SHOWN_FAULTS,
    Block,
    Content,
    Fault,
    Progress,
    Scan,
    shard_schema,
)
from stoker.data.sources.workers import Workers

PATH = "path"
"""Name of the column with the path of the image's file."""

IMAGE_COLUMNS = (
    Column(name="image", dtype="image"),
    Column(name="label", dtype="string"),
    Column(name=PATH, dtype="string"),
)
"""The columns: bytes of the file, name of the sub-folder (the class), path of the file relative to the source."""

BLOCK_FILES = 256
"""Maximum number of images that are read at a time."""

BLOCK_BYTES = 32 << 20
"""Maximum size of the images that are read at a time, bytes."""

PART_FILES = 32
"""Number of images that a worker gets at a time: enough that a message pays off, few enough to balance the load."""

MAX_FILE_BYTES = 256 << 20
"""Maximum size of an image file: several times the size of an image with 50 million pixels."""

_HEAD_BYTES = 64 << 10
"""Number of bytes that are read to find a header. If it ends later (in a JPEG, after a long preview or profile), the
whole file is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFolder:
    """A source with one record for each image file."""

    listing: Listing
    """The files; the first part of each file's name is its class."""

    config: IngestConfig
    """How the files are read."""

    workers: Workers
    """The workers that read the files."""

    def scan(self, progress: Progress) -> Scan:
        """Find the images' shape from their headers, if it is not configured.

        Raises:
            ConfigError: the sizes differ, and `data.images.size` is not set; or `data.types` or
                `data.columns` is set.
        """
        columns = self.config.columns
        for key, names in (
            ("types", tuple(self.config.types)),
            ("columns", (*columns.exclude, *columns.lists)),
        ):
            if names:
                raise ConfigError(
                    f"data.{key} must be left out for a folder of images",
                    got=Plain(", ".join(names)),
                    fix="Leave it out. The columns are always image, label and path.",
                )
        files, tally = self.listing.files, ImageTally()
        if needs_headers(self.config.images):
            parts = [files[at : at + PART_FILES] for at in range(0, len(files), PART_FILES)]
            read = partial(_headers, max_pixels=self.config.images.max_pixels)
            done = 0
            for part, found in zip(parts, self.workers.map(read, parts), strict=True):
                for file, header in zip(part, found, strict=True):
                    if header is not None:
                        tally.add(header, file.name)
                done += len(part)
                progress(done, None)
        return Scan(
            columns=IMAGE_COLUMNS,
            readings=("image", "string", "string"),
            rows=len(files),
            image=tally.shape(self.config.images),
        )

    def blocks(self, scan: Scan, content: Content | None = None) -> Iterator[Block]:
        """Yield all images with their classes; an image that cannot be read has a fault."""
        files = self.listing.files
        runs = list(_block_slices([file.size_bytes for file in files]))
        read = partial(
            _read_part,
            max_pixels=self.config.images.max_pixels,
            channels=None if scan.image is None else scan.image[2],
            content=content,
        )
        parts = (files[part] for run in runs for part in _parts(run))
        made = self.workers.map(read, parts, bytes_of=_file_bytes)
        for run in runs:
            yield _block([next(made) for _ in _parts(run)], self.config.max_bad_rows + SHOWN_FAULTS)

    def classes(self) -> dict[str, int]:
        """Return class -> number of its files, in the order of the names."""
        found: dict[str, int] = {}
        for file in self.listing.files:
            label = class_of(file)
            found[label] = found.get(label, 0) + 1
        return found


def class_of(file: SourceFile) -> str:
    """Return the class of an image: the name of its sub-folder."""
    return file.name.partition("/")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Some images of a block, as a worker returns them."""

    table: pa.Table
    """The valid images."""

    content: NDArray[np.uint64] | None
    """The result of `Content` for each row of the table; None if it was not requested."""

    faults: list[Fault]
    """The invalid images."""


def _file_bytes(files: Sequence[SourceFile]) -> int:
    return sum(file.size_bytes for file in files)


def _block_slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of consecutive files that keep to both limits of a block; a larger file is a block alone."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and (index - start == BLOCK_FILES or total + size > BLOCK_BYTES):
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def _parts(run: slice) -> list[slice]:
    starts = range(run.start, run.stop, PART_FILES)
    return [slice(start, min(start + PART_FILES, run.stop)) for start in starts]


def _headers(files: Sequence[SourceFile], *, max_pixels: int) -> list[ImageHeader | None]:
    """Return the header of each image; None if it is invalid, or the image is too large."""
    found: list[ImageHeader | None] = []
    for file in files:
        try:
            header = _header(file)
        except BadImage:
            header = None
        too_large = header is not None and header.height * header.width > max_pixels
        found.append(None if too_large else header)
    return found


def _header(file: SourceFile) -> ImageHeader:
    try:
        return read_header(_read(file, _HEAD_BYTES))
    except BadImage:
        return read_header(_read(file))


def _read_part(
    files: Sequence[SourceFile],
    *,
    max_pixels: int,
    channels: int | None,
    content: Content | None,
) -> _Part:
    """Read and check some images."""
    good: list[SourceFile] = []
    images: list[bytes] = []
    faults: list[Fault] = []
    for file in files:
        try:
            data = _read(file)
            check_image(data, max_pixels=max_pixels, channels=channels)
        except BadImage as error:
            reason = f"the image {error}"
            faults.append(Fault(file=file.name, row=1, column="image", reason=reason))
        else:
            good.append(file)
            images.append(data)
    table = pa.Table.from_arrays(
        [
            pa.array(images, pa.binary()),
            pa.array([class_of(file) for file in good], pa.string()),
            pa.array([file.name for file in good], pa.string()),
        ],
        schema=shard_schema(IMAGE_COLUMNS),
    )
    found = None if content is None else content(table, IMAGE_COLUMNS)
    return _Part(table=table, content=found, faults=faults)


def _read(file: SourceFile, size: int = -1) -> bytes:
    if size < 0 and file.size_bytes > MAX_FILE_BYTES:
        raise BadImage(
            f"is {file.size_bytes >> 20} MiB long; the maximum is {MAX_FILE_BYTES >> 20} MiB"
        )
    try:
        with file.opened() as path, path.open("rb", buffering=0) as stream:
            return stream.read(size)
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror or error}") from error


def _block(parts: Sequence[_Part], limit: int) -> Block:
    faults = [fault for part in parts for fault in part.faults]
    content = [part.content for part in parts if part.content is not None]
    return Block(
        table=pa.concat_tables([part.table for part in parts]),
        faults=tuple(faults[:limit]),
        bad=len(faults),
        content=np.concatenate(content) if content else None,
    )
