"""The user's gates, webhooks and messages: the controller's interface to services outside."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stoker.core.errors import UserError
from stoker.core.files import write_json
from stoker.rollout.control.announcer import Announcer
from stoker.rollout.control.webhooks import call_webhook, moment_of, payload
from stoker.rollout.gates.callback import call_in_process
from stoker.rollout.gates.gates import GateResult, Verdict, compared_with_limits
from stoker.rollout.gates.polling import Poll
from stoker.rollout.gates.prometheus import query_numbers
from stoker.rollout.http_call import NoAnswerError
from stoker.rollout.state.files import Stored
from stoker.rollout.state.state import RolloutState
from stoker.rollout.state.user_gates import UserGate, code_of

_FILE = "user-gates.json"

WEBHOOK_EVERY_S = 10.0
"""Interval between two calls of a webhook that does not let the rollout continue, seconds."""


class Hooks:
    """The gates, webhooks and messages of one model's rollouts. Calls run in threads: no method waits for them."""

    def __init__(
        self,
        model: str,
        folder: Path,
        *,
        gate_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create hooks that have no answers yet.

        Args:
            model: Name of the model.
            folder: Folder of the rollout's state.
            gate_folder: Folder with the modules of Python gates; None: this server calls no Python gates.
            clock: Returns monotonic time, seconds.
        """
        self._model, self._folder, self._gate_folder = model, folder, gate_folder
        self._clock = clock
        self._polls: dict[str, Poll] = {}
        self._gates: Sequence[GateResult] = ()
        self._webhooks: tuple[float, Sequence[GateResult]] = (0.0, ())
        self._written: object = None
        self._announcer = Announcer(model, folder)

    def gates(self, state: RolloutState) -> list[GateResult]:
        """Return the last answers of the user's gates in this stage."""
        results = []
        for gate in state.settings.user_gates:
            poll = self._poll(gate.name, gate.every_s)
            about = (state.rollout, state.began_s, gate)
            results.append(poll.look(about, lambda gate=gate: self._ask(gate, state)))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
        self._gates = results
        self._write(state)
        return results

    def before(self, state: RolloutState, following: RolloutState, *, why: str) -> list[GateResult]:
        """Return the answers of the webhooks that are called before a change.

        Args:
            state: The current state.
            following: The state after the change.
            why: Reason of the change.
        """
        moment = moment_of(following)
        results = []
        for number, hook in enumerate(state.settings.webhooks, 1):
            if moment is None or moment not in hook.at:
                continue
            name = f"webhook {number}"
            # Each controller computes the same identity, because the number of its lease is not part of it.
            identity = f"{following.stage}-{state.began_s:.3f}"
            content = payload(self._model, moment, following, identity=identity, why=why)
            poll = self._poll(name, WEBHOOK_EVERY_S)
            results.append(
                poll.look(
                    content["id"],
                    lambda name=name, url=hook.url, content=content: call_webhook(  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                        name, url, content
                    ),
                )
            )
        self._webhooks = state.began_s, results
        self._write(state)
        return results

    def has_news(self, stored: Stored, state: RolloutState) -> bool:
        """Whether a change has not been reported yet."""
        return self._announcer.has_news(stored, state)

    def announce(self) -> None:
        """Start to report new changes, in a thread."""
        self._announcer.announce()

    def _poll(self, name: str, every_s: float) -> Poll:
        if name not in self._polls:
            self._polls[name] = Poll(name, every_s=every_s, clock=self._clock)
        return self._polls[name]

    def _ask(self, gate: UserGate, state: RolloutState) -> GateResult:
        try:
            if gate.prometheus:
                found: Sequence[bool | float | None] = query_numbers(
                    gate.prometheus,
                    gate.question(**state.facts(self._model)),
                    timeout_s=gate.timeout_s,
                )
            else:
                found = [self._call(gate, state)]
        except NoAnswerError as error:
            return GateResult.no_answer(gate.name, str(error))
        return compared_with_limits(gate.name, found, least=gate.min, most=gate.max)

    def _call(self, gate: UserGate, state: RolloutState) -> bool | float | None:
        folder = self._gate_folder
        if folder is None:
            raise NoAnswerError("the server needs --gate-folder to call a Python gate")
        try:
            same = code_of(folder, gate.python) == gate.code
        except UserError as error:
            raise NoAnswerError(error.line()) from None
        if not same:
            raise NoAnswerError(f"{gate.python} is not what it was when the rollout began")
        about = {
            **state.facts(self._model),
            "rollout": state.rollout,
            "phase": str(state.phase),
            "stage": str(state.current),
            "share": state.share,
            "folder": str(self._folder.parent.resolve()),
        }
        return call_in_process(folder, gate.python, about, timeout_s=gate.timeout_s)

    def _write(self, state: RolloutState) -> None:
        began_s, webhooks = self._webhooks
        results = [*self._gates, *(webhooks if began_s == state.began_s else ())]
        content = {
            "rollout": state.rollout,
            "began_s": state.began_s,
            "gates": [each.to_json() for each in results],
        }
        if content["gates"] and content != self._written:
            # the file is needed only by `stoker rollout status`
            with contextlib.suppress(UserError, OSError):
                write_json(self._folder / _FILE, content)
                self._written = content


def read_user_results(folder: Path, state: RolloutState) -> list[GateResult]:
    """Return the last answers of the user's gates, and of the webhooks that the next change waits for.

    Args:
        folder: Folder of the rollout's state.
        state: State of the rollout.
    """
    found: dict[str, GateResult] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / _FILE).read_bytes())
        # Answers from an earlier stage do not apply to the current stage. After the end, the last stage's answers stay.
        same_stage = content["began_s"] == state.began_s or not state.is_active
        if content["rollout"] == state.rollout and same_stage:
            results = [
                replace(GateResult(**each), verdict=Verdict(each["verdict"]))
                for each in content["gates"]
            ]
            found = {each.gate: each for each in results}
    names = [gate.name for gate in state.settings.user_gates]
    gates = [found.pop(name, GateResult.no_answer(name)) for name in names]
    return [*gates, *(found.values() if state.is_active else ())]
