"""Profiles some steps if the settings or a file request it.

During a run, a file named `profile` in the folder of the stage `train` requests a profile. Unlike a signal,
a file needs no process ID, reaches a container or another host over a shared folder, can contain the number
of steps, and cannot kill a process that has no signal handler yet.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from stoker.core.incarnation import is_newest
from stoker.core.user_code import first_line
from stoker.train.config import profiled_steps

_LOG = logging.getLogger(__name__)

REQUEST = "profile"
"""Name of the file that requests a profile; the file may contain the number of steps."""

DEFAULT_STEPS = 20
"""Number of steps of a profile if the request contains no number: enough to see how steps vary."""

MAX_STEPS = 1_000
"""Maximum number of steps of a profile, because a trace is in memory until its end."""

POLL_EVERY_S = 1.0
"""Minimum interval between two checks for the file, seconds: a shared folder may take longer to answer than a
call of short steps."""


class StepProfiler:
    """Starts and stops TensorFlow's profiler between calls of the compiled step.

    TensorBoard's Profile tab (`pip install tensorboard-plugin-profile`) reads
    `plugins/profile/<time>/<host>.xplane.pb`. A failed profile does not end training.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: Path,
        steps: str | None,
        cuts: bool = True,
        before_start: Callable[[], None] | None = None,
    ) -> None:
        """Store the arguments and the request of the settings.

        Args:
            folder: Folder in which the file `profile` may appear.
            tensorboard: Folder for the profiles.
            steps: `START:STOP` from the settings; None: no profile.
            cuts: Whether calls are shortened so that a profile contains exactly the requested steps. Several
                workers must make the same calls, so their profiles contain whole calls.
            before_start: Called before the profiler starts; it ends Stoker's own trace.
        """
        self._cuts, self._before_start = cuts, before_start
        self._request = folder / REQUEST
        self._tensorboard = tensorboard
        self._wanted = profiled_steps(steps) if steps is not None else None
        self._first = 0
        self._last: int | None = None
        self._polled_s = -POLL_EVERY_S

    def next_steps(self, step: int, steps: int) -> int:
        """Start a profile if one is due in the next call.

        Args:
            step: Number of steps done.
            steps: Planned number of steps of the call.

        Returns:
            Number of steps that the call should have, at least one.
        """
        if self._last is None:
            self._poll_request(step)
        if self._wanted is not None:
            first, last = self._wanted
            if self._cuts and step < first - 1:
                return min(steps, first - 1 - step)
            if step + steps >= first:
                self._wanted = None
                if step < last:
                    self._start(step + 1, last)
        if self._cuts and self._last is not None:
            return min(steps, self._last - step)
        return steps

    def after(self, step: int) -> None:
        """Call this when a call has ended and its results are available; it stops a complete profile."""
        if self._last is not None and step >= self._last:
            self._stop(step)

    def close(self, step: int) -> None:
        """Call this when training ends after this many steps; it writes an incomplete profile."""
        if self._last is not None:
            self._stop(step)

    def _poll_request(self, step: int) -> None:
        now_s = time.monotonic()
        if now_s - self._polled_s < POLL_EVERY_S:
            return
        self._polled_s = now_s
        try:
            text = self._request.read_text(errors="replace").strip()
            self._request.unlink()
        except OSError:
            return
        count = int(text) if text.isdecimal() else DEFAULT_STEPS
        self._wanted = (step + 1, step + max(1, min(count, MAX_STEPS)))

    def _start(self, first: int, last: int) -> None:
        if self._before_start is not None:
            self._before_start()
        try:
            tf.profiler.experimental.start(str(self._tensorboard))
        except (tf.errors.OpError, OSError) as error:
            _LOG.warning("no profile of steps %d to %d: %s", first, last, first_line(error))
            return
        self._first, self._last = first, last

    def _stop(self, step: int) -> None:
        first, self._last = self._first, None
        before = set(self._traces())
        try:
            tf.profiler.experimental.stop(save=is_newest())
        except (tf.errors.OpError, OSError) as error:
            _LOG.warning("no profile of steps %d to %d: %s", first, step, first_line(error))
            return
        made = {path: size for path in set(self._traces()) - before if (size := _size(path))}
        if not made:
            _LOG.warning("no profile of steps %d to %d: it is empty", first, step)
        for path, size in made.items():
            _LOG.info("profile of steps %d to %d: %s, %s bytes", first, step, path, f"{size:,}")

    def _traces(self) -> list[Path]:
        return list(self._tensorboard.glob("plugins/profile/*/*.xplane.pb"))


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
