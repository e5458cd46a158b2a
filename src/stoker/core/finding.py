"""What a check has to say, of a run, a script or a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker.core.errors import CheckFailed


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
