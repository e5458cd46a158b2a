"""How an A/B test begins and ends: state in, state out."""

from __future__ import annotations

from dataclasses import replace

from stoker.core.errors import Plain, UserError
from stoker.rollout.state.ab_settings import ABTestSettings
from stoker.rollout.state.state import ACTIVE, Phase, RolloutSettings, RolloutState


def begin_test(
    state: RolloutState | None,
    test: ABTestSettings,
    *,
    settings: RolloutSettings,
    now_s: float,
    who: str = "",
) -> RolloutState:
    """Split the keys between the arms of a test.

    Args:
        state: of the model until now; None: it has none yet.
        test: its arms.
        settings: the key.
        now_s: seconds since the epoch.
        who: the operator.

    Raises:
        UserError: a rollout or another test is under way, or there is no key.
    """
    if state is not None and state.phase in ACTIVE:
        raise UserError(
            "Only one rollout or A/B test of a model can be under way",
            got=Plain(f"{state.phase}, started by {state.who or 'an operator'}"),
            fix="End it first with `stoker rollout promote` or `stoker rollout rollback`.",
        )
    if not settings.key:
        raise UserError(
            "An A/B test must have a key, by which a user stays with a version",
            fix="Name a header, a gRPC metadata key or a cookie: --key x-user, --key cookie:uid.",
        )
    rejected = () if state is None else state.rejected
    return RolloutState(
        rollout=1 if state is None else state.rollout + 1,
        baseline=test.baseline,
        candidate=next(version for version in test.shares if version != test.baseline),
        settings=settings,
        began_s=now_s,
        phase=Phase.TESTING,
        who=who,
        test=test,
        rejected=tuple(version for version in rejected if version not in test.shares),
        lease=0 if state is None else state.lease,
    )


def end_test(state: RolloutState, version: int, *, now_s: float) -> RolloutState:
    """Give all traffic to one arm. The baseline stays loaded for a while, so that going back needs no load.

    Raises:
        UserError: there is no test under way, or the version is not one of its arms.
    """
    if state.phase is not Phase.TESTING or state.test is None:
        raise UserError(
            "Only an A/B test ends with a version of your choice",
            got=Plain(f"version {state.candidate}, {state.phase}"),
            fix="Leave --version out for the next stage of a rollout.",
        )
    if version not in state.test.shares:
        raise UserError(
            "An A/B test must end with one of its arms",
            got=Plain(f"version {version}"),
            fix=f"Name one of {', '.join(map(str, state.test.shares))}.",
        )
    return replace(state, candidate=version, phase=Phase.COMPLETED, began_s=now_s, reason="")
