"""Writes checkpoints in the background: training waits only for the handover."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from stoker.core.errors import DataError, Plain, UserError
from stoker.core.files import full_disk_is_named, remove, sweep
from stoker.core.incarnation import require_newest
from stoker.train.checkpoints.cadence import Cadence
from stoker.train.checkpoints.identity import Identity
from stoker.train.checkpoints.store import (
    Best,
    CheckpointContent,
    VerifiedCheckpoint,
    places,
    read_manifest,
    write_checkpoint,
)
from stoker.train.checkpoints.tensors import Arrays
from stoker.train.config import CheckpointConfig

_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """The facts about a checkpoint that decide whether it is deleted."""

    name: str
    """Its folder's name."""

    step: int
    """Steps that were done when it was written."""

    elapsed_s: float
    """Training time of the run until this checkpoint, over all its processes, seconds. It is not taken
    from the time of day, which can jump."""


def superseded(
    older: Sequence[CheckpointInfo],
    newest: CheckpointInfo,
    *,
    best: str | None,
    keep_last: int,
    every_h: float | None,
) -> list[str]:
    """Return the names of the checkpoints to delete.

    Args:
        older: The good checkpoints before the newest one, oldest first.
        newest: The checkpoint that was just published; it is kept.
        best: Name of the checkpoint with the best monitored value; it is kept.
        keep_last: How many of the newest checkpoints are kept, including `newest`.
        every_h: Also keep the first checkpoint of each interval of this many hours of training; None:
            keep no such checkpoints.
    """
    others = [kept for kept in older if kept.step != newest.step]
    stay = {kept.name for kept in [*others, newest][-keep_last:]} | {best}
    if every_h is not None:
        stay |= _first_of_each([*others, newest], every_h * _HOUR_S)
    return [kept.name for kept in older if kept.name not in stay]


def _first_of_each(checkpoints: Sequence[CheckpointInfo], interval_s: float) -> set[str]:
    first: dict[int, str] = {}
    for kept in checkpoints:
        first.setdefault(int(kept.elapsed_s // interval_s), kept.name)
    # Keep none of the first interval: there is no reason to return to the start of the run.
    first.pop(0, None)
    return set(first.values())


_LOG = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes a run's checkpoints in a background thread, and deletes old ones.

    An error in the thread is raised by the next call of a method. Use the writer as a context manager,
    which waits for the last checkpoint at the end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: CheckpointConfig,
        identity: Identity,
        better: Literal["min", "max"],
        after: VerifiedCheckpoint | None,
    ) -> None:
        """Create the folder, and check that it is writable.

        Args:
            folder: Folder of the checkpoints; no other process may write to it.
            config: How often checkpoints are written, and which are kept.
            identity: Identity of the run; stored in each checkpoint.
            better: Whether the monitored value is minimized or maximized.
            after: The checkpoint from which the run resumes; None for a new run.

        Raises:
            UserError: The folder is not writable.
        """
        self.folder = folder
        self._config = config
        self._identity = identity
        self._better = better
        self._best = after.manifest.best if after else None
        self._trained_s = after.manifest.elapsed_s if after else 0.0
        self._begun_s = time.monotonic()
        self._cadence = Cadence(config)
        self._cadence.saved(after.step if after else 0)
        self._stalled_s = 0.0
        self._pending: Future[float] | None = None
        with _named(folder, need_bytes=0):
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder, "*")
            with tempfile.TemporaryFile(dir=folder):
                pass
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this many steps.

        If the interval is a time, no checkpoint is due while the last one is being written, because
        training would have to wait for it.
        """
        if self._pending is not None and self._pending.done():
            self.wait()
        by_clock = self._config.every_steps is None
        return not (by_clock and self._pending is not None) and self._cadence.due(step)

    def trained(self, steps: int, wall_s: float) -> None:
        """Record the time of a call of steps, for the cadence; leave out the first call of a process."""
        # `due` has already recorded the cost of checkpoints that were complete when the call started.
        self._cadence.trained(steps, wall_s, while_writing=self._pending is not None)

    def save(
        self,
        arrays: Arrays,
        facts: Mapping[str, Any],
        *,
        step: int,
        monitored: float | None = None,
        copied_s: float = 0.0,
    ) -> None:
        """Hand a checkpoint over to the thread; wait only if the last one is still being written.

        Args:
            arrays: Copies of the variables, which must not change any more.
            facts: The rest of the run's state, JSON values; copied before this method returns.
            step: Number of steps done.
            monitored: The value that selects the best checkpoint; None, NaN and infinity are never best.
            copied_s: Time of the copy to the host, during which training stood still, seconds.

        Raises:
            UserError: The previous checkpoint could not be written.
        """
        begun_s = time.monotonic()
        self.wait()
        content = CheckpointContent(
            arrays=arrays,
            facts_text=json.dumps(dict(facts), indent=1, sort_keys=True) + "\n",
            step=step,
            identity=self._identity,
            best=self._best_with(monitored),
            elapsed_s=self._trained_s + time.monotonic() - self._begun_s,
        )
        self._pending = self._thread.submit(self._write, content)
        self._cadence.saved(step)
        self._stalled_s = copied_s + time.monotonic() - begun_s

    def wait(self) -> None:
        """Wait until the pending checkpoint is on disk.

        Raises:
            UserError: The checkpoint could not be written; older ones are intact.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._cadence.cost(stalled_s=self._stalled_s, cpu_s=pending.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self.wait()
            return
        try:
            self.wait()
        except UserError as second:
            # Do not raise the writer's error: the error that ended training is more important.
            _LOG.error("%s", second.line())

    def _best_with(self, monitored: float | None) -> float | Best | None:
        if monitored is None or not math.isfinite(monitored):
            return self._best
        sign = 1.0 if self._better == "max" else -1.0
        beaten = self._best is None or sign * monitored > sign * self._best.value
        return float(monitored) if beaten else self._best

    def _write(self, content: CheckpointContent) -> float:
        begun_s = time.thread_time()
        need_bytes = sum(array.nbytes for array in content.arrays.values())
        with _named(self.folder, need_bytes=need_bytes):
            found = write_checkpoint(self.folder, content)
            self._best = found.manifest.best
            self._retain(found)
        return time.thread_time() - begun_s

    def _retain(self, newest: VerifiedCheckpoint) -> None:
        known = places(self.folder)
        place = known.index(newest.path)
        older: list[CheckpointInfo] = []
        # Do not count later checkpoints: they are damaged, or were written before a rollback.
        gone = known[place + 1 :]
        for path in known[:place]:
            try:
                older.append(_kept(path))
            except DataError:
                gone.append(path)
        names = superseded(
            older,
            _kept(newest.path),
            best=self._best.name if self._best else None,
            keep_last=self._config.keep_last,
            every_h=self._config.keep_every_h,
        )
        for path in [*gone, *(self.folder / name for name in names)]:
            _discard(path)


def _kept(path: Path) -> CheckpointInfo:
    manifest = read_manifest(path)
    return CheckpointInfo(name=path.name, step=manifest.step, elapsed_s=manifest.elapsed_s)


def _discard(path: Path) -> None:
    # Rename it before it is deleted: a checkpoint that is deleted only in part would look damaged.
    hidden = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    require_newest()
    os.rename(path, hidden)
    remove(hidden)


@contextlib.contextmanager
def _named(folder: Path, *, need_bytes: int) -> Iterator[None]:
    try:
        with full_disk_is_named(folder, need_bytes=lambda: need_bytes):
            yield
    except OSError as error:
        raise UserError(
            f"a checkpoint could not be written to {folder}",
            got=Plain(error.strerror or str(error)),
            fix="Older checkpoints are intact. Check the disk, or write to another one with "
            "--set runs=DIR.",
        ) from error
