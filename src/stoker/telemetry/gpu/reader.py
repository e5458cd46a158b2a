"""Samples all GPUs of a machine through NVML."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Collection
from typing import Any

import pynvml

from stoker.core import nvml
from stoker.telemetry.gpu.device import MigInstance, OwnerOf, WholeGpu
from stoker.telemetry.gpu.readings import GpuIdentity, GpuReading

_log = logging.getLogger(__name__)

_XID = pynvml.nvmlEventTypeXidCriticalError
_AT_ONCE_MS = 0


class GpuReader:
    """The open driver and its GPUs; only one thread at a time may use it."""

    def __init__(self, owner_of: OwnerOf, *, uuids: Collection[str] | None = None) -> None:
        """Open the driver.

        Args:
            owner_of: Finds the run or model that a process belongs to.
            uuids: UUIDs of the GPUs and MIG slices to read; None: all.

        Raises:
            NvmlError: The driver does not answer, or is not installed.
        """
        self._owner_of = owner_of
        self._uuids = uuids
        self._gpus: dict[int, WholeGpu] = {}
        self._slices: dict[int, list[MigInstance]] = {}
        self._lost: dict[int, GpuIdentity] = {}
        nvml.open_driver()
        try:
            self.driver = nvml.driver_version()
            count = nvml.gpu_count()
        except nvml.NvmlError:
            nvml.close_driver()
            raise
        self._events = nvml.ask(pynvml.nvmlEventSetCreate)
        for index in range(count):
            self._find(index)

    def read(self, *, slow: bool) -> tuple[GpuReading, ...]:
        """Sample all GPUs and MIG slices, in the driver's order.

        Args:
            slow: Whether to read the slow fields as well, look for new MIG slices, and check whether a lost GPU
                answers again.

        Raises:
            NvmlError: No GPU answers any more, for example after the driver was unloaded.
        """
        self._take_events()
        if slow:
            for index in tuple(self._lost):
                self._find(index)
        readings = [
            reading
            for index in sorted([*self._gpus, *self._lost])
            for reading in self._readings(index, slow=slow)
        ]
        if self._gpus and all(each.memory is None for each in readings):
            nvml.gpu_count()  # raises an error if the driver itself does not answer
        return tuple(each for each in readings if self._is_wanted(each))

    def close(self) -> None:
        """Close the driver."""
        for index in tuple(self._gpus):
            self._drop(index)
        if self._events is not None:
            with contextlib.suppress(nvml.GpuLostError):
                nvml.ask(pynvml.nvmlEventSetFree, self._events)
        nvml.close_driver()

    def _find(self, index: int) -> None:
        """Add a GPU to those that are read, or record that it is lost; skip a GPU that this process may not use."""
        try:
            found = WholeGpu(index, nvml.gpu(index), self._owner_of)
        except nvml.GpuLostError as error:
            if index not in self._lost:
                _log.warning("GPU %d is not sampled: %s", index, error)
                self._lost[index] = GpuIdentity(index=index)
            return
        except nvml.NvmlError as error:
            _log.debug("GPU %d is not sampled: %s", index, error)
            return
        if self._lost.pop(index, None) is not None:
            _log.warning("GPU %d answers again", index)
        self._gpus[index] = found
        if self._listens_to(found):
            found.xid = 0

    def _readings(self, index: int, *, slow: bool) -> list[GpuReading]:
        """Sample a GPU and its slices; for a lost GPU, return a single reading with `lost`."""
        gpu = self._gpus.get(index)
        if gpu is None:
            return [GpuReading(identity=self._lost[index], lost=True)]
        try:
            if slow:
                self._find_slices(index, gpu)
            parts = self._slices.get(index, [])
            return [gpu.read(slow=slow), *(part.read(slow=slow) for part in parts)]
        except nvml.GpuLostError as error:
            _log.warning("GPU %d (%s) fell off the bus: %s", index, gpu.identity.uuid, error)
            self._lost[index] = gpu.identity
            self._drop(index)
            return [GpuReading(identity=gpu.identity, lost=True, xid=gpu.xid)]

    def _find_slices(self, index: int, gpu: WholeGpu) -> None:
        """Find the slices again: they can be created and removed while the driver is open."""
        known = {part.identity.uuid: part for part in self._slices.get(index, [])}
        found = gpu.slices()
        self._slices[index] = [known.get(part.identity.uuid, part) for part in found]
        for part in [*known.values(), *found]:
            if part not in self._slices[index]:
                part.close()

    def _drop(self, index: int) -> None:
        for part in self._slices.pop(index, []):
            _freed(part)
        _freed(self._gpus.pop(index))

    def _is_wanted(self, reading: GpuReading) -> bool:
        uuids = self._uuids
        return uuids is None or reading.identity.uuid in uuids

    def _listens_to(self, gpu: WholeGpu) -> bool:
        """Subscribe to the XID errors of a GPU; return whether the driver reports them."""
        kinds = nvml.ask(pynvml.nvmlDeviceGetSupportedEventTypes, gpu.handle)
        if self._events is None or not kinds or not kinds & _XID:
            return False
        try:
            pynvml.nvmlDeviceRegisterEvents(gpu.handle, _XID, self._events)
        except pynvml.NVMLError:
            return False
        return True

    def _take_events(self) -> None:
        """Record the XID errors since the last call, without waiting."""
        while self._events is not None:
            try:
                event = nvml.ask(pynvml.nvmlEventSetWait_v2, self._events, _AT_ONCE_MS)
            except nvml.GpuLostError:
                return  # reading the GPUs shows which one is affected
            if event is None:
                return
            for gpu in self._gpus.values():
                if event.eventType == _XID and _address(event.device) == _address(gpu.handle):
                    gpu.xid = int(event.eventData)
                    _log.warning("GPU %d reports XID %d", gpu.identity.index, gpu.xid)


def _freed(device: WholeGpu | MigInstance) -> None:
    try:
        device.close()
    except nvml.GpuLostError:
        return


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
