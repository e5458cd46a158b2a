"""Follows a rollout for `stoker rollout start`: prints its changes until it is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from stoker.cli.commands.rollout.shown import summary
from stoker.core.errors import CheckFailed, Plain, UserError

if TYPE_CHECKING:
    from stoker.rollout.operations import ModelRollouts
    from stoker.rollout.state.state import RolloutState

FOLLOW_S = 1.0
"""Interval between two reads of a followed rollout, seconds; servers use the same interval."""


def follow(rollouts: ModelRollouts, began: RolloutState, *, target: str) -> None:
    """Print each change of a rollout until it is over. Servers advance the rollout, also without this process.

    Args:
        rollouts: The model's rollouts.
        began: The first state of the followed rollout.
        target: The model and its repository, as command-line arguments.

    Raises:
        CheckFailed: the version was rolled back.
    """
    from stoker.rollout.state.state import Phase

    now, line, can_read = began, "", True
    try:
        while True:
            before, line = line, _line(now)
            if line != before:
                typer.echo(f"{time.strftime('%H:%M:%S')}  {line}")
            if not now.is_active:
                break
            time.sleep(FOLLOW_S)  # a shared file system reports no changes
            try:
                now = _newest(rollouts, began.rollout) or now
                can_read = True
            except (
                UserError,
                OSError,
            ) as error:  # servers keep the last weights until they can read
                if can_read:
                    typer.echo(f"the state cannot be read now: {error}", err=True)
                can_read = False
    except KeyboardInterrupt:
        typer.echo(f"The rollout goes on. See `stoker rollout status {target}`.", err=True)
        raise
    if now.phase is Phase.ROLLED_BACK:
        raise CheckFailed(
            f"Version {now.candidate} was rolled back to version {now.stable}",
            got=Plain(now.reason),
            fix=f"See `stoker rollout history {target}`.",
        )


def _newest(rollouts: ModelRollouts, rollout: int) -> RolloutState | None:
    """Return the newest state of this rollout, even if another one has begun; None: the model has no state."""
    newest = rollouts.state()
    if newest is None or newest.rollout == rollout:
        return newest
    return [state for _, state in rollouts.history() if state.rollout == rollout][-1]


def _line(state: RolloutState) -> str:
    stage = f"; stage {state.stage + 1}: {state.current}" if state.is_active else ""
    reason = f"; {state.reason}" if state.reason else ""
    return f"{summary(state)}{stage}{reason}"
