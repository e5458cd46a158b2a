"""How many workers an elastic training may have.

Its virtual workers are dealt out evenly, so the number of workers divides the number of virtual ones.
"""

from __future__ import annotations


def allowed_sizes(*, fewest: int, most: int) -> tuple[int, ...]:
    """Return the allowed numbers of workers, in ascending order.

    Args:
        fewest: Fewest workers.
        most: Number of virtual workers, which is also the most workers.
    """
    return tuple(size for size in range(fewest, most + 1) if most % size == 0)


def largest_size(available: int, *, fewest: int, most: int) -> int | None:
    """Return the largest allowed number of workers that `available` tasks can be; None if they are too few."""
    sizes = [size for size in allowed_sizes(fewest=fewest, most=most) if size <= available]
    return sizes[-1] if sizes else None
