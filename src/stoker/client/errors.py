"""Why a call brought no answer.

CallError            UserError: one line, exit 2
|- NoAnswerError     nobody listens, the name is unknown, the time ran out, the connection broke
|- RefusedError      the server answered, and said no: its status and its own words
"""

from __future__ import annotations

from stoker.core.errors import Plain, UserError


class CallError(UserError):
    """A call that brought no answer."""


class NoAnswerError(CallError):
    """The server could not be asked, or did not answer in time."""


class RefusedError(CallError):
    """The server said no."""

    def __init__(self, rule: str, *, status: str, said: str, fix: str = "") -> None:
        """Build the one line.

        Args:
            rule: What was expected.
            status: "404" over REST, "NOT_FOUND" over gRPC.
            said: The server's own words.
            fix: The next action.
        """
        self.status = status
        self.said = said
        got = f"{status}: {said.rstrip('.')}" if said else status
        super().__init__(rule, got=Plain(got), fix=fix)


def refused_fix(status: str) -> str:
    """What can be done about a status, where that is the same for every server."""
    return _FIXES.get(status, "")


_FIXES = {
    "401": "Give a token: set STOKER_TOKEN.",
    "403": "Give a token that may do this: set STOKER_TOKEN.",
    "404": "Name a model and a version that this server has.",
    "413": "Send fewer rows at once.",
    "429": "Send less at once, or again later.",
    "503": "Ask again later.",
    "504": "Give it longer, or send fewer rows at once.",
    "UNAUTHENTICATED": "Give a token: set STOKER_TOKEN.",
    "PERMISSION_DENIED": "Give a token that may do this: set STOKER_TOKEN.",
    "NOT_FOUND": "Name a model and a version that this server has.",
    "RESOURCE_EXHAUSTED": "Send less at once, or again later.",
}
