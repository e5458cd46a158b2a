"""Reports what a rollout did: sends messages in Slack's format, and calls webhooks after a rollback.

Each file of the state is one change; `announced.json` holds the number of the last change that was reported. The
current controller reports each change at least once, including changes by operators. The rollout does not wait for
the reports.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from stoker.core.errors import UserError
from stoker.core.files import write_json
from stoker.rollout.control.webhooks import TIMEOUT_S, moment_of, payload
from stoker.rollout.http_call import NoAnswerError, send
from stoker.rollout.state.files import StateFiles, Stored
from stoker.rollout.state.state import RolloutState, state_of
from stoker.rollout.state.webhook import Moment

_log = logging.getLogger(__name__)

LEASE = "controller"
"""Event when a controller replaces another one; it is not reported."""

PAUSES_S = (1.0, 5.0)
"""Pauses between attempts to send a message, seconds; after the last attempt, the message is dropped."""

_FILE = "announced.json"


class Announcer:
    """Reports the changes of one model's rollouts, in a thread."""

    def __init__(self, model: str, folder: Path) -> None:
        """Args: model: Name of the model, for the messages; folder: Folder of the rollout's state."""
        self._model, self._folder = model, folder
        self._thread: threading.Thread | None = None
        self._number = 0  # of the last change that this process reported, also on a full disk

    def has_news(self, stored: Stored, state: RolloutState) -> bool:
        """Whether a change has not been reported yet.

        Args:
            stored: The newest state.
            state: The parsed content of `stored`.
        """
        return bool(_listeners(state)) and self._announced() < stored.number

    def announce(self) -> None:
        """Start to report new changes, in a thread."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._announce_all, name="stoker-rollout-news", daemon=True
            )
            self._thread.start()

    def _announce_all(self) -> None:
        announced = self._announced()
        with contextlib.suppress(UserError, OSError):  # the controller reports this error
            for stored in StateFiles(self._folder).history():
                if stored.number > announced:
                    self._announce(stored)
                    self._number = stored.number
                    write_json(self._folder / _FILE, {"number": stored.number})

    def _announce(self, stored: Stored) -> None:
        event, state = stored.content["event"], state_of(stored.content["state"])
        if event["what"] == LEASE:
            return
        for url in state.settings.notify:
            self._send(url, {"text": _text(self._model, stored.number, event, state)})
        if moment_of(state) is Moment.ROLLBACK:
            content = payload(
                self._model,
                Moment.ROLLBACK,
                state,
                identity=str(stored.number),
                why=str(event["why"]),
            )
            for url in _after_rollback(state):
                self._send(url, content)

    def _send(self, url: str, content: dict[str, Any]) -> None:
        why = ""
        for pause_s in (0.0, *PAUSES_S):
            time.sleep(pause_s)  # the receiver may answer later
            try:
                answer = send(url, body=json.dumps(content).encode(), timeout_s=TIMEOUT_S)
            except NoAnswerError as error:
                why = str(error)
                continue
            if answer.is_success:
                return
            why = f"status {answer.status}"
        _log.error("rollout of %s: a message was dropped: %s", self._model, why)

    def _announced(self) -> int:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            written = int(json.loads((self._folder / _FILE).read_bytes())["number"])
            return max(written, self._number)
        return self._number


def _after_rollback(state: RolloutState) -> list[str]:
    return [each.url for each in state.settings.webhooks if Moment.ROLLBACK in each.at]


def _listeners(state: RolloutState) -> list[str]:
    return [*state.settings.notify, *_after_rollback(state)]


def _text(model: str, number: int, event: dict[str, Any], state: RolloutState) -> str:
    why = f": {event['why']}" if event["why"] else ""
    text = (
        f"Rollout of {model}, version {state.candidate}: {event['what']} by {event['who']}{why}. "
        f"Now {state.phase}, {state.share * 100:g} % of the traffic. [{model}/{state.rollout}/{number}]"
    )
    # These three are control characters. Source: Slack, "Formatting text for app surfaces".
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
