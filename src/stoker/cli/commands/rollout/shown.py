"""Formats a rollout as text and as JSON."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import typer

from stoker.cli.commands.rollout.ab import summary as ab_summary

if TYPE_CHECKING:
    from stoker.rollout.operations import Rollout
    from stoker.rollout.state.state import RolloutState


def show(state: RolloutState, *, as_json: bool) -> None:
    """Print a state."""
    typer.echo(json.dumps(state.to_json(), indent=2) if as_json else summary(state))


def summary(state: RolloutState) -> str:
    """Return one line with the version, its phase and its traffic."""
    if state.is_test:
        return ab_summary(state)
    return (
        f"version {state.candidate} {state.phase}, {state.share * 100:g} % of the traffic; "
        f"baseline version {state.baseline}"
    )


def status_of(found: Rollout) -> dict[str, Any]:
    """Return a rollout as a JSON object."""
    return {
        **found.state.to_json(),
        "share": found.state.share,
        "stage_name": "" if found.state.is_test else str(found.state.current),
        "bad_answers_needed": found.bad_answers_needed(),
        "gates": [each.to_json() for each in found.gates],
        "requests": {
            str(stage): {str(version): counts.requests for version, counts in versions.items()}
            for stage, versions in sorted(found.counts.items())
        },
        "shadow": {
            str(stage): figures.to_json() for stage, figures in found.shadow_stages().items()
        },
    }


def lines_of(found: Rollout) -> list[str]:
    """Return a rollout as text: its stage, its counts, and each gate's verdict."""
    state = found.state
    if state.is_test:
        return [summary(state), "see `stoker rollout result`"]
    stage = found.counts.get(state.stage, {})
    lines = [summary(state), _stage_line(found)]
    if state.reason:
        lines.append(f"reason: {state.reason}")
    lines += [
        f"  version {version}: {counts.requests} requests, {counts.bad} bad"
        for version, counts in sorted(stage.items())
    ]
    lines += _smallest_fault(found)
    lines += [f"  shadow: {figures}" for figures in found.shadow_stages().values()]
    return lines + [f"  {each.gate}: {each.verdict}; {each.detail}" for each in found.gates]


def _stage_line(found: Rollout) -> str:
    """Return a line about the current stage, or about the stage in which the rollout ended."""
    from stoker.rollout.control.controller import MEASURED_REQUESTS
    from stoker.rollout.counts.counts import MEASURED, requests_of
    from stoker.rollout.state.state import Phase

    state = found.state
    stage = f"stage {state.stage + 1}: {state.current}"
    if state.phase is Phase.MEASURING:
        seen = requests_of(found.counts, stage=MEASURED, version=state.baseline)
        return f"{stage}, after {MEASURED_REQUESTS:,} requests of version {state.baseline}; {seen:,} so far"
    since_s = time.time() - state.began_s
    return (
        f"{stage}, for {since_s:.0f} s"
        if state.is_active
        else f"ended {since_s:.0f} s ago in {stage}"
    )


def _smallest_fault(found: Rollout) -> list[str]:
    """Return a line about the detection of bad answers; no line if nothing is known.

    The line has the smallest share of bad answers that would have been detected so far, and the time until a rollback
    if 10 % of the answers are bad.
    """
    state, more = found.state, found.bad_answers_needed()
    counts = found.counts.get(state.stage, {}).get(state.candidate)
    took_s = time.time() - state.began_s
    if more is None or counts is None or not counts.requests or took_s <= 0:
        return []
    smallest = (counts.bad + more) / counts.requests
    so_far = (
        f"a fault of {smallest:.2%} would have been seen"
        if smallest < 1
        else "no fault would have been seen yet"
    )
    soon_s = more / (0.1 * counts.requests / took_s)
    return [
        f"  {so_far}; {more} more bad answers roll back, after about {soon_s:.0f} s if 10 % are bad"
    ]
