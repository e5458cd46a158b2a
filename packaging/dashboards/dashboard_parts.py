"""Panels, variables and links, by Grafana's Foundation SDK."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as dashboard_model
from grafana_foundation_sdk.models.common import (
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from stoker.monitor.rules.rule import RUNBOOKS

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

WIDTH = 24
"""Number of columns in Grafana's grid."""

_STAT_HEIGHT, _LINES_HEIGHT = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """One line, or several by their labels."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A selector above the panels: values of a label."""

    name: str
    label: str
    query: str
    """`label_values(METRIC, LABEL)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel."""

    title: str
    queries: tuple[Query, ...]
    unit: str
    """Unit by Grafana's names: percentunit, s, bytes, celsius, watt, reqps, short, none."""
    help: str
    limit: float | None = None
    """Values above it are red: the limit of an alert."""
    most: float | None = None
    """Maximum of the axis; None: from the data."""
    alert: str = ""
    """Alert to whose runbook the panel links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A heading, current values, and lines over time."""

    title: str
    stats: tuple[Panel, ...] = ()
    lines: tuple[Panel, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """One of Grafana's dashboards."""

    uid: str
    title: str
    help: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


def built(described: Dashboard) -> dashboard.Dashboard:
    """Return a dashboard as Grafana's object."""
    made = (
        dashboard.Dashboard(described.title)
        .uid(described.uid)
        .description(described.help)
        .tags(["stoker"])
        .editable()
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for variable in described.variables:
        made.with_variable(_variable(variable))
    made.link(
        dashboard.DashboardLink("Stoker")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["stoker"])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    made.link(
        dashboard.DashboardLink("Runbooks")
        .type(DashboardLinkType.LINK)
        .url(RUNBOOKS)
        .target_blank(True)
    )
    ids = itertools.count(1)
    for row in described.rows:
        made.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel, width in zip(row.stats, _widths(row.stats), strict=True):
            made.with_panel(_stat(panel).id(next(ids)).height(_STAT_HEIGHT).span(width))
        for panel in row.lines:
            made.with_panel(_lines(panel).id(next(ids)).height(_LINES_HEIGHT).span(WIDTH // 2))
    return made


def _widths(panels: Sequence[Panel]) -> list[int]:
    return [WIDTH // len(panels)] * len(panels) if panels else []


def _variable(variable: Variable) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(SOURCE)
        .query({"query": variable.query, "refId": variable.name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
    )


def _queries(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .ref_id(chr(ord("A") + index))
        for index, query in enumerate(panel.queries)
    ]


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [Threshold(value=None, color="green")]
    if panel.limit is not None:
        steps.append(Threshold(value=panel.limit, color="red"))
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _stat(panel: Panel) -> stat.Panel:
    made = (
        stat.Panel()
        .title(panel.title)
        .description(panel.help)
        .datasource(SOURCE)
        .unit(panel.unit)
        .thresholds(_thresholds(panel))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .targets(list(_queries(panel)))
    )
    return made.links(_links(panel))


def _lines(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.help)
        .datasource(SOURCE)
        .unit(panel.unit)
        .min(0.0)
        .fill_opacity(10.0)
        .thresholds(_thresholds(panel))
        .thresholds_style(
            common.GraphThresholdsStyleConfig().mode(
                GraphTresholdsStyleMode.OFF if panel.limit is None else GraphTresholdsStyleMode.LINE
            )
        )
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
        .targets(list(_queries(panel)))
    )
    if panel.most is not None:
        made.max(panel.most)
    return made.links(_links(panel))


def _links(panel: Panel) -> list[Builder[dashboard_model.DashboardLink]]:
    if not panel.alert:
        return []
    return [
        dashboard.DashboardLink(f"Runbook: {panel.alert}")
        .type(DashboardLinkType.LINK)
        .url(f"{RUNBOOKS}#{panel.alert.lower()}")
        .target_blank(True)
    ]
