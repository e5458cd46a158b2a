"""Counts of a server that cannot write to its repository: kept in its workers' folder, and served over HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.core.errors import UserError
from stoker.rollout.counts.counted_keys import StageKeys
from stoker.rollout.counts.counts import Counts, counts_folder, write_counts


class Spool:
    """Writes the counts of one model in one server; all workers and their parent process use it."""

    def __init__(self, workers: Path | None, rollouts: Path) -> None:
        """Open the spool.

        Args:
            workers: Folder that the workers share; None: counts are not kept.
            rollouts: Folder of the model's rollout state.
        """
        self._rollouts = rollouts
        name = hashlib.sha256(str(rollouts).encode()).hexdigest()
        self._folder = None if workers is None else workers / "rollout-counts" / name

    def write(
        self, counts: Counts, failed: Mapping[int, str], *, rollout: int, server: str
    ) -> None:
        """Write counts next to the state; if that fails, write them to the workers' folder.

        Raises:
            UserError, OSError: the counts cannot be written to either folder.
        """
        try:
            write_counts(self._rollouts, counts, failed, rollout=rollout, server=server)
        except (UserError, OSError):
            if self._folder is not None:
                with contextlib.suppress(UserError, OSError):
                    write_counts(self._folder, counts, failed, rollout=rollout, server=server)
            raise

    def keys(self, stage: str) -> StageKeys:
        """Return the keys that all processes of this server have counted in a stage."""
        return StageKeys(None if self._folder is None else self._folder / "keys" / stage)

    def read(self, rollout: int) -> dict[str, Any]:
        """Return process -> content of its file, for the counts in the workers' folder."""
        found = {}
        if self._folder is not None:
            for path in counts_folder(self._folder, rollout).glob("*.json"):
                with contextlib.suppress(OSError, ValueError):
                    found[path.stem] = json.loads(path.read_bytes())
        return found
