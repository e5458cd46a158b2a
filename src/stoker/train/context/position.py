"""Where a training run stands: what of it is a number, beside the variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CLOCKS_DIFFER_S = 0.01
"""By how much two clocks may tell a call's length otherwise."""


@dataclass(kw_only=True, slots=True)
class Timing:
    """What the calls of a stretch of training took; the first of a process is left out."""

    steps: int = 0
    rows: float = 0.0
    wall_s: float = 0.0
    wait_s: float = 0.0

    ceiling_s: float = 0.0
    """Wall time of steps on the resident batch, for the step as currently compiled."""

    ceiling_steps: int = 0
    """Number of those steps."""

    def wait_of_call(self, measured_s: float, *, wall_s: float) -> float:
        """Seconds that a call waited for input, of `wall_s` that it took.

        TensorFlow's clock in the step is the time of day, which may be set while a call runs. What
        it says then cannot be: such a call waited as the calls before it did.
        """
        if 0.0 <= measured_s <= wall_s + CLOCKS_DIFFER_S:
            return measured_s
        return wall_s * self.wait_s / self.wall_s if self.wall_s else 0.0

    def add(self, *, steps: int, rows: float, wall_s: float, wait_s: float) -> None:
        """Count one call."""
        self.steps += steps
        self.rows += rows
        self.wall_s += wall_s
        self.wait_s += wait_s


@dataclass(kw_only=True, slots=True)
class Position:
    """How far a run is, all that a checkpoint says of it but variables and callbacks."""

    per_epoch: int
    """Steps of an epoch."""

    steps: int
    """Steps in all."""

    step: int = 0
    """Steps that are done, or skipped."""

    validated: bool = True
    """Whether the epochs that are over have been validated."""

    over: bool = False
    """Whether nothing is left to do: all steps, or a callback has stopped it."""

    loss_sum: float = 0.0
    """Since the epoch began: mean loss x rows."""

    rows: float = 0.0
    """Since the epoch began."""

    best_epoch: int = 0
    """The epoch with the best monitored value, from 1; 0 before the first."""

    best_metrics: dict[str, float] = field(default_factory=dict)
    """All metrics of that epoch."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The training metrics of the last epoch that is over."""

    skipped: list[int] = field(default_factory=list)
    """Steps, from 0, whose samples are passed over: their numbers were not finite."""

    batch_size: int = 0
    """Rows of a pass; less than at first where memory ran out."""

    accumulate: int = 0
    """Passes of a step."""

    steps_per_program: int = 0
    """Steps of one program, decided once by how long a step takes: another number could round
    otherwise. 0 before."""

    xla: bool | None = None
    """Whether XLA compiles the step from here on, as a trial decided; None before that."""

    xla_why: str = ""
    """The result of the trial, for the user."""

    timing: Timing = field(default_factory=Timing)
    """Of all calls so far."""

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self.step // self.per_epoch

    @property
    def in_epoch(self) -> int:
        """Steps of that epoch that are done."""
        return self.step % self.per_epoch

    def next_steps(self, steps_per_call: int) -> int:
        """Steps of the next call: to the end of the call's span, of the epoch, or before a skip."""
        end = self.in_epoch - self.in_epoch % steps_per_call + steps_per_call
        end = min(end, self.per_epoch) + self.epoch * self.per_epoch
        ends = [end, *(step for step in self.skipped if self.step <= step < end)]
        return min(ends) - self.step

    def skip(self) -> bool:
        """Pass over the next steps where they are to be skipped; say whether any was."""
        before = self.step
        while self.validated and self.step in self.skipped:
            self.step += 1
            self.validated = self.step % self.per_epoch != 0
        return self.step > before

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint's facts."""
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
        # A list or a dict is copied: the run goes on while the checkpoint is written.
        yield name, found.copy() if isinstance(found, list | dict) else found
