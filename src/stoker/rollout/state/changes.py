"""The changes of a rollout's state. Every function is pure: state in, state out."""

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
        state: current one of the model; None if it has none yet.
        candidate: the version to roll out.
        serving: the version that takes the traffic of a model without a state.
        settings: of the rollout.
        now_s: seconds since the epoch.
        who: the operator.

    Raises:
        UserError: another rollout is running, or the candidate serves already.
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
    """Split the keys between the arms of an A/B test.

    Args:
        state: current one of the model; None if it has none yet.
        test: its arms.
        settings: the key.
        now_s: seconds since the epoch.
        who: the operator.

    Raises:
        UserError: a rollout or another test is running, or the settings have no key.
    """
    candidate = next(version for version in test.shares if version != test.baseline)
    begun = _begun(state, test.baseline, candidate, settings=settings, now_s=now_s, who=who)
    if not settings.key:
        raise UserError(
            "An A/B test must have a key, by which a user stays with a version",
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
    """The next rollout of a model.

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
            "Only one rollout or A/B test of a model can be under way",
            got=Plain(
                f"version {', '.join(map(str, versions))}, started by {state.who or 'an operator'}, {state.phase}"
            ),
            fix="Wait for its end, or end it with `stoker rollout rollback` or `stoker rollout promote`.",
        )
    # Lease numbers never repeat: an earlier rollout's controller must not mistake this lease for its own.
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
    """Give all traffic to one arm. The baseline stays loaded for a while, so that going back needs no load.

    Raises:
        UserError: no test is running, or the version is not one of its arms.
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


def first_version(
    version: int, *, settings: RolloutSettings, now_s: float, who: str = ""
) -> RolloutState:
    """Create the first state of a model: its only version takes all traffic.

    Args:
        version: the only version.
        settings: of the rollout, which is complete at once.
        now_s: seconds since the epoch.
        who: the operator.
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
    """Go to the next stage; after the last one to the bake time, then to the end.

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
    """Go back from 100 % to the last stage with both versions, to distinguish a bad version from an outage.

    Args:
        state: at 100 %, with a `split_stage`.
        reason: shown while it compares.
        now_s: seconds since the epoch.
    """
    assert state.split_stage is not None
    phase = Phase.PAUSED if state.phase is Phase.PAUSED else Phase.RUNNING
    return replace(state, phase=phase, stage=state.split_stage, began_s=now_s, reason=reason)


def promote_fully(state: RolloutState, *, now_s: float) -> RolloutState:
    """Go to 100 % at once; the bake time follows.

    Raises:
        UserError: the rollout is over.
    """
    _check_active(state)
    last = len(parse_stages(state.settings.stages)) - 1
    return advance(replace(state, stage=last, phase=Phase.RUNNING), now_s=now_s)


def pause(state: RolloutState, *, reason: str) -> RolloutState:
    """Keep the traffic as it is until `resume`; failing gates still roll back.

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
    """Continue: a paused stage starts again, with its counts; a stage that waits for a person ends.

    Raises:
        UserError: the rollout does not wait.
    """
    if state.phase is Phase.PAUSED:
        return replace(state, phase=Phase.RUNNING, began_s=now_s, reason="")
    if state.phase is Phase.RUNNING and state.current.waits:
        return advance(state, now_s=now_s)
    raise UserError(
        "Only a rollout that waits can be resumed",
        got=Plain(f"version {state.candidate}, {state.phase}, {state.current}"),
        fix="`stoker rollout promote` goes to the next stage.",
    )


def roll_back(
    state: RolloutState, *, reason: str, now_s: float, to: int | None = None
) -> RolloutState:
    """Take all traffic off the candidate, also after 100 %.

    Args:
        state: current one of the model.
        reason: shown, and kept in the history.
        now_s: seconds since the epoch.
        to: the version that takes the traffic; None: the baseline.

    Raises:
        UserError: the candidate takes no traffic, or is under rollout and the version to go back to.
    """
    target = state.baseline if to is None else to
    if state.phase is Phase.ROLLED_BACK and target == state.baseline:
        raise UserError(
            "A rollout can be rolled back once",
            got=Plain(f"version {state.candidate} takes no traffic: {state.reason}"),
            fix=f"Name another version: `stoker rollout rollback --to VERSION` (now {state.baseline}).",
        )
    takes_all = state.phase is Phase.BAKING or state.phase not in ACTIVE
    if target == state.stable and takes_all:
        raise UserError(
            "The version to go back to takes all traffic already",
            got=Plain(f"version {target}"),
            fix="See `stoker rollout history`.",
        )
    if target == state.candidate and state.is_active and not state.is_test:
        raise UserError(
            "A rollout must go back to a version other than its candidate",
            got=Plain(f"version {target}"),
            fix="`stoker rollout promote --full` gives all traffic to the candidate.",
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
