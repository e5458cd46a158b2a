"""What is trained on one worker and on two, with equally many samples a worker. No TensorFlow."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

CALLS = 4
"""Calls that are timed, after one that is not."""

CALL_S = 1.0
"""About how long a call is."""

CORE_FLOPS = 35e9
"""What a core of the reference machine computes in a second; it only sets how many steps are run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and one way to train it."""

    name: str
    loop: Literal["stoker", "stock"] = "stoker"
    inputs: int
    widths: tuple[int, ...]
    batch_size: int
    """Samples of a worker in a pass."""

    accumulate: int = 1
    reduction_dtype: Literal["float32", "bfloat16"] = "float32"
    in_sweep: bool = False
    """Whether it is a point of the curve of efficiency."""

    @property
    def parameters(self) -> int:
        """Of the hidden layers, about all of them."""
        sizes = (self.inputs, *self.widths, 10)
        return sum(a * b + b for a, b in itertools.pairwise(sizes))

    @property
    def sent_mb(self) -> float:
        """Gradients of a step, MB."""
        return self.parameters * (4 if self.reduction_dtype == "float32" else 2) / 1e6

    @property
    def rows(self) -> int:
        """Samples of a worker in a step."""
        return self.batch_size * self.accumulate

    @property
    def steps_per_call(self) -> int:
        """Steps of a call that takes about `CALL_S`."""
        step_s = 6 * self.parameters * self.rows / CORE_FLOPS
        return max(1, min(20, round(CALL_S / step_s)))


SWEEP = tuple(
    Case(
        name=f"{batch_size} a worker",
        inputs=512,
        widths=(512, 256),
        batch_size=batch_size,
        in_sweep=True,
    )
    for batch_size in (256, 1024, 2048, 3584)
)
FIVE_M = {"inputs": 784, "widths": (1536, 1536, 1024), "batch_size": 512}
OURS_5M = Case(
    name="5 M parameters, 512 a worker, 4 passes, bfloat16",
    accumulate=4,
    reduction_dtype="bfloat16",
    **FIVE_M,  # type: ignore[arg-type]  # mypy cannot check **
)
STOCK_5M = Case(name="5 M parameters, 512 a worker, stock loop", loop="stock", **FIVE_M)  # type: ignore[arg-type]  # mypy cannot check **

CASES = (*SWEEP, OURS_5M, STOCK_5M)
OVER_NETWORK = (OURS_5M, STOCK_5M)
