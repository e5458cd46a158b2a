"""Alerts about the monitoring itself: whether alerts arrive, and whether metrics are current."""

from __future__ import annotations

from stoker.monitor.rules.rule import Alert, Severity

ALERTS = (
    Alert(
        name="Watchdog",
        expr="vector(1)",
        severity=Severity.NONE,
        summary="Alerts arrive",
        description="This alert always fires; if it stops arriving, Prometheus, Alertmanager or the path to the receiver is broken.",
        keep="",
    ),
    Alert(
        name="StokerTargetDown",
        expr='up{job=~"stoker-.*"} == 0',
        lasts="2m",
        min_lasts="8s",  # Prometheus forgets a removed target after 5 s, whatever the time scale is
        severity=Severity.PAGE,
        summary="{{ $labels.job }} at {{ $labels.instance }} does not answer",
        description="The process has ended, hangs, or its port cannot be reached; other alerts about it cannot fire.",
    ),
    Alert(
        name="StokerExporterWithoutData",
        expr="stoker_exporter_last_sample_age_seconds > duration(5m)",
        lasts="1m",
        severity=Severity.TICKET,
        summary="The GPU exporter at {{ $labels.instance }} has had no sample for {{ $value | humanizeDuration }}",
        description="The exporter answers, but the driver does not; alerts about GPUs have old values or none.",
    ),
)
