"""Choose how the training split's images are stored (unchanged, smaller, or as raw pixels), and convert them.

To read a JPEG costs CPU time in proportion to its bytes. Smaller images cost less, and raw pixels cost only
memory; but both lose image quality, so neither is chosen unless the user allows the loss. All other splits
keep the original bytes: the model is evaluated on images like those that it will serve.
"""

from __future__ import annotations

import math
import shutil
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import simplejpeg
from numpy.typing import NDArray

from stoker.cluster.limits import usable_memory
from stoker.core.errors import ConfigError
from stoker.data.columns import Column
from stoker.data.sources.config import ImagesConfig, ImageStore
from stoker.data.sources.images import headers
from stoker.data.sources.images.headers import TRANSPOSED, BadImage, orientation, read_header


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFacts:
    """Number and mean size of the training split's images, which the choice of the store needs."""

    images: int
    """Number of images."""

    mean_bytes: float
    """Mean size of an original image, bytes."""

    mean_height: float
    """Mean height, pixels."""

    mean_width: float
    """Mean width, pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The memory and disk space available for a store."""

    memory_bytes: int
    """Memory of this machine, or of its container if that is less."""

    free_disk_bytes: int
    """Free space on the disk of the dataset's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenStore:
    """How the training split's images are stored, and the reason."""

    store: ImageStore
    """`original`, `resized` or `raw`."""

    short_side: int
    """Shorter side of a stored image, pixels; images that are smaller are not enlarged."""

    quality: int
    """JPEG quality, 1 to 100."""

    why: str
    """The store and the reason for it, as a line for the user."""


MS_PER_IMAGE = 0.2
"""CPU time of one core for a 224 x 224 crop, without decoding: resizing, copying. Measured on a Zen 3."""

MS_PER_MB = 8.0
"""CPU time of one core to decode 1 MB of JPEG: entropy decoding and inverse transform, on the same machine."""

MS_PER_ENCODED_MPIXEL = 9.0
"""CPU time of one core to resize and encode a million stored pixels, on the same machine."""

RAW_BYTES_PER_PIXEL = 3.0
"""Bytes per pixel of a color image: the number of its channels."""

JPEG_BYTES_PER_PIXEL = 0.3
"""Bytes per pixel of a photograph with sides of about 256 pixels, at quality 90; larger photographs need fewer."""

MEMORY_SHARE = 0.5
"""Maximum share of the memory that raw pixels may need: reading is fast only while they stay in memory."""

MIN_SAVED_SHARE = 0.1
"""Minimum share of the CPU time of all epochs that a lossy store must save to be chosen."""

DISK_SHARE = 0.8
"""Maximum share of the free disk space that a store may need."""


def choose_store(
    config: ImagesConfig, facts: ImageFacts, *, shorter: int, epochs: int, space: Space
) -> ChosenStore:
    """Choose the store by the setting `data.images.store` or, if that is `auto`, by cost and savings.

    Args:
        config: The user's settings.
        facts: Number and mean size of the images.
        shorter: Shorter side of the model's input, pixels.
        epochs: Number of times that each image is read.
        space: Available memory and disk space.

    Raises:
        ConfigError: `data.images.store_size` is smaller than the model's input.
    """
    short_side = _short_side(config, shorter)
    offers = {name: _offer(name, facts, short_side=short_side) for name in _LOSSY}
    fitting = [offer for offer in offers.values() if offer.pays(epochs) and offer.fits(space)]
    best = max(fitting, key=lambda offer: offer.saved_s(epochs), default=None)
    store: ImageStore = "original"
    if config.store == "original":
        why = "as data.images.store says"
    elif config.store != "auto":
        store = config.store
        why = f"lossy, as data.images.store says; {offers[store].line(epochs)}"
    elif best is None:
        why = _nothing_pays(offers, epochs)
    elif not config.allow_lossy:
        why = (
            f"with data.images.allow_lossy: true, it would be {best.store}, short side {short_side}: "
            f"{best.line(epochs)}"
        )
    else:
        store = best.store
        why = f"lossy, as data.images.allow_lossy allows; {best.line(epochs)}"
    return ChosenStore(
        store=store, short_side=short_side, quality=config.quality, why=f"{store} ({why})"
    )


_LOSSY: tuple[ImageStore, ...] = ("resized", "raw")

_SEEN_SHARE = 7 / 8
"""The model's side relative to a stored image's: 224 / 256. The middle crop of `fit: crop` has this size, and a
random crop is rarely larger."""


def _short_side(config: ImagesConfig, shorter: int) -> int:
    if config.store_size is None:
        return math.ceil(shorter / _SEEN_SHARE)
    if config.store_size < shorter:
        raise ConfigError(
            f"data.images.store_size must be at least {shorter}, the size of the model's input",
            got=config.store_size,
            fix="Leave it out.",
        )
    return config.store_size


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """The cost of one lossy store, and the CPU time that it saves."""

    store: ImageStore
    size_bytes: float
    make_s: float
    """CPU time of one core to make the store, seconds."""

    epoch_s: float
    """CPU time of one core to read the store in one epoch, seconds."""

    original_epoch_s: float
    """CPU time of one core to read the original images in one epoch, seconds."""

    def pays(self, epochs: int) -> bool:
        return self.saved_s(epochs) > MIN_SAVED_SHARE * self.original_epoch_s * epochs

    def fits(self, space: Space) -> bool:
        on_disk = self.size_bytes <= space.free_disk_bytes * DISK_SHARE
        return on_disk and (
            self.store != "raw" or self.size_bytes <= space.memory_bytes * MEMORY_SHARE
        )

    @property
    def payback_epochs(self) -> float:
        saved_s = self.original_epoch_s - self.epoch_s
        return self.make_s / saved_s if saved_s > 0 else float("inf")

    def saved_s(self, epochs: int) -> float:
        return (self.original_epoch_s - self.epoch_s) * epochs - self.make_s

    def line(self, epochs: int) -> str:
        return (
            f"reading takes {self.original_epoch_s / self.epoch_s:.1f}x less CPU time, conversion pays "
            f"off after {self.payback_epochs:.1f} of {epochs} epochs, {self.size_bytes / 1e6:,.0f} MB"
        )


def _offer(store: ImageStore, facts: ImageFacts, *, short_side: int) -> _Offer:
    height, width = facts.mean_height, facts.mean_width
    share = min(1.0, short_side / max(1.0, min(height, width)))
    pixels = height * width * share * share
    if store == "raw":
        size = pixels * RAW_BYTES_PER_PIXEL
        read_ms = MS_PER_IMAGE
    else:
        size = (
            min(facts.mean_bytes, pixels * JPEG_BYTES_PER_PIXEL) if share < 1 else facts.mean_bytes
        )
        read_ms = _jpeg_ms(size)
    make_ms = _jpeg_ms(facts.mean_bytes) + pixels / 1e6 * MS_PER_ENCODED_MPIXEL
    return _Offer(
        store=store,
        size_bytes=size * facts.images,
        make_s=make_ms * facts.images / 1e3,
        epoch_s=read_ms * facts.images / 1e3,
        original_epoch_s=_jpeg_ms(facts.mean_bytes) * facts.images / 1e3,
    )


def _jpeg_ms(size_bytes: float) -> float:
    return MS_PER_IMAGE + size_bytes / 1e6 * MS_PER_MB


def _nothing_pays(offers: Mapping[ImageStore, _Offer], epochs: int) -> str:
    if any(offer.pays(epochs) for offer in offers.values()):
        return "smaller images or raw pixels would not fit in memory or on the disk"
    return f"smaller images or raw pixels would not save enough CPU time in {epochs} epochs"


def image_facts(table: pa.Table, columns: Sequence[Column], *, images: int) -> ImageFacts | None:
    """Estimate the mean size of all images from some records; None if the records have no images.

    Args:
        table: Some records.
        columns: The columns of the records.
        images: Total number of images.
    """
    names = [column.name for column in columns if column.dtype == "image"]
    values = [value.as_py() for name in names for value in table.column(name)]
    if not values:
        return None
    headers = [read_header(value) for value in values]
    return ImageFacts(
        images=images * len(names),
        mean_bytes=sum(map(len, values)) / len(values),
        mean_height=sum(header.height for header in headers) / len(headers),
        mean_width=sum(header.width for header in headers) / len(headers),
    )


def free_space(folder: Path) -> Space:
    """Return the memory that this process may use, and the free space on the disk that holds `folder`."""
    return Space(memory_bytes=usable_memory(), free_disk_bytes=shutil.disk_usage(folder).free)


# OpenCV would print errors for damaged images, which Stoker's own error reports.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_RAW = b"RAW"
_RAW_SIZE = struct.Struct("<II")
RAW_HEAD_BYTES = len(_RAW) + 1 + _RAW_SIZE.size
"""Size of the header of raw pixels: `RAW`, a byte for the number of channels, then height and width, each 4 bytes
little-endian. The pixels follow."""


def is_raw(data: bytes) -> bool:
    """Return whether these bytes are raw pixels, not an encoded image."""
    return data.startswith(_RAW) and len(data) > RAW_HEAD_BYTES


def raw_size(data: bytes) -> tuple[int, int]:
    """Return height and width of raw pixels."""
    height, width = _RAW_SIZE.unpack_from(data, len(_RAW) + 1)
    return height, width


def raw_bytes(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels, [height, width, channels], in the form in which they are stored."""
    height, width, channels = pixels.shape
    return b"".join([_RAW, bytes([channels]), _RAW_SIZE.pack(height, width), pixels.tobytes()])


def raw_pixels(data: bytes) -> NDArray[np.uint8]:
    """Return the pixels that `raw_bytes` stored, as a view of these bytes.

    Raises:
        ValueError: the number of pixels differs from the header.
    """
    flat = np.frombuffer(data, np.uint8, offset=RAW_HEAD_BYTES)
    return flat.reshape(*raw_size(data), data[len(_RAW)])


def encoded_image(data: bytes) -> bytes:
    """Return an image in a form that the exported graph accepts: raw pixels become a PNG, without loss."""
    if not is_raw(data):
        return data
    pixels = raw_pixels(data)
    bgr = pixels[:, :, ::-1] if pixels.shape[2] == 3 else pixels
    return cv2.imencode(".png", np.ascontiguousarray(bgr))[1].tobytes()


def stored_table(
    table: pa.Table,
    columns: Sequence[Column],
    chosen: ChosenStore,
    *,
    channels: int,
    pool: ThreadPoolExecutor,
) -> pa.Table:
    """Convert the images of records to the chosen store.

    Args:
        table: Records of the training split, with the original images.
        columns: The columns of the records.
        chosen: The store.
        channels: 1 or 3, the model's number of channels.
        pool: Threads that convert the images.
    """
    if chosen.store == "original":
        return table
    for place, column in enumerate(columns):
        if column.dtype == "image":
            made = pool.map(
                lambda value: stored_image(value.as_py(), chosen, channels=channels),
                table.column(column.name),
            )
            table = table.set_column(
                place, table.schema.field(column.name), pa.array(list(made), pa.binary())
            )
    return table


def stored_image(data: bytes, chosen: ChosenStore, *, channels: int) -> bytes:
    """Convert one image to the chosen store.

    Args:
        data: The original bytes, which were checked before.
        chosen: The store.
        channels: 1 or 3, the model's number of channels.

    Returns:
        A JPEG or raw pixels. The original bytes are returned for CMYK images and GIFs, because only the
        model's own decoder converts their colors and transparency correctly; and in a `resized` store for
        images that are not larger than `short_side`.
    """
    header = read_header(data)
    small_already = min(header.height, header.width) <= chosen.short_side
    is_gif = data.startswith(headers.GIF)
    if header.channels == 4 or is_gif or (small_already and chosen.store == "resized"):
        return data
    pixels = _decoded(data, chosen.short_side, channels)
    height, width = pixels.shape[:2]
    share = min(1.0, chosen.short_side / min(height, width))
    if share < 1:
        size = (max(1, round(width * share)), max(1, round(height * share)))
        made = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
        pixels = np.asarray(made, np.uint8).reshape(*size[::-1], channels)
    if chosen.store == "raw":
        return raw_bytes(pixels)
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels),
        quality=chosen.quality,
        colorspace="RGB" if channels == 3 else "GRAY",
        colorsubsampling="420" if channels == 3 else "Gray",
    )


def _decoded(data: bytes, short_side: int, channels: int) -> NDArray[np.uint8]:
    """Decode to upright pixels; a JPEG at the smallest scale whose sides are not below `short_side`."""
    if data.startswith(headers.JPEG):
        pixels = simplejpeg.decode_jpeg(
            data,
            colorspace="RGB" if channels == 3 else "GRAY",
            min_height=short_side,
            min_width=short_side,
            min_factor=2,
            strict=False,
        )
        return turned(pixels, orientation(data))
    how = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
    found = cv2.imdecode(np.frombuffer(data, np.uint8), how | cv2.IMREAD_IGNORE_ORIENTATION)
    if found is None:
        raise BadImage("cannot be decoded")
    return np.asarray(found, np.uint8).reshape(*found.shape[:2], channels)


def turned(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turn pixels upright, according to Exif's orientation, 1 to 8."""
    if orientation >= TRANSPOSED:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels
