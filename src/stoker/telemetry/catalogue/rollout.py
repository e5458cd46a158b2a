"""The metrics of rollouts; every server of a repository reports the same values."""

from __future__ import annotations

from stoker.telemetry.catalogue.metric import Kind, Metric, Writer

PHASE = Metric(
    name="stoker_rollout_phase",
    kind=Kind.GAUGE,
    unit="",
    writer=Writer.ROLLOUT,
    labels=("model_name", "phase"),
    help="1 for the current phase of a model's rollout, 0 for all other phases.",
)
TRAFFIC_SHARE = Metric(
    name="stoker_rollout_traffic_share",
    kind=Kind.GAUGE,
    unit="ratio",
    writer=Writer.ROLLOUT,
    labels=("model_name", "version"),
    help="Share of the traffic that a version should take, 0 to 1.",
)
EVENTS = Metric(
    name="stoker_rollout_events_total",
    kind=Kind.COUNTER,
    unit="",
    writer=Writer.ROLLOUT,
    labels=("model_name", "event"),
    help="Changes of a model's rollouts, by event; every server reports the same number.",
)

METRICS = (PHASE, TRAFFIC_SHARE, EVENTS)
"""All metrics of rollouts."""
