"""The statistics as one HTML file that stands alone: no script, nothing fetched, all names escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from stoker.data.features.analysis.anomalies import Anomaly
from stoker.data.features.analysis.schema import Schema
from stoker.data.features.analysis.statistics import ColumnStatistics, Statistics, ValueCount

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #647084; --line: #e3e7ee; --card: #fff;
  --page: #f6f7f9; --bar: #d9622b; --error: #b3261e; --warning: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf0; --soft: #9aa5b6; --line: #2c3442;
  --card: #171c25; --page: #0f131a; --bar: #f08a56; --error: #ff8a80; --warning: #f2c14e; } }
body { margin: 0; padding: 2rem clamp(1rem, 4vw, 3rem); background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .2rem; font-size: 1.6rem; } h2 { margin: 2.2rem 0 .8rem; font-size: 1.15rem; }
h3 { margin: 0; font-size: 1rem; overflow-wrap: anywhere; }
p, small { color: var(--soft); margin: 0; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .7rem;
  padding: 1rem 1.1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { padding: .22rem .4rem; text-align: left; border-top: 1px solid var(--line);
  overflow-wrap: break-word; vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td.number { text-align: right; }
svg { display: block; width: 100%; height: 5rem; margin: .7rem 0; }
rect { fill: var(--bar); }
.error { color: var(--error); font-weight: 600; } .warning { color: var(--warning); }
"""

_SHOWN_VALUES = 10
"""Most frequent values that a card lists."""


def render_report(statistics: Statistics, schema: Schema, anomalies: Sequence[Anomaly]) -> str:
    """Write the page; the same statistics give the same bytes."""
    rows = " &middot; ".join(
        f"{escape(split)} {count:,} rows" for split, count in statistics.rows.items()
    )
    sections = "".join(
        f'<h2>{escape(split)}</h2><div class="grid">'
        + "".join(_card(column, is_label=column.name in schema.labels) for column in columns)
        + "</div>"
        for split, columns in statistics.splits.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>Data report</title><style>{_STYLE}</style></head><body>"
        f"<h1>Data report</h1><p>{rows} &middot; {len(schema.columns)} columns &middot; "
        f"dataset {escape(statistics.fingerprint[:12])}</p>"
        f"<h2>Anomalies</h2>{_anomalies(anomalies)}{_splits(statistics)}{sections}</body></html>\n"
    )


def _splits(statistics: Statistics) -> str:
    """Shares, label rates and common rows of the splits, where they were compared."""
    if not statistics.split_facts:
        return ""
    heads = ("Split", "Rows", "Share", "Distinct", "Copies of train", "Features in train", "Labels")
    lines = "".join(
        f"<tr><td>{escape(split)}</td>"
        + "".join(
            f'<td class="number">{value}</td>'
            for value in (
                f"{statistics.rows[split]:,}",
                f"{facts.share:.1%}",
                f"{facts.distinct:,}",
                _share(facts.copies_of_train, statistics.rows[split]),
                _share(facts.features_in_train, statistics.rows[split]),
            )
        )
        + f"<td>{'<br>'.join(_rates(*each) for each in facts.label_rates.items())}</td></tr>"
        for split, facts in statistics.split_facts.items()
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<h2>Splits</h2><div class="card"><table><tr>{head}</tr>{lines}</table></div>'


def _share(count: int | None, rows: int) -> str:
    return "" if count is None else f"{count:,} ({count / rows:.1%})"


def _rates(label: str, rates: Mapping[str, float]) -> str:
    shown = [f"{escape(_short(value))} {rate:.1%}" for value, rate in rates.items()]
    more = ["..."] if len(shown) > _SHOWN_VALUES else []
    return f"{escape(label)}: {', '.join([*shown[:_SHOWN_VALUES], *more]) or 'many values'}"


def _anomalies(anomalies: Sequence[Anomaly]) -> str:
    if not anomalies:
        return "<p>None: every split looks like the training split.</p>"
    lines = "".join(
        f'<tr><td class="{anomaly.severity}">{anomaly.severity}</td><td>{escape(anomaly.split)}</td>'
        f"<td>{escape(anomaly.column)}</td><td>{escape(anomaly.message)}</td></tr>"
        for anomaly in anomalies
    )
    head = "<tr><th>Severity</th><th>Split</th><th>Column</th><th>What</th></tr>"
    return f'<div class="card"><table>{head}{lines}</table></div>'


def _card(column: ColumnStatistics, *, is_label: bool) -> str:
    length = "" if column.length is None else f" [{column.length or 'varying'}]"
    kind = f"{column.dtype}{length}{', label' if is_label else ''}"
    facts = "".join(
        f'<tr><th>{name}</th><td class="number">{escape(value)}</td></tr>'
        for name, value in _facts(column)
    )
    return (
        f'<div class="card"><h3>{escape(column.name)}</h3><small>{kind}</small>'
        f"{_chart(column)}<table>{facts}</table>{_values(column.top[:_SHOWN_VALUES])}</div>"
    )


def _facts(column: ColumnStatistics) -> list[tuple[str, str]]:
    facts = [("values", f"{column.count:,}")]
    if column.missing:
        facts.append(("missing", f"{column.missing:,} ({column.missing_share:.1%})"))
    if column.dtype != "image":
        facts.append(("distinct", "many" if column.distinct is None else f"{column.distinct:,}"))
    numbers, lengths = column.numbers, column.lengths
    if numbers is not None:
        named = (("mean", numbers.mean), ("std", numbers.std), ("min", numbers.min))
        facts += [(name, _number(value)) for name, value in (*named, ("max", numbers.max))]
        if numbers.quantiles:
            facts.append(("median", _number(numbers.quantiles[len(numbers.quantiles) // 2])))
        counts = (("zeros", numbers.zeros), ("infinite", numbers.infinite))
        facts += [(name, f"{count:,}") for name, count in counts if count]
    lists = column.list_lengths
    if lists is not None and lists.mean is not None:
        facts.append(("values in a list", f"{lists.mean:,.1f} ({lists.min:,} to {lists.max:,})"))
    if lengths is not None and lengths.mean is not None:
        unit = "bytes" if column.dtype == "image" else "length"
        spread = f"{lengths.mean:,.1f} ({lengths.min:,} to {lengths.max:,})"
        facts.append((unit, spread))
    return facts


def _chart(column: ColumnStatistics) -> str:
    bars = column.numbers.histogram if column.numbers else [top.count for top in column.top[:20]]
    if not bars:
        return ""
    width, highest = 100 / len(bars), max(bars)
    drawn = "".join(
        f'<rect x="{index * width:.2f}" y="{40 - 40 * bar / highest:.2f}" '
        f'width="{width * 0.86:.2f}" height="{40 * bar / highest:.2f}"/>'
        for index, bar in enumerate(bars)
        if bar
    )
    name = escape(column.name, quote=True)
    return (
        f'<svg viewBox="0 0 100 40" preserveAspectRatio="none" role="img" '
        f'aria-label="Distribution of {name}">{drawn}</svg>'
    )


def _values(top: Sequence[ValueCount]) -> str:
    if not top:
        return ""
    lines = "".join(
        f'<tr><td>{escape(_short(item.value))}</td><td class="number">{item.count:,}</td></tr>'
        for item in top
    )
    return f"<table><tr><th>most frequent</th><th></th></tr>{lines}</table>"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "..."


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.6g}"
