"""How many workers an elastic training may have.

Its virtual workers are distributed evenly, so the number of workers divides the number of virtual ones.
"""

from __future__ import annotations


def allowed_sizes(*, fewest: int, most: int) -> tuple[int, ...]:
    """Return the allowed numbers of workers, in ascending order.

    Args:
        fewest: Fewest workers.
        most: Number of virtual workers, which is also the most workers.
    """
    return tuple(size for size in range(fewest, most + 1) if most % size == 0)
