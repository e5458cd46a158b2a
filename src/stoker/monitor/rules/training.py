"""Recording rules and alerts about training runs."""

from __future__ import annotations

from stoker.monitor.rules.rule import Alert, Recording, Severity
from stoker.monitor.settings import RuleSettings

RECORDINGS = (
    Recording(
        record="run:stoker_train_input_wait:ratio_avg5m",
        expr="max by (run) (avg_over_time(stoker_train_input_wait_ratio[5m]))",
    ),
    Recording(
        record="run:stoker_train_busy:ratio_avg5m",
        expr="min by (run) (avg_over_time(stoker_train_busy_ratio[5m]))",
    ),
    Recording(
        record="run:stoker_train_goodput:ratio",
        expr="min by (run) (stoker_train_goodput_ratio)",
    ),
    Recording(
        record="run:stoker_train_mfu:ratio_avg5m",
        expr="avg by (run) (avg_over_time(stoker_train_mfu_ratio[5m]))",
    ),
    Recording(
        record="run:stoker_train_part:ratio",
        expr="sum by (run, part) (stoker_train_wall_seconds_total)"
        " / on (run) group_left () sum by (run) (stoker_train_wall_seconds_total)",
    ),
    Recording(
        record="run:stoker_train_step_seconds:p99_5m",
        expr="histogram_quantile(0.99, sum by (run, le) (rate(stoker_train_step_seconds_bucket[5m])))",
    ),
    Recording(
        record="run:stoker_train_loss:avg10m",
        expr="avg by (run) (avg_over_time(stoker_train_loss[10m]))",
    ),
)

_RUN = "Run {{ $labels.run }}"


def alerts(settings: RuleSettings) -> tuple[Alert, ...]:
    """Return the alerts about training runs."""
    checkpoint = f"{round(settings.no_checkpoint_minutes * 60_000)}ms"
    return (
        Alert(
            name="StokerInputBound",
            # Not in the first 5 minutes of a run: its files are not in the page cache yet.
            expr="run:stoker_train_input_wait:ratio_avg5m > 0.2"
            " and on (run) stoker_train_input_wait_ratio offset 5m",
            lasts="5m",
            severity=Severity.TICKET,
            summary=f"{_RUN} waits for input {{{{ $value | humanizePercentage }}}} of the time",
            description="The device waits for data: `stoker profile` shows which part of the input is slow, and `stoker tune` chooses settings of the feed.",
        ),
        Alert(
            name="StokerLossNotFinite",
            expr="stoker_train_loss != stoker_train_loss or abs(stoker_train_loss) == Inf",
            severity=Severity.PAGE,
            summary="The loss of run {{ $labels.run }} is {{ $value }}",
            description="Every further step is wasted: stop the run, and continue from a checkpoint before the first such loss.",
        ),
        Alert(
            name="StokerLossDiverging",
            # Compare means with means: the loss of a single call is noisy.
            expr="run:stoker_train_loss:avg10m > 2 * min_over_time(run:stoker_train_loss:avg10m[6h])"
            " and min_over_time(run:stoker_train_loss:avg10m[6h]) > 0.001",
            lasts="10m",
            severity=Severity.TICKET,
            summary="The loss of run {{ $labels.run }} has risen to {{ $value }}",
            description="For 10 minutes, the 10-minute mean of the loss has been more than twice its minimum of the last 6 hours: lower the learning rate, or continue from a checkpoint.",
        ),
        Alert(
            name="StokerNoCheckpoint",
            expr=f"stoker_train_checkpoint_age_seconds > duration({checkpoint})",
            lasts="1m",
            severity=Severity.PAGE,
            summary=f"{_RUN} has written no checkpoint for {{{{ $value | humanizeDuration }}}}",
            description="A failure now would lose all steps since then: check the run's log, its disk and `train.checkpoint`.",
        ),
        Alert(
            name="StokerGoodputLow",
            expr="run:stoker_train_goodput:ratio < 0.7",
            lasts="30m",
            severity=Severity.TICKET,
            summary=f"{_RUN} spends {{{{ $value | humanizePercentage }}}} of its time in training steps",
            description="The rest is compilation, checkpoints, validation, lost work and waiting: `stoker goodput` shows the share of each.",
        ),
        Alert(
            name="StokerStraggler",
            expr="stoker_train_straggler_ratio > 1.2",
            lasts="5m",
            severity=Severity.TICKET,
            summary="Worker {{ $labels.worker }} of run {{ $labels.run }} is {{ $value | humanize }} times as slow as the others",
            description="All workers wait for this worker in every step: check its GPU, its cores and its disk.",
        ),
    )
