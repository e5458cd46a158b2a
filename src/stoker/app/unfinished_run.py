"""Finds an earlier run with unfinished training that the new run does not continue."""

from __future__ import annotations

from pathlib import Path

from stoker.app.runs.run_folder import Run, runs_newest_first, with_reads
from stoker.app.stages import STAGES
from stoker.app.training.folder import CHECKPOINTS
from stoker.core.errors import DataError
from stoker.train.checkpoints.identity import Identity, changes
from stoker.train.checkpoints.store import places, read_manifest

_TRAIN = next(stage for stage in STAGES if stage.name == "train")

_NAMED = 3
"""Maximum number of differences in the line."""


def left_behind(run: Run, identity: Identity, folder: Path) -> str | None:
    """Return a line about the newest earlier run, if its training is unfinished.

    Args:
        run: The new run.
        identity: Its identity.
        folder: The experiment folder.

    Returns:
        None if there is no such run.
    """
    for earlier in runs_newest_first(run.root.parent):
        if earlier.id == run.id:
            continue
        trained = earlier.record(_TRAIN.name) is not None
        steps = _steps(earlier)
        if trained or steps is not None:
            return None if trained or steps is None else _line(earlier, steps, identity, folder)
    return None


def _steps(run: Run) -> int | None:
    for path in reversed(places(run.root / _TRAIN.folder / CHECKPOINTS)):
        try:
            return read_manifest(path).step
        except DataError:
            continue
    return None


def _line(run: Run, steps: int, identity: Identity, folder: Path) -> str:
    try:
        found = changes(*with_reads(run, identity, folder))
    except DataError:
        return f"run {run.id} stands at step {steps}, its run.json is damaged"
    named = "; ".join(map(str, found[:_NAMED]))
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (
        f"run {run.id} stands at step {steps} of other inputs ({named}{more}): "
        f"--resume {run.id} --accept-change goes on from there"
    )
