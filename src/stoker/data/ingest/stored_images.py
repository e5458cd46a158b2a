"""Images as a `resized` or `raw` store holds them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pyarrow as pa
import simplejpeg
from numpy.typing import NDArray

from stoker.data.columns import Column
from stoker.data.ingest.image_store import ChosenStore
from stoker.data.sources.images import headers
from stoker.data.sources.images.headers import TRANSPOSED, BadImage, orientation, read_header

# OpenCV prints what it finds wrong with a damaged image.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_RAW = b"RAW"
_RAW_SIZE = struct.Struct("<II")
RAW_HEAD_BYTES = len(_RAW) + 1 + _RAW_SIZE.size
"""`RAW`, the number of channels, height and width, each 4 bytes little-endian; then the pixels."""


def is_raw(data: bytes) -> bool:
    """Whether these bytes are raw pixels."""
    return data.startswith(_RAW) and len(data) > RAW_HEAD_BYTES


def raw_size(data: bytes) -> tuple[int, int]:
    """Height and width of raw pixels."""
    height, width = _RAW_SIZE.unpack_from(data, len(_RAW) + 1)
    return height, width


def raw_bytes(pixels: NDArray[np.uint8]) -> bytes:
    """Pixels, [height, width, channels], as they are stored."""
    height, width, channels = pixels.shape
    return b"".join([_RAW, bytes([channels]), _RAW_SIZE.pack(height, width), pixels.tobytes()])


def raw_pixels(data: bytes) -> NDArray[np.uint8]:
    """What `raw_bytes` was given, as a view of these bytes.

    Raises:
        ValueError: there are more or fewer pixels than the head says.
    """
    flat = np.frombuffer(data, np.uint8, offset=RAW_HEAD_BYTES)
    return flat.reshape(*raw_size(data), data[len(_RAW)])


def encoded_image(data: bytes) -> bytes:
    """An image as the exported graph takes it: raw pixels as a PNG that holds the same."""
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
    """The same records with their images as the chosen store holds them.

    Args:
        table: Records of the training split, images as they came.
        columns: What they consist of.
        chosen: How images are stored.
        channels: 1 or 3, of what the model sees.
        pool: Its threads do the work.
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
    """One image as the chosen store holds it.

    Args:
        data: As it came; checked.
        chosen: How images are stored.
        channels: 1 or 3, of what the model sees.

    Returns:
        A JPEG, raw pixels, or the same bytes: where the image is no larger than `short_side` as a
        `resized` one, and where it is CMYK or a GIF, whose colours and transparency are for the
        model's own decoder to turn into pixels.
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
    """Upright pixels, a JPEG's at the smallest scale that is not below `short_side`."""
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
    """Pixels as they lie in the file -> upright, by EXIF's number from 1 to 8."""
    if orientation >= TRANSPOSED:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels
