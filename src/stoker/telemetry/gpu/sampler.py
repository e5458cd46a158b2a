"""Samples GPUs in a thread, so that a scrape never waits for the driver."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from types import TracebackType
from typing import Self

from stoker.core import nvml
from stoker.telemetry.gpu.dcgm import dcgm_families
from stoker.telemetry.gpu.device import OwnerOf
from stoker.telemetry.gpu.families import families, health_families
from stoker.telemetry.gpu.owners import owner_of
from stoker.telemetry.gpu.reader import GpuReader
from stoker.telemetry.gpu.readings import GpuReading

_log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Interval between two samples, seconds."""

SLOW_S = 15.0
"""Interval between two samples of the slow fields, and between attempts to reach a driver that does not answer, seconds."""

_STALE = 10
"""After this many intervals without a sample, the driver counts as hung, and the last sample is no longer reported."""

_CLOSING_S = 2.0
"""Maximum wait for the thread in `close`, seconds: if the driver hangs, the thread does not end."""


class GpuSampler:
    """Keeps the newest sample of the GPUs; a context manager. After a failure, it logs a warning and has no metrics."""

    def __init__(
        self,
        *,
        every_s: float = EVERY_S,
        slow_s: float = SLOW_S,
        uuids: Collection[str] | None = None,
        owners: OwnerOf = owner_of,
    ) -> None:
        """Start to sample.

        Args:
            every_s: Interval between two samples, seconds.
            slow_s: Interval between two samples of the slow fields, seconds.
            uuids: UUIDs of the GPUs and MIG slices to sample; None: all of the machine.
            owners: Finds the run or model that a process belongs to.
        """
        self._every_s, self._slow_s = every_s, slow_s
        self._uuids, self._owners = uuids, owners
        self._readings: tuple[GpuReading, ...] = ()
        self._driver = ""
        self._began_s = time.monotonic()
        self._sampled_s: float | None = None
        self._has_driver = True
        self._failure = ""
        self._first, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._sample, name="stoker-gpus", daemon=True)
        self._thread.start()

    def readings(self) -> tuple[GpuReading, ...]:
        """Return the newest sample; it is empty without a GPU or driver, or if the driver hangs."""
        sampled_s = self._sampled_s
        if sampled_s is None or time.monotonic() - sampled_s > _STALE * self._every_s:
            return ()
        return self._readings

    def age_s(self) -> float | None:
        """Return the age of the newest sample, seconds; None on a machine without a driver.

        If the driver has never answered, this is the time since the sampler started.
        """
        if not self._has_driver:
            return None
        since_s = self._began_s if self._sampled_s is None else self._sampled_s
        return time.monotonic() - since_s

    def families(self) -> list[list[str]]:
        """Return the lines of each metric, with Stoker's names."""
        return families(self.readings(), driver=self._driver, age_s=self.age_s())

    def dcgm_families(self) -> list[list[str]]:
        """Return the lines of each metric with dcgm-exporter's names, plus Stoker's own metrics about the sample."""
        readings = self.readings()
        return [*health_families(readings, age_s=self.age_s()), *dcgm_families(readings)]

    def wait(self, timeout_s: float) -> None:
        """Wait until the first attempt to sample has ended.

        Args:
            timeout_s: Maximum wait, seconds.
        """
        self._first.wait(timeout_s)

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join(_CLOSING_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _sample(self) -> None:
        """Sample until the end, even if the driver is unloaded and loaded again."""
        while not self._over.is_set():
            try:
                reader = GpuReader(self._owners, uuids=self._uuids)
            except nvml.NvmlError as error:
                self._tell(error)
            else:
                self._sample_with(reader)
            self._first.set()
            self._over.wait(self._slow_s)

    def _sample_with(self, reader: GpuReader) -> None:
        """Sample until the end, or until the driver no longer answers."""
        self._has_driver, self._driver, self._failure = True, reader.driver, ""
        next_slow_s = next_s = time.monotonic()
        try:
            while not self._over.wait(max(0.0, next_s - time.monotonic())):
                slow = next_s >= next_slow_s
                self._readings = reader.read(slow=slow)
                now_s = self._sampled_s = time.monotonic()
                self._first.set()
                if slow:
                    next_slow_s = next_s + self._slow_s
                # If a sample takes too long, the next one is delayed; missed samples are not taken later.
                next_s = max(next_s + self._every_s, now_s)
        except nvml.NvmlError as error:
            self._tell(error)
        finally:
            reader.close()

    def _tell(self, error: nvml.NvmlError) -> None:
        """Forget the samples after a failure, and warn once for each cause."""
        self._readings, self._driver = (), ""
        self._has_driver = not error.is_missing
        if not error.is_missing and str(error) != self._failure:
            _log.warning("GPUs are not sampled: %s. Next attempts every %g s", error, self._slow_s)
        self._failure = str(error)
