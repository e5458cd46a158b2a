"""Versions that the workers of one server must not run, whatever the state says.

The process that starts the workers writes this file when a version has killed a worker, before it changes the state:
the state's disk may be full or read-only, and the same version must not kill the next worker.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from stoker.core.files import write_json

_FILE = "rollout-vetoes.json"


class Vetoes:
    """The vetoes in one folder."""

    def __init__(self, folder: Path | None) -> None:
        """Args: folder: Folder that the workers share; None: vetoes are not used."""
        self._path = None if folder is None else folder / _FILE

    def reasons(self) -> dict[tuple[str, int], str]:
        """Return (folder of a model's versions, number of a rollout) -> why its candidate must not run."""
        if self._path is None:
            return {}
        with contextlib.suppress(FileNotFoundError):
            return {
                (base, rollout): why for base, rollout, why in json.loads(self._path.read_bytes())
            }
        return {}

    def add(self, base: Path, rollout: int, *, why: str) -> None:
        """Keep a rollout's candidate from this server's traffic, until an operator starts another rollout of it."""
        if self._path is not None:
            reasons = {**self.reasons(), (str(base), rollout): why}
            write_json(self._path, [[*key, reason] for key, reason in reasons.items()])
