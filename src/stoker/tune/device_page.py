"""Device time by kernel class, for the pages and the terminal output of `stoker profile`."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from stoker.measure.device_findings import DeviceFinding
from stoker.measure.device_time import IDLE, DeviceTime
from stoker.measure.kernel_class import CLASSES, LABELS
from stoker.tune.drawing import Bar, seconds, stacked_bar
from stoker.tune.page import heading, paragraph, table

OF_CPU = "These are operations of the CPU, and not kernels of a GPU."
"""Note for CPU operations in place of kernels."""


def finding_section(finding: DeviceFinding | None) -> str:
    """The finding about device time, which comes first on a page; empty if there is none."""
    return "" if finding is None else f"<section><p>{escape(finding.text)}</p></section>"


def device_section(found: DeviceTime | None, *, why: str = "") -> str:
    """The section of a page; empty if there is no device to trace.

    Args:
        found: The device time.
        why: Why there is none.
    """
    title = heading("Where the device's time goes")
    if found is None:
        return title + paragraph(f"Not measured: {why}.") if why else ""
    return "\n".join([title, *_parts(found)])


def _parts(found: DeviceTime) -> Iterator[str]:
    yield f'<p class="sub">{escape(summary(found))}</p>'
    bars = [
        Bar(label=LABELS[name], value=found.shares[name], shown=f"{found.shares[name]:.1%}")
        for name in (*CLASSES, IDLE)
    ]
    yield stacked_bar(bars, title="the device's time by class of kernel")
    yield "<h3>Layers</h3>"
    yield table(["layer", "most of it", "share"], map(list, layer_rows(found)))
    yield "<h3>Kernels</h3>"
    yield table(
        ["kernel", "class", "layer", "times", "share"],
        (
            [each.name, LABELS[each.kind], each.layer, f"{each.times:,}", f"{each.share:.1%}"]
            for each in found.kernels
        ),
    )


def summary(found: DeviceTime) -> str:
    """Which devices were traced, and for how long."""
    said = f"{', '.join(found.devices)}, traced for {seconds(found.window_s)}."
    return f"{said} {OF_CPU}" if found.of_cpu else said


def class_rows(found: DeviceTime) -> list[tuple[str, str]]:
    """Class and share, for a terminal."""
    return [(label, f"{share:.1%}") for label, share in found.rows()]


def layer_rows(found: DeviceTime) -> list[tuple[str, str, str]]:
    """Layer, its most expensive class, and its share of the device time."""
    rows = []
    for each in found.layers:
        kind = max(each.kinds, key=lambda name: each.kinds[name])
        rows.append((each.layer, f"{LABELS[kind]} {each.kinds[kind]:.1%}", f"{each.share:.1%}"))
    return rows
