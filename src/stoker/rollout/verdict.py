"""The verdict on a candidate (pass, fail, inconclusive) with its evidence, for other controllers and for users."""

from __future__ import annotations

from typing import Any

from stoker.rollout.counts.counts import requests_of
from stoker.rollout.gates.gates import Verdict
from stoker.rollout.operations import Rollout
from stoker.rollout.state.state import Phase, RolloutState


def verdict_of(found: Rollout, *, version: int | None = None) -> tuple[Verdict, str]:
    """Return whether a version is good enough for more traffic, and the reason.

    Args:
        found: The rollout's current state.
        version: The version to judge; None: the candidate.

    Returns:
        The verdict and its reason.
    """
    state = found.state
    if state.is_test:
        return Verdict.INCONCLUSIVE, "an A/B test is under way, which no gate judges"
    if version is not None and version != state.candidate:
        return _of_other(state, version)
    if state.phase is Phase.ROLLED_BACK:
        return Verdict.FAIL, f"rolled back: {state.reason}"
    if state.phase is Phase.COMPLETED:
        return Verdict.PASS, "it takes all traffic"
    judged = [each for each in found.gates if each.gate not in state.settings.dry_run]
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        if clauses := [f"{each.gate}: {each.detail}" for each in judged if each.verdict is verdict]:
            return verdict, "; ".join(clauses)
    return _by_phase(found)


def _of_other(state: RolloutState, version: int) -> tuple[Verdict, str]:
    if version in state.rejected:
        return Verdict.FAIL, "it was rolled back"
    if version == state.stable:
        return Verdict.PASS, "it takes the traffic"
    return Verdict.INCONCLUSIVE, f"version {state.candidate} is under rollout, not {version}"


def _by_phase(found: Rollout) -> tuple[Verdict, str]:
    state = found.state
    if state.phase is Phase.MEASURING:
        return Verdict.INCONCLUSIVE, "the baseline is measured"
    if state.phase is Phase.PAUSED:
        return Verdict.INCONCLUSIVE, f"paused: {state.reason}"
    requests, least = candidate_requests(found), state.settings.min_requests
    if state.phase is Phase.RUNNING and requests < least:
        return Verdict.INCONCLUSIVE, f"{requests} of {least} requests of the candidate"
    return Verdict.PASS, "all gates pass"


def candidate_requests(found: Rollout) -> int:
    """Return the number of the candidate's answers in this stage."""
    return requests_of(found.counts, stage=found.state.stage, version=found.state.candidate)


def evidence(model: str, found: Rollout, *, version: int | None = None) -> dict[str, Any]:
    """Return the verdict and its evidence as a JSON object.

    Args:
        model: Name of the model.
        found: The rollout's current state.
        version: The version to judge; None: the candidate.
    """
    state = found.state
    verdict, reason = verdict_of(found, version=version)
    return {
        "verdict": verdict,
        "reason": reason,
        "model": model,
        "version": state.candidate if version is None else version,
        **summary(found),
    }


def summary(found: Rollout) -> dict[str, Any]:
    """Return the current state of a rollout as a JSON object."""
    state = found.state
    return {
        "baseline": state.baseline,
        "candidate": state.candidate,
        "phase": state.phase,
        "stage": "" if state.is_test else str(state.current),
        "share": state.share,
        "requests": candidate_requests(found),
        "min_requests": state.settings.min_requests,
        "bad_answers_needed": found.bad_answers_needed(),
        "gates": [
            {**each.to_json(), "dry_run": each.gate in state.settings.dry_run}
            for each in found.gates
        ],
    }
