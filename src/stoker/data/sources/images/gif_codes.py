"""How many pixels the coded data of a GIF's frame holds, up to where it says that it ends.

OpenCV fills what is missing behind an end code that comes too early; TensorFlow refuses the image.

Source: GIF89a specification, appendix F; giflib, `dgif_lib.c`, for when a code becomes wider.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.data.sources.images.header import BadImage

MOST_BITS = 8
"""Of a pixel: no GIF has more than 256 colours."""

_TABLE = 4096
"""Most strings of pixels that codes can stand for; one has 12 bits at most."""

_DAMAGED = "is damaged: its pixel data cannot be unpacked"


def pixels_until_end(packed: bytes, bits: int, *, needed: int) -> int:
    """Count the pixels that codes stand for.

    Args:
        packed: The frame's coded data, its blocks joined.
        bits: What the byte before it says: bits of a pixel.
        needed: Where counting ends.

    Returns:
        Pixels before the end code or the end of the data; `needed` or a few more where that comes
        first.

    Raises:
        BadImage: a code stands for nothing.
    """
    if not 0 < bits <= MOST_BITS:
        raise BadImage(_DAMAGED)
    clear, end = 1 << bits, (1 << bits) + 1
    widths = np.array([_width(clear, since) for since in range(_TABLE)])
    data = np.frombuffer(packed + bytes(2), np.uint8).astype(np.uint32)
    strings, total, at, since = _Strings(clear), 0, 0, 0
    while total < needed:
        # From the full table on every code has the last width.
        wide = widths[since:] if since < _TABLE else np.full(_TABLE, widths[-1])
        codes = _codes(data, at, wide)
        marks = np.flatnonzero((codes == clear) | (codes == end))
        first = int(marks[0]) if len(marks) else len(codes)
        total += strings.pixels(codes[:first].tolist())
        if not len(marks):
            if not len(codes):
                return total
            at, since = at + int(wide[: len(codes)].sum()), since + len(codes)
        elif codes[first] == end:
            return total
        else:
            at, since, strings = at + int(wide[: first + 1].sum()), 0, _Strings(clear)
    return total


class _Strings:
    """The lengths of the strings that codes stand for, since the last clear code."""

    def __init__(self, clear: int) -> None:
        self._lengths = [1] * clear + [0, 0]
        self._previous = -1

    def pixels(self, codes: list[int]) -> int:
        """Pixels of some more codes, each of which makes a string of its forerunner's and one."""
        lengths, previous, total = self._lengths, self._previous, 0
        for code in codes:
            if previous >= 0 and len(lengths) < _TABLE:
                lengths.append(lengths[previous] + 1)
            if code >= len(lengths):
                raise BadImage(_DAMAGED)
            total += lengths[code]
            previous = code
        self._previous = previous
        return total


def _width(clear: int, since: int) -> int:
    """Bits of the next code, `since` codes after a clear code."""
    return min(12, max(clear.bit_length(), (clear + 1 + since).bit_length()))


def _codes(data: NDArray[np.uint32], at: int, widths: NDArray[np.int64]) -> NDArray[np.uint32]:
    """As many codes of these widths as there are, from bit `at` on; two bytes stand behind them."""
    ends = at + np.cumsum(widths)
    ends = ends[ends <= 8 * (len(data) - 2)]
    wide = widths[: len(ends)]
    start = ends - wide
    first = start >> 3
    word = data[first] | data[first + 1] << 8 | data[first + 2] << 16
    return (word >> (start & 7).astype(np.uint32)) & ((1 << wide) - 1).astype(np.uint32)
