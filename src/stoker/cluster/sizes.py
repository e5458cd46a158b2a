"""The numbers of workers that an elastic training may have.

Virtual workers are distributed evenly, so the number of workers must divide the number of virtual workers.
"""

from __future__ import annotations


def allowed_sizes(*, fewest: int, most: int) -> tuple[int, ...]:
    """Return the allowed numbers of workers, in ascending order.

    Args:
        fewest: Minimum number of workers.
        most: Number of virtual workers, which is also the maximum number of workers.
    """
    return tuple(size for size in range(fewest, most + 1) if most % size == 0)
