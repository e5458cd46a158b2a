"""Device time by kernel class, for the pages and the terminal output of `stoker profile`."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.measure.device_time import IDLE, DeviceTime
from stoker.measure.findings import DeviceFinding
from stoker.measure.kernel_class import CLASSES, LABELS
from stoker.pages.bars import Bar, stacked_bar
from stoker.pages.html import Html, element, paragraph, section
from stoker.pages.numbers import percent, seconds
from stoker.pages.table import Code, Number, table

OF_CPU = "These are operations of the CPU, and not kernels of a GPU."
"""Note on a page if CPU operations were traced in place of kernels."""


def finding_section(finding: DeviceFinding | None) -> Html:
    """The finding about device time, which comes first on a page; empty if there is none."""
    return Html() if finding is None else element("div", paragraph(finding.text), class_="finding")


def device_section(found: DeviceTime | None, *, why: str = "") -> Html:
    """The section of a page about device time; empty if there is no device to trace.

    Args:
        found: The device time; None if it was not measured.
        why: Why it was not measured; empty if there is no device to trace.
    """
    missing = [paragraph(f"Not measured: {why}.")] if why else []
    return section("Where the device's time goes", *(_parts(found) if found else missing))


def _parts(found: DeviceTime) -> Iterator[Html]:
    yield paragraph(summary(found), quiet=True)
    bars = [
        Bar(label=LABELS[name], value=found.shares[name], shown=percent(found.shares[name]))
        for name in (*CLASSES, IDLE)
    ]
    yield stacked_bar(bars, title="the device's time by class of kernel")
    yield element("h3", "Layers")
    yield table(["layer", "most of it", Number("share")], layer_rows(found))
    yield element("h3", "Kernels")
    yield table(
        [Code("kernel"), "class", "layer", Number("times"), Number("share")],
        (
            [each.name, LABELS[each.kind], each.layer, f"{each.times:,}", percent(each.share)]
            for each in found.kernels
        ),
    )


def summary(found: DeviceTime) -> str:
    """Which devices were traced, and for how long."""
    text = f"{', '.join(found.devices)}, traced for {seconds(found.window_s)}."
    return f"{text} {OF_CPU}" if found.of_cpu else text


def class_rows(found: DeviceTime) -> list[tuple[str, str]]:
    """The label of each kernel class and its share of the device time, as text for a terminal."""
    return [(label, percent(share)) for label, share in found.rows()]


def layer_rows(found: DeviceTime) -> list[tuple[str, str, str]]:
    """For each layer: its path, its most expensive class, and its share of the device time."""
    rows = []
    for each in found.layers:
        kind = max(each.kinds, key=lambda name: each.kinds[name])
        rows.append(
            (each.layer, f"{LABELS[kind]} {percent(each.kinds[kind])}", percent(each.share))
        )
    return rows
