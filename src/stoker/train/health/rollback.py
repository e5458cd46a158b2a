"""Decides what follows a step that is not finite: the end, or a rollback without its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.train.health.explain import BadStep

MOST_BUDGET = 1000
"""A larger budget is unreasonable: each rollback costs up to the steps between two checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NanConfig:
    """The settings `train.on_nan` and `train.nan_budget`."""

    on_nan: Literal["stop", "rollback"] = "stop"
    """Reaction to a loss or gradient that is not finite."""

    nan_budget: int = 3
    """Most rollbacks of a run."""

    def __post_init__(self) -> None:
        if not 0 <= self.nan_budget <= MOST_BUDGET:
            raise ConfigError(
                f"train.nan_budget must be from 0 to {MOST_BUDGET}", got=self.nan_budget
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """One return to a checkpoint; it is recorded in the run."""

    step: int
    """The step that was not finite."""

    positions: tuple[int, ...]
    """Positions of its samples in the order of the whole run; they are skipped from now on."""

    bad_rows: tuple[int, ...] = ()
    """Rows of the data that held the first bad values; empty if unknown."""


class Rollbacks:
    """Decides about rollbacks and stores what is skipped; the loop carries it out.

    Its state is JSON and is stored in checkpoints, but a rollback does not restore it: decisions
    since that checkpoint stay valid.
    """

    def __init__(self, config: NanConfig) -> None:
        self._config = config
        self.done: list[Rollback] = []

    @property
    def skipped(self) -> frozenset[int]:
        """Positions of samples that are not used for training."""
        return frozenset(position for one in self.done for position in one.positions)

    def decide(self, bad: BadStep, error: UserError, *, bad_rows: tuple[int, ...] = ()) -> Rollback:
        """Roll back, or raise the error.

        Args:
            bad: The step, with the positions of its samples.
            error: The reason, from `bad_step_error`.
            bad_rows: Rows of the data that held the first bad values. A row occurs once per epoch:
                if it is known already, it does not count against the budget again.

        Raises:
            UserError: The setting says stop; or, as the error then says, the budget is used up, or
                the samples are unknown or were skipped already.
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
