"""Calls the user's web services before a rollout continues.

Each call is made at least once: if a controller dies before it has stored the answer, the next controller repeats the
call. A repeated call has the same `id`.
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
"""Maximum duration of a call, seconds."""


def moment_of(following: RolloutState) -> Moment | None:
    """Return the moment at which a change calls webhooks; None: the change calls no webhook."""
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
        model: Name of the model.
        moment: The moment of the change.
        following: The state after the change.
        identity: A string that is unique to this change within the rollout.
        why: Reason of the change.
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
    """Call a webhook: status 2xx passes; another status or no answer is inconclusive.

    Args:
        name: Name of the webhook, for messages.
        url: URL of the webhook.
        content: The JSON object to send; see `payload`.
    """
    try:
        answer = send(url, body=json.dumps(content).encode(), timeout_s=TIMEOUT_S)
    except NoAnswerError as error:
        return GateResult.no_answer(name, str(error))
    verdict = Verdict.PASS if answer.is_success else Verdict.INCONCLUSIVE
    return GateResult(gate=name, verdict=verdict, detail=f"status {answer.status}")
