"""Decides the next step of a rollout from its gates' results: wait, advance, compare again, pause or roll back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stoker.rollout.gates.gates import GateResult, Verdict
from stoker.rollout.state.state import ACTIVE, Phase, RolloutState


class Action(StrEnum):
    """The next step of a rollout."""

    WAIT = "wait"
    ADVANCE = "advance"
    COMPARE = "compare again"
    PAUSE = "pause"
    ROLL_BACK = "roll back"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The next step of a rollout, and its reason."""

    action: Action
    reason: str


def decide(
    state: RolloutState, results: Sequence[GateResult], *, requests: int, now_s: float
) -> Decision:
    """Decide the next step of a rollout.

    Args:
        state: State of the rollout.
        results: Results of all gates.
        requests: Number of the candidate's answers in this stage.
        now_s: Seconds since the epoch.
    """
    if state.phase not in ACTIVE:
        return Decision(action=Action.WAIT, reason=f"{state.phase}")
    judged = [each for each in results if each.gate not in state.settings.dry_run]
    failed = [each for each in judged if each.verdict is Verdict.FAIL]
    if failed:
        return Decision(action=Action.ROLL_BACK, reason=_clauses(failed))
    if unsure := [each for each in judged if each.needs_baseline]:
        return Decision(action=Action.COMPARE, reason=_clauses(unsure))
    if state.phase is Phase.PAUSED:
        return Decision(action=Action.WAIT, reason=f"paused: {state.reason}")
    silent = [each for each in judged if each.verdict is Verdict.INCONCLUSIVE]
    if silent:
        return without_answer(state, silent, strict=state.settings.strict)
    return _next(state, requests, now_s)


def without_answer(
    state: RolloutState, silent: Sequence[GateResult], *, strict: bool = False
) -> Decision:
    """Decide the next step when an answer is missing: wait, and after `inconclusive_limit_s` pause or roll back.

    Args:
        state: State of the rollout.
        silent: The gates and webhooks whose answer is missing, and for how long.
        strict: Whether to roll back instead of pausing.
    """
    limit_s = state.settings.inconclusive_limit_s
    if max(each.silent_s for each in silent) < limit_s:
        return Decision(action=Action.WAIT, reason=_clauses(silent))
    if strict:
        return Decision(
            action=Action.ROLL_BACK, reason=f"no answer for {limit_s:g} s: {_clauses(silent)}"
        )
    if state.phase is not Phase.RUNNING:
        # Nothing to pause: the candidate takes no traffic yet, or all of it, and no gate fails.
        return Decision(action=Action.WAIT, reason=_clauses(silent))
    return Decision(action=Action.PAUSE, reason=f"no answer for {limit_s:g} s: {_clauses(silent)}")


def _next(state: RolloutState, requests: int, now_s: float) -> Decision:
    stage, settings, took_s = state.current, state.settings, now_s - state.began_s
    if state.phase is Phase.BAKING:
        left_s = settings.bake_s - took_s
    elif stage.waits:
        return Decision(action=Action.WAIT, reason="waits for `stoker rollout resume`")
    else:
        left_s = settings.warm_up_s - took_s
        left_s += settings.step_time_s if stage.time_s is None else stage.time_s
    if left_s > 0:
        return Decision(action=Action.WAIT, reason=f"{left_s:.0f} s left")
    # In a stage with a header, only testers send requests to the candidate, so one is enough.
    least = 1 if stage.header else settings.min_requests
    if state.phase is Phase.RUNNING and requests < least:
        return Decision(
            action=Action.WAIT, reason=f"{requests} of {least} requests of the candidate"
        )
    return Decision(action=Action.ADVANCE, reason="all gates pass")


def _clauses(results: Iterable[GateResult]) -> str:
    return "; ".join(f"{each.gate}: {each.detail}" for each in results)
