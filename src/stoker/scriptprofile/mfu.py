"""What a script's step computes, and what the device reaches: the two halves of its MFU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """What a step computes, and what the device reaches; either may be unknown, and says why."""

    operations: float | None = None
    """Floating-point operations of products of matrices and convolutions, of what `split_step` calls
    a step: forward, backward, and what is computed again."""

    no_operations: str = ""
    """Why they are not known."""

    notes: tuple[str, ...] = ()
    """What is more or less than the count says, in plain words."""

    peak_per_s: float | None = None
    """Operations a second that the device reaches, each kind at its own peak."""

    peak_of: str = ""
    """Kinds, and the type that was measured."""

    no_peak: str = ""
    """Why there is none."""

    on_cpu: str = ""
    """What of the step is placed on the CPU while a GPU is there; empty: nothing, or no GPU."""

    def achieved_per_s(self, step_s: float) -> float | None:
        """Operations a second, where a step takes so long."""
        return None if self.operations is None else self.operations / step_s

    def mfu(self, step_s: float) -> float | None:
        """Achieved by peak, where a step takes so long."""
        achieved = self.achieved_per_s(step_s)
        return None if achieved is None or not self.peak_per_s else achieved / self.peak_per_s

    def why_none(self) -> str:
        """Why there is no MFU."""
        return self.no_operations or self.no_peak
