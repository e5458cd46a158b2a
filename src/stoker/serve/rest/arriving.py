"""The body of a request that says how long it is, taken as it comes: past the parser, and with no copy.

uvicorn stops reading for each 64 KiB until the application has copied them; of an image of numbers
in JSON that is a millisecond. Here the count of what is held for all requests is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

ARRIVING = "stoker.arriving"
"""Where the scope of a request has its body, if it comes this way."""


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
        self.parts: list[bytes] = []
        self.taken = 0
        self._held = held
        self._ended = False

    def take(self, data: bytes) -> None:
        """The next bytes, of which none is behind it; they are dropped where it has ended."""
        self.left -= len(data)
        if self._ended:
            return
        self.parts.append(data)
        self.taken += len(data)
        self._held.now += len(data)

    def end(self) -> None:
        """Give back what is held: nobody wants it any more."""
        if not self._ended:
            self._held.now -= self.taken
            self.parts, self._ended = [], True


def length_of(given: Sequence[tuple[bytes, bytes]]) -> int:
    """Bytes of a body as its headers say it beyond doubt; else 0.

    Args:
        given: Their names in lower case.
    """
    lengths = [value for name, value in given if name == b"content-length"]
    if len(lengths) != 1 or any(name == b"transfer-encoding" for name, _ in given):
        return 0
    return int(lengths[0]) if lengths[0].isdigit() else 0
