"""Explains a step whose loss or gradient is not finite, and decides to end the run or to roll back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.train.health.layers import BadValues

MAX_FLOAT16 = 65_504.0
"""Largest finite value of float16."""

LARGE = 1e30
"""If finite values are larger than this, growth led to infinity, and not a division by zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep:
    """A step whose loss or gradient is not finite; usually, its update was not made."""

    step: int
    """Its number; the first step is 1."""

    loss: float
    """Its loss; finite if only a gradient was not finite."""

    positions: tuple[int, ...]
    """Positions of its samples in the order of the whole run; empty if unknown."""

    learning_rate: float

    precision: str
    """Keras's dtype policy."""

    xla: bool
    """Whether the step was compiled by XLA."""

    already_applied: bool = False
    """Whether the update was made nevertheless: a user-defined `train_step` updates the weights itself."""


def bad_step_error(bad: BadStep, found: BadValues | None) -> UserError:
    """Return the one-line error that ends a run after a bad step.

    Args:
        bad: The step.
        found: The result of `first_bad_values`: the first values of the step that are not finite; None if all
            were finite when the step was run again.
    """
    wrong = "gradient" if bad.loss == bad.loss and abs(bad.loss) != float("inf") else "loss"
    return UserError(
        f"the {wrong} of step {bad.step} must be finite",
        got=Plain(f"loss {bad.loss:g}, learning rate {bad.learning_rate:g}, {bad.precision}"),
        fix=f"{_where(bad, found)} {_advice(bad, found)}",
    )


def _where(bad: BadStep, found: BadValues | None) -> str:
    if found is None:
        run = "without XLA" if bad.xla else "separately"
        return f"In a second run {run}, every value of the step is finite{_samples(bad, ())}."
    places = {
        "feature": f"feature {found.name}",
        "label": f"label {found.name}",
        "sample weight": f"sample weight {found.name}",
        "weight": f"weight {found.name}, {'after' if bad.already_applied else 'before'} the step",
        "output": f"the output of layer {found.name}",
        "loss": f"the {found.name}" if found.name != "loss" else "the loss itself",
        "gradient": f"the gradient that passes back through {found.name}",
    }
    return f"It began in {places[found.place]} ({_figures(found)}){_samples(bad, found.rows)}."


def _figures(found: BadValues) -> str:
    shares = [
        f"{share:.2g} of its values {name}"
        for share, name in ((found.nan_share, "NaN"), (found.infinite_share, "infinite"))
        if share
    ]
    rest = (
        f", the others from {found.least:g} to {found.most:g}"
        if found.least is not None and found.most is not None
        else ""
    )
    return f"{' and '.join(shares)}{rest}; {found.dtype}"


def _samples(bad: BadStep, rows: Sequence[int]) -> str:
    if not rows:
        if not bad.positions:
            return ""
        return f", samples {min(bad.positions)} to {max(bad.positions)} of the run's order"
    shown = f", rows {', '.join(map(str, rows))} of its batch"
    places = [bad.positions[row] for row in rows if row < len(bad.positions)]
    if not places:
        return shown
    return f"{shown} (samples {', '.join(map(str, places))} of the run's order)"


def _advice(bad: BadStep, found: BadValues | None) -> str:
    if found is None:
        return "Try train.xla: false, a lower learning rate, or train.on_nan: rollback."
    if found.place in ("feature", "label", "sample weight"):
        return (
            "Fill or leave out missing values in preprocessing_fn (`stoker analyze` counts them), "
            "or set train.on_nan: rollback to skip these samples."
        )
    if found.place == "weight" and bad.already_applied:
        return (
            "The model's train_step updated it before it could be checked: lower the learning rate, clip "
            "its gradients, or set train.on_nan: rollback."
        )
    if found.place == "weight":
        return "An earlier update caused it: lower the learning rate, or set train.clip_norm: 1.0."
    if found.place == "gradient" and bad.precision == "mixed_float16":
        # A dynamic loss scale would have skipped such a step.
        return (
            "float16 ends at 65504: set train.loss_scale: dynamic, which skips such a step, or "
            "train.precision: mixed_bfloat16."
        )
    if found.dtype == "float16" and (found.most or MAX_FLOAT16) > MAX_FLOAT16 / 8:
        return "float16 ends at 65504: set train.precision: mixed_bfloat16, or float32."
    if max(abs(found.least or 0.0), abs(found.most or 0.0)) > LARGE:
        return (
            f"Values grew too large: lower the learning rate ({bad.learning_rate:g}), or set "
            "train.clip_norm: 1.0."
        )
    if found.place == "gradient":
        return (
            "Look there for the square root, norm, logarithm or division of a zero (add a small "
            "number inside), or set train.on_nan: rollback."
        )
    return (
        "Look there for the logarithm or division of a zero, or an overflowing exponential; lower "
        "the learning rate, or set train.on_nan: rollback."
    )


MAX_BUDGET = 1000
"""Maximum budget: each rollback repeats up to all steps between two checkpoints, so a larger one is probably
a typo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NanConfig:
    """The settings `train.on_nan` and `train.nan_budget`."""

    on_nan: Literal["stop", "rollback"] = "stop"
    """Reaction to a loss or gradient that is not finite."""

    nan_budget: int = 3
    """Maximum number of rollbacks in a run."""

    def __post_init__(self) -> None:
        if not 0 <= self.nan_budget <= MAX_BUDGET:
            raise ConfigError(
                f"train.nan_budget must be from 0 to {MAX_BUDGET}", got=self.nan_budget
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """A return to a checkpoint, as it is recorded in the run."""

    step: int
    """The step that was not finite."""

    positions: tuple[int, ...]
    """Positions of its samples in the order of the whole run; these samples are skipped from now on."""

    bad_rows: tuple[int, ...] = ()
    """Rows of the data that contain the first values that are not finite; empty if unknown."""


class Rollbacks:
    """Decides about rollbacks, and stores which samples are skipped; the loop carries out the rollback.

    Its state is JSON and is stored in checkpoints. A rollback does not restore this state, so that
    decisions since the checkpoint stay valid.
    """

    def __init__(self, config: NanConfig) -> None:
        self._config = config
        self.done: list[Rollback] = []

    @property
    def skipped(self) -> frozenset[int]:
        """Positions of samples that are not used for training."""
        return frozenset(position for one in self.done for position in one.positions)

    def decide(self, bad: BadStep, error: UserError, *, bad_rows: tuple[int, ...] = ()) -> Rollback:
        """Decide to roll back, and record it; or raise the error, which ends the run.

        Args:
            bad: The step, with the positions of its samples.
            error: The result of `bad_step_error`.
            bad_rows: Rows of the data that contain the first values that are not finite. Rows occur again
                in each epoch; known rows do not count against the budget again.

        Raises:
            UserError: `on_nan` is `stop`, the budget is used up, or the samples are unknown or were
                skipped already; the error says which.
        """
        if self._config.on_nan == "stop":
            raise error
        if not bad.positions:
            raise _ended(error, "the samples of this step are unknown, so they cannot be skipped")
        if self.skipped.issuperset(bad.positions):
            raise _ended(error, "its samples were skipped already, so they are not the cause")
        charged = len(self._charged())
        if not self._is_known(bad_rows) and charged >= self._config.nan_budget:
            steps = ", ".join(str(one.step) for one in self.done) or "none"
            raise _ended(
                error,
                f"train.nan_budget allows {self._config.nan_budget} rollbacks, made at steps: "
                f"{steps}",
            )
        rollback = Rollback(step=bad.step, positions=tuple(bad.positions), bad_rows=bad_rows)
        self.done.append(rollback)
        return rollback

    def _is_known(self, rows: tuple[int, ...]) -> bool:
        known = {row for one in self.done for row in one.bad_rows}
        return bool(rows) and known.issuperset(rows)

    def _charged(self) -> list[Rollback]:
        charged: list[Rollback] = []
        known: set[int] = set()
        for one in self.done:
            if not one.bad_rows or not known.issuperset(one.bad_rows):
                charged.append(one)
            known.update(one.bad_rows)
        return charged

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints and the run's record, as JSON."""
        return {
            "rollbacks": [
                {
                    "step": one.step,
                    "positions": list(one.positions),
                    "bad_rows": list(one.bad_rows),
                }
                for one in self.done
            ]
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.done = [
            Rollback(
                step=one["step"],
                positions=tuple(one["positions"]),
                bad_rows=tuple(one["bad_rows"]),
            )
            for one in state["rollbacks"]
        ]


def _ended(error: UserError, why: str) -> UserError:
    return UserError(error.rule, got=Plain(str(error.got)), fix=f"{why}. {error.fix}")
