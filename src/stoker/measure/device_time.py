"""Splits a device's time by kernel class, by kernel and by layer, from a trace.

Streams run in parallel, but each moment counts for only one of the running kernels: the kernel whose
class comes first in `CLASSES`. So the classes and the idle time add up to the whole time.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.measure.device_events import DeviceEvents, Event
from stoker.measure.kernel_class import CLASSES, LABELS, Kernel, KernelClass, class_of

_NUMBERED = re.compile(r"_\d+$")
_WRAPPERS = re.compile(
    r"^(gradient_tape|gradients|while|body|cond|then|else|branch|(Stateful)?PartitionedCall"
    r"|replica_\d+|_\d+|cond_\d+|while_\d+|jit\(.*\)|XLA_.*)$"
)
"""Parts of an operation's name that do not name its layer, unless the model has a layer of this name."""

UNKNOWN_PARTS = 2
"""Number of parts of a name that are shown if the layers are unknown: the model and its outer layer."""


class LayerNames:
    """The layers of a model, used to find the layer of an operation.

    Keras names an operation after the layers around it: `sequential/norm_a/moments/mean`. If a
    model is called more than once, TensorFlow appends a number to each layer's name.
    """

    def __init__(self, paths: Iterable[str], scopes: Iterable[str] = ()) -> None:
        """Index the layers.

        Args:
            paths: Layer paths such as `block1/attention`; empty if unknown.
            scopes: Names of all operations in the trace.
        """
        self._paths: dict[str, list[str]] = {}
        for path in paths:
            self._paths.setdefault(path.rpartition("/")[2], []).append(path)
        self._numbered = any(
            part not in self._paths and _NUMBERED.sub("", part) in self._paths
            for scope in set(scopes)
            for part in scope.split("/")
        )

    def layer_of(self, scope: str) -> str:
        """The path of the operation's innermost layer; if no layer is known, the outer parts of its name."""
        parts = [
            part
            for part in scope.split("/")
            if part and (part in self._paths or not _WRAPPERS.match(part))
        ]
        names = [self._name(part) for part in parts]
        for at in range(len(names) - 1, -1, -1):
            paths = self._paths.get(names[at])
            if paths:
                outer = set(names[:at])
                return max(paths, key=lambda path: len(outer & set(path.split("/")[:-1])))
        return "" if self._paths else "/".join(parts[:-1][:UNKNOWN_PARTS])

    def _name(self, part: str) -> str:
        plain = _NUMBERED.sub("", part)
        if self._numbered and plain in self._paths:
            return plain
        return part if part in self._paths else plain


IDLE = "idle"
"""Key of `DeviceTime.shares` for the time in which nothing runs."""

TOP = 12
"""Number of kernels, and number of layers, that are listed."""

TOP_OF_CLASS = 2
"""For each class, this many layers with the most time in the class are listed, even if not among the first `TOP`."""

NO_LAYERS: Mapping[str, str] = {}

MAX_NAME = 120
"""Maximum length of a kernel's name, characters: with template arguments it may have thousands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """The time of one kernel."""

    name: str
    kind: KernelClass
    layer: str
    """Path of the layer that it belongs to; empty if it belongs to no layer, or the layer is unknown."""
    share: float
    """Share of the device time, in [0, 1]."""
    times: int
    """Number of times that it ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """The time of one layer, forward and backward pass together."""

    layer: str
    share: float
    """Share of the device time, in [0, 1]."""
    kinds: Mapping[str, float]
    """Class -> share of the device time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """How the devices spent their time during a trace."""

    devices: tuple[str, ...]
    """Devices that computed, e.g. `GPU:0`."""

    window_s: float
    """Time from the start of the first kernel to the end of the last one, mean over the devices, seconds."""

    shares: Mapping[str, float]
    """Class or `idle` -> its share of the device time; the sum is 1."""

    casts: float
    """Share of the device time in kernels that only change a dtype; `shares` contains this time, too."""

    kernels: tuple[KernelTime, ...]
    """The kernels with the most time."""

    layers: tuple[LayerTime, ...]
    """The layers with the most time."""

    layer_types: Mapping[str, Mapping[str, float]]
    """Kernel class -> layer type (`BatchNormalization`) -> share of the device time, over all layers."""

    of_cpu: bool = False
    """Whether CPU operations were used in place of kernels, for lack of a GPU."""

    @property
    def busy(self) -> float:
        """Share of the device time in which something runs."""
        return 1.0 - self.shares[IDLE]

    def layers_of(self, kind: str) -> list[LayerTime]:
        """The listed layers that spend time in a class, the most expensive one first."""
        found = [each for each in self.layers if each.kinds.get(kind, 0.0) > 0]
        return sorted(found, key=lambda each: -each.kinds[kind])

    def rows(self) -> list[tuple[str, float]]:
        """Label and share of each class, for the user; in the order of `CLASSES`, without empty classes."""
        names = (*CLASSES, IDLE)
        return [(LABELS[name], self.shares[name]) for name in names if self.shares[name] > 0]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "devices": list(self.devices),
            "window_s": self.window_s,
            "shares": dict(self.shares),
            "casts": self.casts,
            "kernels": [
                {name: getattr(each, name) for name in each.__slots__} for each in self.kernels
            ],
            "layers": [
                {"layer": each.layer, "share": each.share, "kinds": dict(each.kinds)}
                for each in self.layers
            ],
            "layer_types": {kind: dict(types) for kind, types in self.layer_types.items()},
            "of_cpu": self.of_cpu,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DeviceTime:
        """Restore an object from the result of `to_json`."""
        return cls(
            devices=tuple(raw["devices"]),
            window_s=raw["window_s"],
            shares=dict(raw["shares"]),
            casts=raw["casts"],
            kernels=tuple(KernelTime(**each) for each in raw["kernels"]),
            layers=tuple(LayerTime(**each) for each in raw["layers"]),
            layer_types=raw["layer_types"],
            of_cpu=raw["of_cpu"],
        )


def device_time(
    devices: Sequence[DeviceEvents], *, layers: Mapping[str, str] = NO_LAYERS, of_cpu: bool = False
) -> DeviceTime:
    """Split the time of devices by kernel class, kernel and layer.

    Args:
        devices: The events of each device; at least one device, each with at least one event.
        layers: Path of each of the model's layers -> its type; empty if unknown.
        of_cpu: Whether the events are CPU operations.

    Returns:
        The shares over all devices; each device is weighted by the length of its trace.
    """
    taken_ps: dict[Kernel, int] = defaultdict(int)
    times: dict[Kernel, int] = defaultdict(int)
    window_ps = 0
    for device in devices:
        begin_ps = min(event.begin_ps for event in device.events)
        window_ps += max(event.end_ps for event in device.events) - begin_ps
        for kernel, part_ps in _exclusive(device.events):
            taken_ps[kernel] += part_ps
        for event in device.events:
            times[event.kernel] += 1
    names = LayerNames(layers, [kernel.scope for kernel in taken_ps])
    rows = [
        (kernel, class_of(kernel), names.layer_of(kernel.scope), part_ps / window_ps)
        for kernel, part_ps in taken_ps.items()
    ]
    shares: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    for _, kind, _, share in rows:
        shares[kind] += share
    return DeviceTime(
        devices=tuple(device.device for device in devices),
        window_s=window_ps / len(devices) / 1e12,
        shares={**shares, IDLE: max(0.0, 1.0 - sum(shares.values()))},
        casts=sum(share for kernel, _, _, share in rows if kernel.casts),
        kernels=_kernels(rows, times),
        layers=_layers(rows),
        layer_types=_layer_types(rows, layers),
        of_cpu=of_cpu,
    )


def _exclusive(events: Sequence[Event]) -> Iterator[tuple[Kernel, int]]:
    """For each busy interval: the kernel that it counts for, and its length in picoseconds."""
    weights = {kernel: CLASSES.index(class_of(kernel)) for kernel in {e.kernel for e in events}}
    starts = sorted(events, key=lambda event: event.begin_ps)
    running: list[tuple[int, int, int]] = []
    now_ps, at = 0, 0
    while at < len(starts) or running:
        if not running:
            now_ps = starts[at].begin_ps
        while at < len(starts) and starts[at].begin_ps <= now_ps:
            heapq.heappush(running, (weights[starts[at].kernel], starts[at].begin_ps, at))
            at += 1
        _, _, first = running[0]
        until_ps = starts[first].end_ps
        if at < len(starts):
            until_ps = min(until_ps, starts[at].begin_ps)
        if until_ps > now_ps:
            yield starts[first].kernel, until_ps - now_ps
            now_ps = until_ps
        while running and starts[running[0][2]].end_ps <= now_ps:
            heapq.heappop(running)


_Row = tuple[Kernel, KernelClass, str, float]


def _kernels(rows: Sequence[_Row], times: Mapping[Kernel, int]) -> tuple[KernelTime, ...]:
    merged: dict[tuple[str, KernelClass, str], list[float]] = {}
    for kernel, kind, layer, share in rows:
        one = merged.setdefault((kernel.shown[:MAX_NAME], kind, layer), [0.0, 0])
        one[0] += share
        one[1] += times[kernel]
    found = (
        KernelTime(name=name, kind=kind, layer=layer, share=share, times=int(count))
        for (name, kind, layer), (share, count) in merged.items()
    )
    return tuple(sorted(found, key=lambda each: -each.share)[:TOP])


def _layer_types(rows: Sequence[_Row], types: Mapping[str, str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for _, kind, layer, share in rows:
        if name := types.get(layer):
            of_class = found.setdefault(kind, {})
            of_class[name] = of_class.get(name, 0.0) + share
    return found


def _layers(rows: Sequence[_Row]) -> tuple[LayerTime, ...]:
    kinds: dict[str, dict[str, float]] = {}
    for _, kind, layer, share in rows:
        if layer:
            of_layer = kinds.setdefault(layer, {})
            of_layer[kind] = of_layer.get(kind, 0.0) + share
    found = sorted(
        (
            LayerTime(layer=layer, share=sum(parts.values()), kinds=parts)
            for layer, parts in kinds.items()
        ),
        key=lambda each: -each.share,
    )
    kept = found[:TOP]
    for kind in CLASSES:
        largest = sorted(found, key=lambda each: -each.kinds.get(kind, 0.0))[:TOP_OF_CLASS]
        kept += [each for each in largest if each.kinds.get(kind) and each not in kept]
    return tuple(sorted(kept, key=lambda each: -each.share))
