"""The numbers that describe how far a training run is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CLOCKS_DIFFER_S = 0.01
"""Maximum difference between two clocks that measure the same call, seconds."""


@dataclass(kw_only=True, slots=True)
class Timing:
    """Times and counts of all calls of a run, without the first call of each process."""

    steps: int = 0
    rows: float = 0.0
    wall_s: float = 0.0
    wait_s: float = 0.0

    ceiling_s: float = 0.0
    """Total wall time of steps of the current compiled form on the resident batch, seconds."""

    ceiling_steps: int = 0
    """Number of these steps."""

    def wait_of_call(self, measured_s: float, *, wall_s: float) -> float:
        """Return the part of `wall_s` for which a call waited for input, seconds.

        TensorFlow's clock inside the step is the time of day, which may be set during a call. If the
        measured time is impossible, assume the same share as in earlier calls.
        """
        if 0.0 <= measured_s <= wall_s + CLOCKS_DIFFER_S:
            return measured_s
        return wall_s * self.wait_s / self.wall_s if self.wall_s else 0.0

    def add(self, *, steps: int, rows: float, wall_s: float, wait_s: float) -> None:
        """Add the times and counts of a call."""
        self.steps += steps
        self.rows += rows
        self.wall_s += wall_s
        self.wait_s += wait_s


@dataclass(kw_only=True, slots=True)
class Position:
    """How far a run is: everything that a checkpoint stores apart from variables and callbacks."""

    per_epoch: int
    """Number of steps per epoch."""

    steps: int
    """Number of steps of the whole run."""

    step: int = 0
    """Number of steps done or skipped."""

    validated: bool = True
    """Whether all finished epochs have been validated."""

    over: bool = False
    """Whether training has ended: after all steps, or because a callback stopped it."""

    loss_sum: float = 0.0
    """Sum over the steps of this epoch: mean loss x rows."""

    rows: float = 0.0
    """Number of rows trained on in this epoch."""

    best_epoch: int = 0
    """The epoch with the best monitored value, from 1; 0 before the first."""

    best_metrics: dict[str, float] = field(default_factory=dict)
    """All metrics of the best epoch."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Training metrics of the last finished epoch."""

    skipped: list[int] = field(default_factory=list)
    """Indices of the steps (from 0) whose samples are skipped because their loss or gradients were not
    finite."""

    batch_size: int = 0
    """Number of rows per pass; reduced if memory ran out."""

    accumulate: int = 0
    """Number of passes per step."""

    steps_per_program: int = 0
    """Number of steps per XLA program; 0 before it is decided. It is decided only once per run, from the
    step's time, because programs with other numbers of steps may round differently."""

    xla: bool | None = None
    """Whether XLA compiles the step from now on, as a trial has decided; None before the decision."""

    xla_why: str = ""
    """The result of the trial, for the user."""

    timing: Timing = field(default_factory=Timing)
    """Times and counts of all calls."""

    @property
    def epoch(self) -> int:
        """Epoch of the next step, counted from 0."""
        return self.step // self.per_epoch

    @property
    def in_epoch(self) -> int:
        """Number of steps done in the epoch of the next step."""
        return self.step % self.per_epoch

    def next_steps(self, steps_per_call: int) -> int:
        """Return the number of steps of the next call: to the end of a span or epoch, or to a skipped step."""
        end = self.in_epoch - self.in_epoch % steps_per_call + steps_per_call
        end = min(end, self.per_epoch) + self.epoch * self.per_epoch
        ends = [end, *(step for step in self.skipped if self.step <= step < end)]
        return min(ends) - self.step

    def skip(self) -> bool:
        """Advance past the next steps if they must be skipped; return whether a step was skipped."""
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
        """Restore a position from the result of `to_json`, also from a checkpoint of Stoker 0.1.0."""
        fields = dict(raw)
        if "together" in fields:
            fields["steps_per_program"] = fields.pop("together")
        return cls(**(fields | {"timing": Timing(**raw["timing"])}))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    for name in value.__slots__:
        found = getattr(value, name)
        # Copy lists and dicts: training continues while the checkpoint is written.
        yield name, found.copy() if isinstance(found, list | dict) else found
