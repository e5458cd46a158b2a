"""Reads a trace of TensorFlow's profiler: what ran on each device, with start and end times.

The file is an `XSpace` (`tensorflow.tsl.profiler.protobuf.xplane_pb2`). A GPU has a plane
`/device:GPU:0` with a line for each stream (`Stream #13(Kernel)`). Other lines of the plane sum up
the streams, and are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.measure.hlo_ops import HloOp, hlo_ops
from stoker.measure.kernel_class import Kernel, class_of, only_casts

GPU_PLANE, HOST_PLANE, METADATA_PLANE = "/device:GPU:", "/host:CPU", "/host:metadata"
STREAM = "Stream #"
"""Prefix of the names of lines that hold a stream's events."""

MAX_EVENTS = 400_000
"""Approximate maximum number of events to read per device; only the first part of a larger trace is read."""

_RUNS_OTHERS = re.compile(
    r"^(While|StatelessWhile|If|StatelessIf|Case|StatelessCase|(Stateful)?PartitionedCall"
    r"|RemoteCall|SymbolicGradient|XlaLaunch|_?XlaRun|_?XlaCompile|MapDefun|__\w+)$"
)
"""Operations whose events contain the events of other operations."""

_WAITS = re.compile(
    r"^(IteratorGetNext\w*|OptionalGetValue|(Eager)?PyFunc\w*|_?(Host)?Recv|ReduceDataset)$"
)
"""Host operations that wait, or run Python, and compute nothing on the device."""

_OPERATION = re.compile(r"^[^:\s]+:[A-Za-z_][\w>]*$")
"""`model/conv1/Conv2D:Conv2D`, the form in which TensorFlow names an operation's event."""


class TraceError(Exception):
    """The trace cannot be taken or read; the message is a clause for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One execution of a kernel or a copy."""

    begin_ps: int
    end_ps: int
    kernel: Kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEvents:
    """Everything that one device ran."""

    device: str
    """`GPU:0`; `CPU` if CPU operations were read instead."""

    events: tuple[Event, ...]
    """The events, in any order; events of different streams may overlap."""


def read_events(data: bytes, *, of_cpu: bool = False) -> list[DeviceEvents]:
    """Read a trace.

    Args:
        data: The content of an `.xplane.pb` file.
        of_cpu: Read CPU operations as if they were kernels.

    Returns:
        The events of each device that ran anything; at least one device.

    Raises:
        TraceError: the trace is damaged, or has no events of a GPU (with `of_cpu`: of the CPU).
    """
    from google.protobuf.message import DecodeError
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    if not data:
        raise TraceError("the trace is empty")
    try:
        space = xplane_pb2.XSpace.FromString(data)
    except DecodeError:
        raise TraceError("the trace is damaged: it is truncated, or not an XSpace") from None
    programs = _programs(space)
    found = []
    for plane in space.planes:
        if of_cpu and plane.name == HOST_PLANE:
            events = tuple(_of_cpu(plane, programs))
        elif not of_cpu and plane.name.startswith(GPU_PLANE):
            events = tuple(_of_gpu(plane, programs))
        else:
            continue
        device = "CPU" if of_cpu else plane.name.removeprefix("/device:")
        if events:
            found.append(DeviceEvents(device=device, events=events))
    if not found:
        what = "operation of the CPU" if of_cpu else "kernel of a GPU"
        raise TraceError(f"the trace holds no {what}")
    return _that_compute(found)


def _that_compute(devices: list[DeviceEvents]) -> list[DeviceEvents]:
    """Devices that ran kernels, and not only memory copies; all devices if none ran a kernel."""
    computing = [
        each for each in devices if any(class_of(event.kernel) != "copies" for event in each.events)
    ]
    return computing or devices


_Programs = Mapping[str, Mapping[str, HloOp]]
"""Name of a compiled program -> its instructions by name."""


def _programs(space: Any) -> _Programs:
    from google.protobuf.message import DecodeError
    from tensorflow.compiler.xla.service import hlo_pb2

    found = {}
    for plane in space.planes:
        if plane.name != METADATA_PLANE:
            continue
        for metadata in plane.event_metadata.values():
            for stat in metadata.stats:
                try:
                    program = hlo_pb2.HloProto.FromString(stat.bytes_value)
                except DecodeError:
                    continue  # the kernels of this program are classified by their names
                found[program.hlo_module.name] = hlo_ops(program.hlo_module)
    return found


def _of_gpu(plane: Any, programs: _Programs) -> Iterator[Event]:
    read = _Kernels(plane, programs)
    lines = [line for line in plane.lines if line.name.startswith(STREAM)]
    for line, event in _in_time(lines):
        yield from _timed(line, event, read.of_gpu(event))


def _of_cpu(plane: Any, programs: _Programs) -> Iterator[Event]:
    read = _Kernels(plane, programs)
    for line, event in _in_time(plane.lines):
        kernel = read.of_cpu(event)
        if kernel is not None:
            yield from _timed(line, event, kernel)


def _in_time(lines: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The events of lines; if there are too many, only events in the first part of the trace."""
    total = sum(len(line.events) for line in lines)
    until_ps = None
    if total > MAX_EVENTS:
        begins = [_begin_ps(line, event) for line in lines for event in line.events]
        until_ps = min(begins) + (max(begins) - min(begins)) * MAX_EVENTS // total
    for line in lines:
        for event in line.events:
            if until_ps is None or _begin_ps(line, event) <= until_ps:
                yield line, event


def _begin_ps(line: Any, event: Any) -> int:
    return int(1000 * line.timestamp_ns + event.offset_ps)


def _timed(line: Any, event: Any, kernel: Kernel) -> Iterator[Event]:
    begin_ps = _begin_ps(line, event)
    if event.duration_ps > 0:
        yield Event(begin_ps=begin_ps, end_ps=begin_ps + event.duration_ps, kernel=kernel)


class _Kernels:
    """Creates `Kernel`s from a plane's events; equal events share a `Kernel`."""

    def __init__(self, plane: Any, programs: _Programs) -> None:
        self._names = {key: each.name for key, each in plane.event_metadata.items()}
        self._stats = {key: each.name for key, each in plane.stat_metadata.items()}
        self._programs = programs
        self._made: dict[tuple[str, ...], Kernel] = {}

    def of_gpu(self, event: Any) -> Kernel:
        stats = self._texts(event.stats)
        name = self._names.get(event.metadata_id, "")
        op = stats.get("tf_op") or stats.get("annotation", "").partition("#")[0]
        key = (name, op, stats.get("hlo_module", ""), stats.get("hlo_op", ""))
        if key not in self._made:
            self._made[key] = self._kernel(*key)
        return self._made[key]

    def of_cpu(self, event: Any) -> Kernel | None:
        name = self._names.get(event.metadata_id, "")
        stats = self._texts(event.stats)
        if "hlo_op" in stats:
            if name.startswith("end: "):
                return None
            key = (name, "", stats.get("hlo_module", ""), stats["hlo_op"])
            op = self._program(key[2]).get(key[3])
            if op is not None and op.runs_others:
                return None
        else:
            kind = name.rpartition(":")[2]
            if not _OPERATION.match(name) or _RUNS_OTHERS.match(kind) or _WAITS.match(kind):
                return None
            key = ("", name, "", "")
        if key not in self._made:
            self._made[key] = self._kernel(*key)
        return self._made[key]

    def _kernel(self, name: str, op: str, module: str, instruction: str) -> Kernel:
        hlo = self._program(module).get(instruction)
        scope, _, kind = op.rpartition(":")
        if hlo is not None:
            return Kernel(name=name, scope=hlo.scope, hlo=hlo.kind, casts=hlo.casts)
        return Kernel(
            name=name,
            scope=scope if ":" in op else "",
            op=kind if ":" in op else "",
            casts=only_casts(name, kind),
        )

    def _program(self, module: str) -> Mapping[str, HloOp]:
        # Some versions of TensorFlow append the program's number to its name.
        return self._programs.get(module) or self._programs.get(re.sub(r"\(\d+\)$", "", module), {})

    def _texts(self, stats: Sequence[Any]) -> dict[str, str]:
        return {
            self._stats.get(stat.metadata_id, ""): self._text(stat)
            for stat in stats
            if stat.WhichOneof("value") in ("str_value", "ref_value")
        }

    def _text(self, stat: Any) -> str:
        if stat.WhichOneof("value") == "ref_value":
            return self._stats.get(stat.ref_value, "")
        return str(stat.str_value)
