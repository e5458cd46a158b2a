"""One worker process of several: its identity, supervision and exit."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.serve.process.gpu_shares import GpuShare

_log = logging.getLogger(__name__)


def stuck_file(folder: Path, number: int, *, on_gpu: bool) -> Path:
    """What a worker writes when a call will not end: that another should take its place.

    Args:
        folder: Where the workers keep what they have in common.
        number: The worker.
        on_gpu: Whether its models are on a GPU, so that the other must wait for its memory.
    """
    return folder / f"{number}.{'stuck-on-gpu' if on_gpu else 'stuck'}"


class Worker:
    """A process that serves."""

    def __init__(
        self, command: Sequence[str], folder: Path, number: int, *, share: GpuShare
    ) -> None:
        """Start it.

        Args:
            command: `stoker serve` with its options.
            folder: Where the workers keep what they have in common.
            number: Its own; no other that lives has it.
            share: Its GPU, and its share of the memory.
        """
        self.number = number
        self.ready_file = folder / f"{number}.json"
        self._stuck_file = stuck_file(folder, number, on_gpu=False)
        self._stuck_on_gpu_file = stuck_file(folder, number, on_gpu=True)
        for left in (self.ready_file, self._stuck_file, self._stuck_on_gpu_file):
            left.unlink(missing_ok=True)
        own = ["--workers", "1", "--worker-folder", str(folder), "--worker", str(number)]
        own += ["--stop-with-stdin", "--ready-file", str(self.ready_file)]
        own += ["--per_process_gpu_memory_fraction", repr(share.fraction)]
        self._end_at_s: float | None = None
        # Its standard input ends with this process, however that dies, and the worker with it.
        self._process = subprocess.Popen(
            [*command, *own],
            env=os.environ | share.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    @property
    def is_ready(self) -> bool:
        """Whether its models can be called."""
        return self.ready_file.is_file()

    @property
    def is_stuck(self) -> bool:
        """Whether it said that a call of a model will not end."""
        return self._stuck_file.is_file() or self.is_stuck_on_gpu

    @property
    def is_stuck_on_gpu(self) -> bool:
        """Whether it said so, and holds memory of a GPU; TensorFlow knows that without NVML too."""
        return self._stuck_on_gpu_file.is_file()

    @property
    def is_overdue(self) -> bool:
        """Whether it was asked to end, and should have by now."""
        return self._end_at_s is not None and time.monotonic() > self._end_at_s

    @property
    def left_s(self) -> float:
        """What is left of the time in which it should end, 0 where it was not asked to."""
        return max(0.0, (self._end_at_s or 0.0) - time.monotonic())

    def ask_to_end(self, deadline_s: float) -> None:
        """SIGTERM: it drains and ends, in so many seconds."""
        if self._end_at_s is None and self.ended is None:
            self._end_at_s = time.monotonic() + deadline_s
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait for its end; kill it when that takes too long."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _log.error("worker %d did not end in time and is killed", self._process.pid)
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
