"""A worker process: its start, its files and its end."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.cluster.processes import Child, ProcessOptions
from stoker.serve.process.gpu_shares import GpuShare
from stoker.serve.routing import VersionInUse
from stoker.serve.runtime.machine import server_gpus
from stoker.serve.runtime.versions_in_use import read_versions_in_use, versions_file

_log = logging.getLogger(__name__)


def stuck_file(folder: Path, number: int, *, on_gpu: bool) -> Path:
    """Return the path of the file by which a worker reports that a call will not end, so that it must be replaced.

    Args:
        folder: The folder that the workers share.
        number: Number of the worker.
        on_gpu: Whether its models are on a GPU, so that its replacement must wait for the memory.
    """
    return folder / f"{number}.{'stuck-on-gpu' if on_gpu else 'stuck'}"


class Worker:
    """A worker process."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        number: int,
        *,
        share: GpuShare,
        listeners: Sequence[int] = (),
    ) -> None:
        """Start the process.

        Args:
            command: `stoker serve` with its options.
            folder: The folder that the workers share.
            number: Number of the worker; no other running worker has the same number.
            share: The worker's GPU, and its share of the GPU's memory.
            listeners: File descriptors of the sockets of REST and gRPC that the worker inherits; empty: it binds the
                ports.
        """
        self.number = number
        self.ready_file = folder / f"{number}.json"
        self._versions_file = versions_file(folder, number)
        self._stuck_file = stuck_file(folder, number, on_gpu=False)
        self._stuck_on_gpu_file = stuck_file(folder, number, on_gpu=True)
        for old in (self._stuck_file, self._stuck_on_gpu_file, self._versions_file):
            old.unlink(missing_ok=True)
        own = ["--workers", "1", "--worker-folder", str(folder), "--worker", str(number)]
        own += ["--stop-with-stdin", "--ready-file", str(self.ready_file)]
        own += ["--per_process_gpu_memory_fraction", repr(share.fraction)]
        if listeners:
            own += ["--listeners", *map(str, listeners)]
        self._end_at_s: float | None = None
        # When this process ends for any reason, the worker's standard input closes; the worker then drains and ends.
        self.child = Child(
            f"worker {number}",
            [*command, *own],
            ProcessOptions(
                environ=os.environ | server_gpus(os.environ) | share.environment(),
                stdin=subprocess.PIPE,
                output=subprocess.DEVNULL,
                pass_fds=listeners,
                parent_death=None,
                ready_file=self.ready_file,
            ),
        )

    @property
    def ended(self) -> int | None:
        """The worker's exit code; None while it runs."""
        return self.child.code

    @property
    def is_stuck(self) -> bool:
        """Whether the worker reported that a model call will not end."""
        return self._stuck_file.is_file() or self.is_stuck_on_gpu

    @property
    def is_stuck_on_gpu(self) -> bool:
        """Whether the worker reported a stuck call and its TensorFlow sees a GPU, whose memory it may hold."""
        return self._stuck_on_gpu_file.is_file()

    @property
    def was_asked_to_end(self) -> bool:
        """Whether `ask_to_end` was called."""
        return self._end_at_s is not None

    def versions_in_use(self) -> list[VersionInUse]:
        """Return the versions that the worker loads or runs; after its end, those of its last record."""
        return read_versions_in_use(self._versions_file)

    @property
    def is_overdue(self) -> bool:
        """Whether the worker got SIGTERM but has not ended within its time."""
        return self._end_at_s is not None and time.monotonic() > self._end_at_s

    def ask_to_end(self, deadline_s: float) -> None:
        """Send SIGTERM. The worker must drain and end within this time, seconds."""
        if self._end_at_s is None and self.ended is None:
            self._end_at_s = time.monotonic() + deadline_s
            self.child.send(signal.SIGTERM)

    def end(self) -> None:
        """Wait until the worker ends; kill it at its deadline."""
        if not self.child.end((self._end_at_s or 0.0) - time.monotonic()):
            _log.error("worker %d did not end in time and was killed", self.child.pid)
