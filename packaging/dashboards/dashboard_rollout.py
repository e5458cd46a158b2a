"""The dashboard of rollouts."""

from __future__ import annotations

from dashboard_parts import Dashboard, Panel, Query, Row, Variable

_MODEL = 'model_name=~"$model"'


def _of(expr: str, legend: str) -> tuple[Query, ...]:
    return (Query(expr=expr, legend=legend),)


ROLLOUT = Dashboard(
    uid="stoker-rollout",
    title="Stoker: rollout",
    help="How far has a new version progressed, and is it as good as the previous one?",
    variables=(
        Variable(
            name="model", label="Model", query="label_values(stoker_rollout_phase, model_name)"
        ),
    ),
    rows=(
        Row(
            title="State",
            stats=(
                Panel(
                    title="Rolled back",
                    queries=_of(
                        f'sum(max by (model_name) (stoker_rollout_phase{{{_MODEL},phase="rolled back"}}))',
                        "models",
                    ),
                    unit="short",
                    limit=1.0,
                    alert="StokerRolledBack",
                    help="Models whose newest rollout was rolled back.",
                ),
                Panel(
                    title="Paused",
                    queries=_of(
                        f'sum(max by (model_name) (stoker_rollout_phase{{{_MODEL},phase="paused"}}))',
                        "models",
                    ),
                    unit="short",
                    limit=1.0,
                    help="Models whose rollout waits for a person.",
                ),
                Panel(
                    title="Running",
                    queries=_of(
                        f'sum(max by (model_name) (stoker_rollout_phase{{{_MODEL},phase="running"}}))',
                        "models",
                    ),
                    unit="short",
                    help="Models with a new version that takes more and more traffic.",
                ),
            ),
            lines=(
                Panel(
                    title="Share of the traffic",
                    queries=_of(
                        f"max by (model_name, version) (stoker_rollout_traffic_share{{{_MODEL}}})",
                        "{{model_name}} {{version}}",
                    ),
                    unit="percentunit",
                    most=1.0,
                    help="Share that each version should take.",
                ),
                Panel(
                    title="Events",
                    queries=_of(
                        f"max by (model_name, event) (stoker_rollout_events_total{{{_MODEL}}})",
                        "{{model_name}} {{event}}",
                    ),
                    unit="short",
                    alert="StokerRolledBack",
                    help="Changes so far; all servers count the same.",
                ),
            ),
        ),
        Row(
            title="Versions",
            lines=(
                Panel(
                    title="Errors by version",
                    queries=_of(
                        f'sum by (model_name, version) (rate(stoker_request_count{{{_MODEL},status!="OK"}}[$__rate_interval]))'
                        f" / sum by (model_name, version) (rate(stoker_request_count{{{_MODEL}}}[$__rate_interval]))",
                        "{{model_name}} {{version}}",
                    ),
                    unit="percentunit",
                    alert="StokerErrorBudgetBurn",
                    help="Share of each version's requests.",
                ),
                Panel(
                    title="99th percentile by version",
                    queries=_of(
                        "histogram_quantile(0.99, sum by (model_name, version, le)"
                        f" (rate(stoker_request_latency_bucket{{{_MODEL}}}[$__rate_interval]))) / 1e6",
                        "{{model_name}} {{version}}",
                    ),
                    unit="s",
                    help="Time of successful requests.",
                ),
                Panel(
                    title="Copied requests (shadow)",
                    queries=_of(
                        f"sum by (model_name, result) (rate(stoker_rollout_copies{{{_MODEL}}}[$__rate_interval]))",
                        "{{model_name}} {{result}}",
                    ),
                    unit="reqps",
                    help="Copied, dropped, compared, different and bad.",
                ),
                Panel(
                    title="Age of the workers' state",
                    queries=_of(
                        f"max by (model_name) (stoker_rollout_state_age_seconds{{{_MODEL}}})",
                        "{{model_name}}",
                    ),
                    unit="s",
                    limit=30.0,
                    help="Time since a worker last read the rollout's state.",
                ),
            ),
        ),
    ),
)
