"""The body of a request that says how long it is, taken as it comes: past the parser, and with no copy.

uvicorn stops reading for each 64 KiB until the application has copied them; of an image of numbers
in JSON that is a millisecond. Here the count of what is held for all requests is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

ARRIVING = "stoker.arriving"
"""Where the scope of a request has its body, if it comes this way."""

UNASKED_BYTES = 256 << 10
"""What is taken of a body before the application asks for it; most that comes in one piece."""

_MOST_DIGITS = 19
"""Of a length that 64 bits hold."""


class Held:
    """Bytes of bodies that are held at once, over all requests; used by the loop's thread only."""

    def __init__(self, most: int) -> None:
        """Args: most: bytes."""
        self.most = most
        self.now = 0

    @property
    def too_much(self) -> bool:
        """Whether it is more than may be."""
        return self.now > self.most


class Arriving:
    """One body."""

    def __init__(self, held: Held, length: int) -> None:
        """Wait for it.

        Args:
            held: Counts its bytes until it ends.
            length: Of the body, bytes.
        """
        self.left = length
        self.taken = 0
        self.wanted = self.ended = False
        """Whether the application reads it, and whether nobody does any more."""

        self._held = held
        self._parts: list[bytes] = []

    def take(self, data: bytes) -> None:
        """The next bytes, of which none is behind it; they are dropped where it has ended."""
        self.left -= len(data)
        if self.ended:
            return
        self._parts.append(data)
        self.taken += len(data)
        self._held.now += len(data)

    @property
    def is_enough(self) -> bool:
        """Whether no more of it may be read for now."""
        return not self.ended and not self.wanted and self.taken >= UNASKED_BYTES

    def whole(self) -> bytes:
        """All of it, once; what is counted stays until the end."""
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def end(self) -> None:
        """Give back what is held: nobody wants it any more."""
        if not self.ended:
            self._held.now -= self.taken
            self._parts, self.ended = [], True


def length_of(given: Sequence[tuple[bytes, bytes]]) -> int:
    """Bytes of a body as its headers say it beyond doubt; else 0.

    Args:
        given: Their names in lower case.
    """
    lengths = [value for name, value in given if name == b"content-length"]
    if len(lengths) != 1 or any(name == b"transfer-encoding" for name, _ in given):
        return 0
    plain = lengths[0].isdigit() and len(lengths[0]) <= _MOST_DIGITS
    return int(lengths[0]) if plain else 0
