"""Writes metrics in the text format of Prometheus, version 0.0.4.

The library prometheus-client cannot write the metrics of TensorFlow Serving: it adds `_total` to the name of every
counter. Source: prometheus.io, "Text-based format".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stoker.telemetry.catalogue.metric import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the answer to a scrape."""

Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, in order."""


def header(name: str, kind: str, help_text: str) -> list[str]:
    """Return the two lines before the samples of a metric."""
    return [f"# HELP {name} {_without_ends(help_text)}", f"# TYPE {name} {kind}"]


def sample(name: str, labels: Labels, value: float) -> str:
    """Return one line of the exposition."""
    return f"{name}{{{label_text(labels)}}} {value:.16g}"


def label_text(labels: Labels) -> str:
    """Return the text between the braces of a sample."""
    return ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)


def family(metric: Metric, samples: Mapping[Sequence[str], float]) -> list[str]:
    """Return the lines of a counter or gauge; no lines if it has no samples.

    Args:
        metric: The metric, from the catalogue.
        samples: Values of the labels, in the order of `metric.labels` -> number.
    """
    if not samples:
        return []
    return [
        *header(metric.name, metric.kind, metric.help),
        *(
            sample(metric.name, tuple(zip(metric.labels, values, strict=True)), number)
            for values, number in samples.items()
        ),
    ]


def text_of(families: Iterable[Sequence[str]]) -> str:
    """Return the answer to a scrape: the lines of all families."""
    return "".join(f"{line}\n" for lines in families for line in lines)


def _without_ends(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escaped(text: str) -> str:
    return _without_ends(text).replace('"', '\\"')
