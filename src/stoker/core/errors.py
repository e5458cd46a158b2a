"""The one shape of an error that is the user's to mend.

UserError              exit 2, HTTP 400: rule; what was received; the next action
|- ConfigError         stoker.yaml, --set, the user's module
|- DataError           the user's data: names file, row and column
|- BusyError           something else holds what is needed
CheckFailed            exit 3: a gate or a check said no
Preempted              exit 75: the process was asked to end, and has saved what it had
Every other exception is our bug: exit 1, with its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_CHECK = 3
EXIT_PREEMPTED = 75


class _Unset:
    """Marks an argument that was not given, where None is a value one may receive."""


_UNSET = _Unset()


class UserError(Exception):
    """Something that the user can mend, said in one line."""

    exit_code = EXIT_USER

    def __init__(self, rule: str, *, got: object = _UNSET, fix: str = "") -> None:
        """Build the one line.

        Args:
            rule: What was expected, a clause without the final full stop.
            got: What came instead; printed as its `repr`, strings in quotes.
            fix: The next action, a whole sentence.
        """
        self.rule = rule.rstrip(".")
        self.got = got
        self.fix = fix
        super().__init__(self.line())

    def line(self) -> str:
        """The error as one line, whatever the parts hold."""
        parts = [self.rule + "."]
        if not isinstance(self.got, _Unset):
            shown = _shown(self.got)
            # What was received may be a whole sentence: another error's line.
            parts.append(f"Received: {shown}" + ("" if shown.endswith(".") else "."))
        if self.fix:
            parts.append(self.fix)
        line = " ".join(" ".join(parts).split())
        return "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in line
        )


class ConfigError(UserError):
    """A setting, or the user's module, is not what it must be."""


class DataError(UserError):
    """The data is not what it must be; the rule names file, row and column."""


class BusyError(UserError):
    """Another process holds what this one needs; the rule names it."""


class CheckFailed(UserError):
    """A gate or a check said no: nothing is broken, but nothing goes on."""

    exit_code = EXIT_CHECK


class Preempted(UserError):
    """Asked to end (SIGTERM, Slurm's SIGUSR1): what was done is saved, and can be gone on from."""

    exit_code = EXIT_PREEMPTED


_SHOWN_CHARS = 200
"""Longest text of a received value that a line of error shows."""


def _shown(value: object) -> str:
    text = value if isinstance(value, Plain) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


class Plain(str):
    """A received value that is a sentence already and is printed without quotes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    kind: str
    """Its name for programs: `retraces`, `xla_unused`."""

    severity: Literal["error", "warning"]
    """An error ends a run, or fails a check; a warning is said loudly."""

    message: str
    """What was seen, a clause with names and figures."""

    fix: str
    """The next action, a whole sentence."""

    def line(self) -> str:
        """The finding as one line for the log."""
        return f"{self.message}. {self.fix}"

    def as_error(self) -> CheckFailed:
        """The finding as the error that ends the run."""
        return CheckFailed(self.message, fix=self.fix)
