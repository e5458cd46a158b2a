"""What follows a step that is not finite: the end, or back to a checkpoint without its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.train.health.explain import BadStep

MOST_BUDGET = 1000
"""Beyond it a budget is none: each rollback costs up to the steps between two checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NanConfig:
    """The settings `train.on_nan` and `train.nan_budget`."""

    on_nan: Literal["stop", "rollback"] = "stop"
    """What a loss or gradient that is not finite leads to."""

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
    """Its samples, by their position in the order of the whole run, which are skipped from now on.
    """

    bad_rows: tuple[int, ...] = ()
    """Rows of the data that held the first bad values; empty where they are not known."""


class Rollbacks:
    """Decides, and knows what is skipped; the loop does it.

    Its state is JSON and goes into checkpoints, but it is not put back by a rollback itself: what
    was decided since that checkpoint must stand.
    """

    def __init__(self, config: NanConfig) -> None:
        self._config = config
        self.done: list[Rollback] = []

    @property
    def skipped(self) -> frozenset[int]:
        """Positions of samples that are not trained on."""
        return frozenset(position for one in self.done for position in one.positions)

    def decide(self, bad: BadStep, error: UserError, *, bad_rows: tuple[int, ...] = ()) -> Rollback:
        """Go back, or end with the error.

        Args:
            bad: The step, with its samples' positions.
            error: Why, by `bad_step_error`.
            bad_rows: Rows of the data that held the first bad values. A row comes once an epoch:
                one that is known already is not charged to the budget again.

        Raises:
            UserError: the setting says stop; or the budget is spent, the samples are not known or
                were all skipped already, and then it says so too.
        """
        if self._config.on_nan == "stop":
            raise error
        if not bad.positions:
            raise _ended(error, "nobody knows which samples this step had, so none can be skipped")
        if self.skipped.issuperset(bad.positions):
            raise _ended(error, "its samples had been skipped already: it is not they that do it")
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
        """What a checkpoint and the run's record keep, as JSON."""
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
        """Go on from what `state` returned."""
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
