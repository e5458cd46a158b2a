"""The data report: statistics, schema and anomalies as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stoker.core.statistics.columns import ColumnStatistics, ValueCount
from stoker.data.features.analysis.anomalies import Anomaly
from stoker.data.features.analysis.statistics import Schema, Statistics
from stoker.pages.bars import histogram, meter
from stoker.pages.html import Html, element, join, page, paragraph, section
from stoker.pages.numbers import count_of, number, percent
from stoker.pages.table import Fill, Number, Prose, facts, table

_SHOWN_VALUES = 10
"""Number of most frequent values in a card."""

_SHOWN_CHARACTERS = 60
"""Maximum length of a shown value; longer values are cut."""


def render_report(statistics: Statistics, schema: Schema, anomalies: Sequence[Anomaly]) -> str:
    """Return the page; the same statistics give the same bytes."""
    # The training split comes first.
    splits = sorted(statistics.splits, key=lambda split: (split != "train", split))
    rows = [f"{split}: {statistics.rows[split]:,} rows" for split in splits]
    about = [*rows, f"{len(schema.columns)} columns", f"dataset {statistics.fingerprint[:12]}"]
    found = (
        table(
            ["severity", "split", "column", Prose("what")],
            map(_anomaly, anomalies),
        )
        if anomalies
        else paragraph("None: every split looks like the training split.")
    )
    parts = [
        paragraph(" · ".join(about), quiet=True),
        section("Anomalies", found),
        section("Splits", _splits(statistics, splits)),
    ]
    for split in splits:
        cards = (
            _card(column, is_label=column.name in schema.labels)
            for column in statistics.splits[split]
        )
        parts += [element("h2", split, class_="above"), element("div", *cards, class_="grid")]
    return page("Data report", parts)


def _anomaly(anomaly: Anomaly) -> list[str]:
    severity = element("strong", anomaly.severity, class_=_COLORS[anomaly.severity])
    return [severity, anomaly.split, anomaly.column, anomaly.message]


_COLORS = {"error": "bad", "warning": "warning"}


def _splits(statistics: Statistics, splits: Sequence[str]) -> Html:
    """Return a table of the splits' shares, label rates and common rows; empty if they were not compared."""
    rows = []
    for split in splits:
        if split not in statistics.split_facts:
            continue
        compared, count = statistics.split_facts[split], statistics.rows[split]
        common = (compared.copies_of_train, compared.features_in_train)
        rows.append(
            [
                split,
                f"{count:,}",
                percent(compared.share),
                f"{compared.distinct:,}",
                *("" if each is None else count_of(each, count) for each in common),
                join((_rates(*each) for each in compared.label_rates.items()), Html("<br>")),
            ]
        )
    columns = ("rows", "share", "distinct", "copies of train", "features in train")
    return table(["split", *map(Number, columns), Prose("labels")], rows)


def _rates(label: str, rates: Mapping[str, float]) -> str:
    shown = [f"{_short(value)} {percent(rate)}" for value, rate in rates.items()]
    more = ["..."] if len(shown) > _SHOWN_VALUES else []
    return f"{label}: {', '.join([*shown[:_SHOWN_VALUES], *more]) or 'many values'}"


def _card(column: ColumnStatistics, *, is_label: bool) -> Html:
    length = "" if column.length is None else f" [{column.length or 'varying'}]"
    kind = f"{column.dtype}{length}{', label' if is_label else ''}"
    bars = column.numbers.histogram if column.numbers else ()
    return element(
        "div",
        element("h3", column.name),
        paragraph(kind, quiet=True),
        histogram(bars, title=f"Distribution of {column.name}") if bars else "",
        facts(_facts(column), Number()),
        _most_frequent(column),
        class_="card",
    )


def _facts(column: ColumnStatistics) -> Iterator[tuple[str, str]]:
    yield "values", f"{column.count:,}"
    if column.missing:
        yield "missing", count_of(column.missing, column.count + column.missing)
    if column.dtype != "image":
        yield "distinct", _distinct(column)
    numbers, lengths, lists = column.numbers, column.lengths, column.list_lengths
    if numbers is not None:
        median = numbers.quantiles[len(numbers.quantiles) // 2] if numbers.quantiles else None
        for name, value in (
            ("mean", numbers.mean),
            ("standard deviation", numbers.std),
            ("minimum", numbers.min),
            ("median", median),
            ("maximum", numbers.max),
        ):
            yield name, "none" if value is None else number(value)
        counts = (("zeros", numbers.zeros), ("infinite", numbers.infinite))
        yield from ((name, count_of(count, column.count)) for name, count in counts if count)
    if lists is not None and lists.mean is not None:
        yield "values in a list", f"{number(lists.mean, 4)} ({lists.min:,} to {lists.max:,})"
    if lengths is not None and lengths.mean is not None:
        unit = "bytes" if column.dtype == "image" else "characters"
        yield unit, f"{number(lengths.mean, 4)} ({lengths.min:,} to {lengths.max:,})"


def _distinct(column: ColumnStatistics) -> str:
    if column.distinct is None:
        return "many"
    once = column.distinct == column.count > 1
    return f"{column.distinct:,}{', each once' if once else ''}"


def _most_frequent(column: ColumnStatistics) -> Html:
    """Return a table of the values that occur more than once."""
    top = [item for item in column.top[:_SHOWN_VALUES] if item.count > 1]
    rows = (
        [
            _value(item, column.dtype),
            meter(item.count, most=top[0].count),
            f"{item.count:,}",
            percent(item.count / column.count),
        ]
        for item in top
    )
    return table(["most frequent", Fill(), Number("count"), Number("share")], rows)


def _value(item: ValueCount, dtype: str) -> str:
    """Return a value as text; a float is rounded to 7 digits."""
    return number(float(item.value), 7) if dtype.startswith("float") else _short(item.value)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
