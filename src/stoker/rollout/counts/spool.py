"""Counts of a server whose repository is read-only or full: kept in its workers' folder, and returned over HTTP."""

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
    """The counts of one model in one server; all workers and their parent process write there."""

    def __init__(self, workers: Path | None, rollouts: Path) -> None:
        """Open the spool.

        Args:
            workers: folder that the workers share; None: counts are not kept.
            rollouts: folder of the model's rollout.
        """
        self._rollouts = rollouts
        name = hashlib.sha256(str(rollouts).encode()).hexdigest()
        self._folder = None if workers is None else workers / "rollout-counts" / name

    def write(
        self, counts: Counts, failed: Mapping[int, str], *, rollout: int, server: str
    ) -> None:
        """Write counts next to the state; if that is not possible, keep them here.

        Raises:
            UserError, OSError: the counts can be written neither there nor here.
        """
        try:
            write_counts(self._rollouts, counts, failed, rollout=rollout, server=server)
        except (UserError, OSError):
            if self._folder is not None:
                with contextlib.suppress(UserError, OSError):
                    write_counts(self._folder, counts, failed, rollout=rollout, server=server)
            raise

    def keys(self, stage: str) -> StageKeys:
        """The keys that have counted in a stage in all processes of this server."""
        return StageKeys(None if self._folder is None else self._folder / "keys" / stage)

    def read(self, rollout: int) -> dict[str, Any]:
        """Process -> the content of its file, for the counts that are kept here."""
        found = {}
        if self._folder is not None:
            for path in counts_folder(self._folder, rollout).glob("*.json"):
                with contextlib.suppress(OSError, ValueError):
                    found[path.stem] = json.loads(path.read_bytes())
        return found
