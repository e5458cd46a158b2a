"""The numbers that describe how far a training run is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CLOCKS_DIFFER_S = 0.01
"""Largest difference between two clocks that measure the same call, seconds."""


@dataclass(kw_only=True, slots=True)
class Timing:
    """Times and counts of a run's calls; the first call of a process is left out."""

    steps: int = 0
    rows: float = 0.0
    wall_s: float = 0.0
    wait_s: float = 0.0

    ceiling_s: float = 0.0
    """Wall time of steps on the resident batch, for the step as currently compiled."""

    ceiling_steps: int = 0
    """Number of those steps."""

    def wait_of_call(self, measured_s: float, *, wall_s: float) -> float:
        """Return the time that a call waited for input, seconds, out of `wall_s`.

        TensorFlow's clock inside the step is the time of day, which may be set during a call. If
        its value is impossible, assume the same share as in earlier calls.
        """
        if 0.0 <= measured_s <= wall_s + CLOCKS_DIFFER_S:
            return measured_s
        return wall_s * self.wait_s / self.wall_s if self.wall_s else 0.0

    def add(self, *, steps: int, rows: float, wall_s: float, wait_s: float) -> None:
        """Add one call."""
        self.steps += steps
        self.rows += rows
        self.wall_s += wall_s
        self.wait_s += wait_s


@dataclass(kw_only=True, slots=True)
class Position:
    """How far a run is: everything that a checkpoint stores apart from variables and callbacks."""

    per_epoch: int
    """Steps per epoch."""

    steps: int
    """Total steps."""

    step: int = 0
    """Steps done or skipped."""

    validated: bool = True
    """Whether all finished epochs have been validated."""

    over: bool = False
    """Whether training has ended: after all steps, or because a callback stopped it."""

    loss_sum: float = 0.0
    """Sum of mean loss x rows in this epoch."""

    rows: float = 0.0
    """Rows in this epoch."""

    best_epoch: int = 0
    """The epoch with the best monitored value, from 1; 0 before the first."""

    best_metrics: dict[str, float] = field(default_factory=dict)
    """All metrics of that epoch."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Training metrics of the last finished epoch."""

    skipped: list[int] = field(default_factory=list)
    """Steps, counted from 0, whose samples are skipped because their loss or gradients were not
    finite."""

    batch_size: int = 0
    """Rows of one pass; reduced if memory ran out."""

    accumulate: int = 0
    """Passes per step."""

    steps_per_program: int = 0
    """Steps per XLA program, decided once per run from the step's time, because another number may
    round differently. 0 before the decision."""

    xla: bool | None = None
    """Whether XLA compiles the step from now on, as decided by a trial; None before that."""

    xla_why: str = ""
    """The result of the trial, for the user."""

    timing: Timing = field(default_factory=Timing)
    """Times and counts of all calls."""

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self.step // self.per_epoch

    @property
    def in_epoch(self) -> int:
        """Steps done in that epoch."""
        return self.step % self.per_epoch

    def next_steps(self, steps_per_call: int) -> int:
        """Return the steps of the next call: to the end of a span or epoch, or before a skip."""
        end = self.in_epoch - self.in_epoch % steps_per_call + steps_per_call
        end = min(end, self.per_epoch) + self.epoch * self.per_epoch
        ends = [end, *(step for step in self.skipped if self.step <= step < end)]
        return min(ends) - self.step

    def skip(self) -> bool:
        """Skip the next steps if necessary; return whether any was skipped."""
        before = self.step
        while self.validated and self.step in self.skipped:
            self.step += 1
            self.validated = self.step % self.per_epoch != 0
        return self.step > before

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, for a checkpoint."""
        return dict(_fields(self)) | {"timing": dict(_fields(self.timing))}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Position:
        """Restore a position from `to_json`, also from a checkpoint of Stoker 0.1.0."""
        fields = dict(raw)
        if "together" in fields:
            fields["steps_per_program"] = fields.pop("together")
        return cls(**(fields | {"timing": Timing(**raw["timing"])}))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    for name in value.__slots__:
        found = getattr(value, name)
        # Copy lists and dicts: training continues while the checkpoint is written.
        yield name, found.copy() if isinstance(found, list | dict) else found
