"""Calls of web services before a rollout continues.

A call is made at least once: a controller that dies after the call and before it has noted the answer leaves the call
to the next one. So every call has an `id`, which is the same each time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stoker.rollout.gates.gates import GateResult, Verdict
from stoker.rollout.http_call import NoAnswerError, send
from stoker.rollout.state.state import Phase, RolloutState
from stoker.rollout.state.webhook import Moment

TIMEOUT_S = 10.0
"""Longest duration of a call, seconds."""


def moment_of(following: RolloutState) -> Moment | None:
    """The moment of a change; None: no webhook is called."""
    if following.phase is Phase.ROLLED_BACK:
        return Moment.ROLLBACK
    if following.phase is Phase.COMPLETED:
        return Moment.END
    if following.phase is Phase.RUNNING:
        return Moment.PROMOTION if following.share == 1.0 else Moment.STAGE
    return None


def payload(
    model: str, moment: Moment, following: RolloutState, *, identity: str, why: str
) -> dict[str, Any]:
    """Return the JSON object that a webhook receives.

    Args:
        model: the model.
        moment: when it is called.
        following: the state after the change.
        identity: unique to this change within the rollout.
        why: the reason of the change.
    """
    return {
        "id": f"{model}/{following.rollout}/{identity}/{moment}",
        "event": moment,
        "model": model,
        "baseline": following.baseline,
        "candidate": following.candidate,
        "phase": following.phase,
        "stage": str(following.current),
        "share": following.share,
        "why": why,
    }


def call_webhook(name: str, url: str, content: Mapping[str, Any]) -> GateResult:
    """Call a webhook: a 2xx passes; any other status, and no answer, is inconclusive.

    Args:
        name: of the webhook, for messages.
        url: of the webhook.
        content: see `payload`.
    """
    try:
        answer = send(url, body=json.dumps(content).encode(), timeout_s=TIMEOUT_S)
    except NoAnswerError as error:
        return GateResult.no_answer(name, str(error))
    verdict = Verdict.PASS if answer.is_success else Verdict.INCONCLUSIVE
    return GateResult(gate=name, verdict=verdict, detail=f"status {answer.status}")
