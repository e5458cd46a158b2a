"""Errors that the user can fix, in one shape, findings of checks, and suggestions of known names.

UserError              exit 2, HTTP 400: the rule; what was received; the next action
|- ConfigError         stoker.yaml, --set, the user's module
|- DataError           the user's data; the rule names file, row and column
|- BusyError           another process uses what is needed
CheckFailed            exit 3: a gate or a check failed
Preempted              exit 75: the process got a signal to end, and has saved its state
Superseded             exit 76: a later start of the same job has begun
KeyboardInterrupt      exit 130: Ctrl-C
Every other exception is a bug of Stoker: exit 1, with its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_CHECK = 3
EXIT_PREEMPTED = 75
EXIT_SUPERSEDED = 76
EXIT_INTERRUPTED = 130


class _Unset:
    """Marks an argument that was not given: None cannot mark it, because None can be a received value."""


_UNSET = _Unset()


class UserError(Exception):
    """A problem that the user can fix, in one line."""

    exit_code = EXIT_USER

    def __init__(self, rule: str, *, got: object = _UNSET, fix: str = "") -> None:
        """Build the line.

        Args:
            rule: What was expected, a clause without a final period.
            got: What was received; printed as its `repr`, strings in quotes.
            fix: The next action, a whole sentence.
        """
        self.rule = rule.rstrip(".")
        self.got = got
        self.fix = fix
        super().__init__(self.line())

    def line(self) -> str:
        """Return the error as one line; line breaks in its parts are replaced."""
        parts = [self.rule + "."]
        if not isinstance(self.got, _Unset):
            shown = _shown(self.got)
            # The received value may already end with a period: it can be the line of another error.
            parts.append(f"Received: {shown}" + ("" if shown.endswith(".") else "."))
        if self.fix:
            parts.append(self.fix)
        line = " ".join(" ".join(parts).split())
        return "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in line
        )


class ConfigError(UserError):
    """A setting or the user's module is invalid."""


class DataError(UserError):
    """The data is invalid; the rule names file, row and column."""


class BusyError(UserError):
    """Another process uses what this one needs; the rule names it."""


class CheckFailed(UserError):
    """A gate or a check failed: nothing is broken, but the run stops."""

    exit_code = EXIT_CHECK


class Preempted(UserError):
    """The process got a signal to end (SIGTERM, Slurm's SIGUSR1); its state is saved for the next process."""

    exit_code = EXIT_PREEMPTED


class Superseded(UserError):
    """A later start of the same job has begun: this process must not write, and must not be started again."""

    exit_code = EXIT_SUPERSEDED


_SHOWN_CHARS = 200
"""Maximum number of characters of a received value that an error shows."""


def _shown(value: object) -> str:
    text = value if isinstance(value, Plain) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


class Plain(str):
    """Text that is printed after `Received:` without quotes: a description, not the value itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One result of a check of a run, a script or a machine."""

    kind: str
    """Name of the kind of finding, for programs, e.g. `retraces` or `xla_unused`."""

    severity: Literal["error", "warning"]
    """An error ends the run or fails the check; a warning is logged."""

    message: str
    """What was found, a clause with names and numbers."""

    fix: str
    """The next action, a whole sentence."""

    @staticmethod
    def error(kind: str, message: str, fix: str) -> Finding:
        """Return a finding that ends the run or fails the check."""
        return Finding(kind=kind, severity="error", message=message, fix=fix)

    @staticmethod
    def warning(kind: str, message: str, fix: str) -> Finding:
        """Return a finding that is only logged."""
        return Finding(kind=kind, severity="warning", message=message, fix=fix)

    def line(self) -> str:
        """Return the finding as one line for the log."""
        return f"{self.message}. {self.fix}"

    def as_error(self) -> CheckFailed:
        """Return the finding as the error that ends the run."""
        return CheckFailed(self.message, fix=self.fix)


_ABBREVIATION = 3
"""Minimum length of a name's beginning that is accepted as an abbreviation: `acc` means `accuracy`, not `auc`."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what to do about an unknown name: use the most similar known name, or one of all known names."""
    names = sorted(known)
    longer = [each for each in names if len(name) >= _ABBREVIATION and each.startswith(name)]
    close = longer if len(longer) == 1 else difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "There are none."
