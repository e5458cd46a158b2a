"""The checks of TFRecord's framing: masked CRC32C.

Source: tensorflow/core/lib/hash/crc32c.h (the mask); RFC 3720, B.4 (CRC32C).
"""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np
from numpy.typing import NDArray

HEADER, LENGTH, CHECK = struct.Struct("<QI"), struct.Struct("<Q"), struct.Struct("<I")
"""A record's header: its length, and the length's check; and each of them alone."""

_MASK_DELTA = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    """The check that TFRecord stores for some bytes."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def header_holds(head: bytes) -> bool:
    """True where some bytes begin with a length and its check."""
    if len(head) < HEADER.size:
        return False
    return masked_crc(head[:8]) == CHECK.unpack_from(head, 8)[0]


def headers_in(window: NDArray[np.uint8]) -> NDArray[np.intp]:
    """[found] the places in some bytes where a length stands with its check.

    A CRC is linear: that of eight bytes is the exclusive or of one term for each of them.
    """
    count = len(window) - HEADER.size + 1
    crc = np.full(count, _CRC_OF_ZEROS, np.uint32)
    stored = np.zeros(count, np.uint32)
    for index in range(8):
        crc ^= _CRC_TERMS[index][window[index : index + count]]
    for index in range(4):
        stored |= window[8 + index : 8 + index + count].astype(np.uint32) << np.uint32(8 * index)
    masked = (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(_MASK_DELTA)
    return np.flatnonzero(masked == stored)


def _crc_terms() -> NDArray[np.uint32]:
    """[8, 256] by how much each value of each byte of a length changes the CRC of a zero length."""
    terms = [
        [google_crc32c.value(LENGTH.pack(value << 8 * index)) for value in range(256)]
        for index in range(8)
    ]
    return np.array(terms, np.uint32) ^ _CRC_OF_ZEROS


_CRC_OF_ZEROS = np.uint32(google_crc32c.value(bytes(8)))
_CRC_TERMS = _crc_terms()
