"""Changes of a rollout's state. Every function is pure: it takes a state and returns a new state."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from stoker.core.errors import Plain, UserError
from stoker.rollout.state.ab_settings import ABTestSettings
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.stages import parse_stages
from stoker.rollout.state.state import ACTIVE, Phase, RolloutState


def start(
    state: RolloutState | None,
    candidate: int,
    *,
    serving: int,
    settings: RolloutSettings,
    now_s: float,
    who: str = "",
) -> RolloutState:
    """Start a rollout.

    Args:
        state: The model's current state; None if it has no state yet.
        candidate: The version to roll out.
        serving: The version that takes the traffic of a model without a state.
        settings: Settings of the rollout.
        now_s: Seconds since the epoch.
        who: Name of the operator.

    Raises:
        UserError: another rollout is running, or the candidate is the version that serves.
    """
    baseline = serving if state is None else state.stable
    begun = _begun(state, baseline, candidate, settings=settings, now_s=now_s, who=who)
    if candidate == baseline:
        raise UserError(
            "The candidate of a rollout must not be the version that serves",
            got=Plain(f"version {candidate}"),
            fix="Push a new version first.",
        )
    return _again(begun, [candidate])


def begin_test(
    state: RolloutState | None,
    test: ABTestSettings,
    *,
    settings: RolloutSettings,
    now_s: float,
    who: str = "",
) -> RolloutState:
    """Start an A/B test.

    Args:
        state: The model's current state; None if it has no state yet.
        test: The arms of the test.
        settings: Its `key` identifies the user.
        now_s: Seconds since the epoch.
        who: Name of the operator.

    Raises:
        UserError: a rollout or another test is running, or the settings have no key.
    """
    candidate = next(version for version in test.shares if version != test.baseline)
    begun = _begun(state, test.baseline, candidate, settings=settings, now_s=now_s, who=who)
    if not settings.key:
        raise UserError(
            "An A/B test needs a key that identifies the user",
            fix="Name a header, a gRPC metadata key or a cookie: --key x-user, --key cookie:uid.",
        )
    return replace(_again(begun, test.shares), phase=Phase.TESTING, test=test)


def _begun(
    state: RolloutState | None,
    baseline: int,
    candidate: int,
    *,
    settings: RolloutSettings,
    now_s: float,
    who: str,
) -> RolloutState:
    """Return the first state of a model's next rollout or test.

    Raises:
        UserError: another one is running.
    """
    first = RolloutState(
        rollout=1,
        baseline=baseline,
        candidate=candidate,
        settings=settings,
        began_s=now_s,
        who=who,
    )
    if state is None:
        return first
    if state.phase in ACTIVE:
        versions = state.arms if state.is_test else [state.candidate]
        raise UserError(
            "Only one rollout or A/B test of a model can run at a time",
            got=Plain(
                f"version {', '.join(map(str, versions))}, started by {state.who or 'an operator'}, {state.phase}"
            ),
            fix="Wait for its end, or end it with `stoker rollout rollback` or `stoker rollout promote`.",
        )
    # Lease numbers never repeat, so that an earlier rollout's controller does not mistake this lease for its own.
    return replace(
        first,
        rollout=state.rollout + 1,
        rejected=state.rejected,
        barred=state.barred,
        lease=state.lease,
    )


def _again(state: RolloutState, versions: Collection[int]) -> RolloutState:
    """Let versions that were rolled back take traffic again."""
    return replace(
        state,
        rejected=_without(state.rejected, versions),
        barred=_without(state.barred, versions),
    )


def _without(versions: Iterable[int], others: Collection[int]) -> tuple[int, ...]:
    return tuple(version for version in versions if version not in others)


def bar(state: RolloutState, versions: Iterable[int]) -> RolloutState:
    """Let no server load versions that ended or blocked a worker."""
    return replace(state, barred=tuple(sorted({*state.barred, *versions})))


def end_test(state: RolloutState, version: int, *, now_s: float) -> RolloutState:
    """End an A/B test: give all traffic to one arm. The baseline stays loaded for a while, for an immediate rollback.

    Raises:
        UserError: no test is running, or the version is not one of its arms.
    """
    if state.phase is not Phase.TESTING or state.test is None:
        raise UserError(
            "--version must be used for an A/B test only",
            got=Plain(f"version {state.candidate}, {state.phase}"),
            fix="To go to the next stage of a rollout, leave --version out.",
        )
    if version not in state.test.shares:
        raise UserError(
            "The version that takes all traffic after an A/B test must be one of its arms",
            got=Plain(f"version {version}"),
            fix=f"Name one of {', '.join(map(str, state.test.shares))}.",
        )
    return replace(state, candidate=version, phase=Phase.COMPLETED, began_s=now_s, reason="")


def first_version(
    version: int, *, settings: RolloutSettings, now_s: float, who: str = ""
) -> RolloutState:
    """Create the first state of a model, whose only version takes all traffic.

    Args:
        version: The only version.
        settings: Settings of the rollout, which is completed immediately.
        now_s: Seconds since the epoch.
        who: Name of the operator.
    """
    return RolloutState(
        rollout=1,
        baseline=version,
        candidate=version,
        settings=settings,
        began_s=now_s,
        phase=Phase.COMPLETED,
        stage=len(parse_stages(settings.stages)) - 1,
        who=who,
    )


def advance(state: RolloutState, *, now_s: float) -> RolloutState:
    """Go to the next stage; after the last stage, to the bake time; after the bake time, to the end.

    Raises:
        UserError: the rollout is over.
    """
    _check_active(state)
    if state.phase is Phase.MEASURING:
        return replace(state, phase=Phase.RUNNING, began_s=now_s)
    if state.phase is Phase.BAKING:
        return replace(state, phase=Phase.COMPLETED, began_s=now_s, reason="")
    if not state.is_last_stage:
        return replace(state, phase=Phase.RUNNING, stage=state.stage + 1, began_s=now_s, reason="")
    phase = Phase.BAKING if state.settings.bake_s else Phase.COMPLETED
    return replace(state, phase=phase, began_s=now_s, reason="")


def compare_again(state: RolloutState, *, reason: str, now_s: float) -> RolloutState:
    """Return from 100 % to the last stage with both versions, to distinguish a bad version from an outage.

    Args:
        state: A state at 100 % that has a `split_stage`.
        reason: Reason to show while the versions are compared.
        now_s: Seconds since the epoch.
    """
    assert state.split_stage is not None
    phase = Phase.PAUSED if state.phase is Phase.PAUSED else Phase.RUNNING
    return replace(state, phase=phase, stage=state.split_stage, began_s=now_s, reason=reason)


def promote_fully(state: RolloutState, *, now_s: float) -> RolloutState:
    """Go to 100 % immediately; the bake time follows.

    Raises:
        UserError: the rollout is over.
    """
    _check_active(state)
    last = len(parse_stages(state.settings.stages)) - 1
    return advance(replace(state, stage=last, phase=Phase.RUNNING), now_s=now_s)


def pause(state: RolloutState, *, reason: str) -> RolloutState:
    """Keep the current traffic split until `resume`; failing gates still roll back.

    Raises:
        UserError: the rollout is not running.
    """
    if state.phase is not Phase.RUNNING:
        raise UserError(
            "Only a running rollout can be paused",
            got=Plain(f"version {state.candidate}, {state.phase}"),
            fix="See `stoker rollout status`.",
        )
    return replace(state, phase=Phase.PAUSED, reason=reason)


def resume(state: RolloutState, *, now_s: float) -> RolloutState:
    """Continue: the time of a paused stage starts again, its counts stay; a stage that waits for an operator ends.

    Raises:
        UserError: the rollout is neither paused nor in a stage that waits.
    """
    if state.phase is Phase.PAUSED:
        return replace(state, phase=Phase.RUNNING, began_s=now_s, reason="")
    if state.phase is Phase.RUNNING and state.current.waits:
        return advance(state, now_s=now_s)
    raise UserError(
        "Only a paused rollout, or one in a stage `pause`, can be resumed",
        got=Plain(f"version {state.candidate}, {state.phase}, {state.current}"),
        fix="To go to the next stage, use `stoker rollout promote`.",
    )


def roll_back(
    state: RolloutState, *, reason: str, now_s: float, to: int | None = None
) -> RolloutState:
    """Take all traffic from the candidate, even if the rollout has already ended.

    Args:
        state: The model's current state.
        reason: Reason to show, and to keep in the history.
        now_s: Seconds since the epoch.
        to: The version that takes the traffic; None: the baseline.

    Raises:
        UserError: the candidate already takes no traffic, or the version to go back to is the candidate or
            already takes all traffic.
    """
    target = state.baseline if to is None else to
    if state.phase is Phase.ROLLED_BACK and target == state.baseline:
        raise UserError(
            "A rollout can be rolled back only once",
            got=Plain(f"version {state.candidate} takes no traffic: {state.reason}"),
            fix=f"Version {state.baseline} takes the traffic. To use another one: `stoker rollout rollback --to VERSION`.",
        )
    takes_all = state.phase is Phase.BAKING or state.phase not in ACTIVE
    if target == state.stable and takes_all:
        raise UserError(
            "The version to go back to already takes all traffic",
            got=Plain(f"version {target}"),
            fix="See `stoker rollout history`.",
        )
    if target == state.candidate and state.is_active and not state.is_test:
        raise UserError(
            "A rollout must go back to a version other than its candidate",
            got=Plain(f"version {target}"),
            fix="To give all traffic to the candidate, use `stoker rollout promote --full`.",
        )
    tested = state.arms if state.is_test else ()
    gone = {state.candidate, state.stable, *tested} - {target}
    return replace(
        state,
        baseline=target,
        candidate=state.baseline if target == state.candidate else state.candidate,
        previous=0 if target == state.baseline else state.baseline,
        phase=Phase.ROLLED_BACK,
        reason=reason,
        began_s=now_s,
        rejected=tuple(sorted({*state.rejected, *gone} - {target})),
        barred=_without(state.barred, [target]),
    )


def _check_active(state: RolloutState) -> None:
    if state.phase is Phase.TESTING:
        raise UserError(
            "An A/B test has no stages",
            got=Plain(f"versions {', '.join(map(str, state.arms))}"),
            fix="End it with `stoker rollout promote --version N`, or with `stoker rollout rollback`.",
        )
    if state.phase not in ACTIVE:
        raise UserError(
            "A rollout must be running",
            got=Plain(f"version {state.candidate}, {state.phase}"),
            fix="Begin one with `stoker rollout start MODEL VERSION`.",
        )
