"""The dashboard of training runs."""

from __future__ import annotations

from dashboard_parts import Dashboard, Panel, Query, Row, Variable

_RUN = 'run=~"$run"'


def _of(expr: str, legend: str = "{{run}}") -> tuple[Query, ...]:
    return (Query(expr=expr, legend=legend),)


TRAINING = Dashboard(
    uid="stoker-training",
    title="Stoker: training",
    help="Is the device busy, what does it wait for, and does the model learn?",
    variables=(
        Variable(
            name="experiment",
            label="Experiment",
            query="label_values(stoker_run_info, experiment)",
        ),
        Variable(
            name="run",
            label="Run",
            query='label_values(stoker_run_info{experiment=~"$experiment"}, run)',
        ),
    ),
    rows=(
        Row(
            title="Now",
            stats=(
                Panel(
                    title="U: device busy",
                    queries=_of(f"run:stoker_train_busy:ratio_avg5m{{{_RUN}}}"),
                    unit="percentunit",
                    help="Time of a step with data that is already on the device, divided by its time with real data.",
                ),
                Panel(
                    title="W: waits for input",
                    queries=_of(f"run:stoker_train_input_wait:ratio_avg5m{{{_RUN}}}"),
                    unit="percentunit",
                    limit=0.2,
                    alert="StokerInputBound",
                    help="Share of the step time that is spent waiting for data.",
                ),
                Panel(
                    title="Goodput",
                    queries=_of(f"run:stoker_train_goodput:ratio{{{_RUN}}}"),
                    unit="percentunit",
                    alert="StokerGoodputLow",
                    help="Share of the wall time, over all restarts, in training steps that were not repeated.",
                ),
                Panel(
                    title="Samples per second",
                    queries=_of(f"sum by (run) (stoker_train_samples_per_second{{{_RUN}}})"),
                    unit="short",
                    help="Of all workers.",
                ),
                Panel(
                    title="Time left",
                    queries=_of(f"max by (run) (stoker_train_remaining_seconds{{{_RUN}}})"),
                    unit="s",
                    help="Estimated from the speed of the last steps.",
                ),
                Panel(
                    title="Newest checkpoint",
                    queries=_of(f"max by (run) (stoker_train_checkpoint_age_seconds{{{_RUN}}})"),
                    unit="s",
                    alert="StokerNoCheckpoint",
                    help="Work that a failure would lose.",
                ),
            ),
        ),
        Row(
            title="Learning",
            lines=(
                Panel(
                    title="Loss",
                    queries=_of(f"stoker_train_loss{{{_RUN}}}"),
                    unit="none",
                    alert="StokerLossDiverging",
                    help="Mean over the last call; lower is better.",
                ),
                Panel(
                    title="Metrics",
                    queries=_of(f"stoker_train_metric{{{_RUN}}}", "{{run}} {{name}}"),
                    unit="none",
                    help="The model's own metrics; val_: on the eval split.",
                ),
                Panel(
                    title="Gradient norm",
                    queries=_of(f"stoker_train_gradient_norm{{{_RUN}}}"),
                    unit="none",
                    alert="StokerLossNotFinite",
                    help="A jump comes before a loss that diverges.",
                ),
                Panel(
                    title="Loss scale",
                    queries=_of(f"stoker_train_loss_scale{{{_RUN}}}"),
                    unit="none",
                    help="Of mixed_float16; it halves at each overflow.",
                ),
            ),
        ),
        Row(
            title="Speed",
            lines=(
                Panel(
                    title="Busy and waiting",
                    queries=(
                        Query(expr=f"stoker_train_busy_ratio{{{_RUN}}}", legend="{{run}} U"),
                        Query(expr=f"stoker_train_input_wait_ratio{{{_RUN}}}", legend="{{run}} W"),
                        Query(
                            expr=f"run:stoker_train_mfu:ratio_avg5m{{{_RUN}}}", legend="{{run}} MFU"
                        ),
                    ),
                    unit="percentunit",
                    most=1.0,
                    help="MFU: the model's operations per second, divided by the peak of the card.",
                ),
                Panel(
                    title="Step time, 99th percentile",
                    queries=_of(f"run:stoker_train_step_seconds:p99_5m{{{_RUN}}}"),
                    unit="s",
                    help="From the histogram of step times.",
                ),
                Panel(
                    title="Where the time goes",
                    queries=_of(f"run:stoker_train_part:ratio{{{_RUN}}}", "{{run}} {{part}}"),
                    unit="percentunit",
                    most=1.0,
                    help="Parts of the wall time over all restarts; they add up to 1.",
                ),
                Panel(
                    title="Step time of each worker before the all-reduce",
                    queries=_of(
                        f"stoker_train_local_step_seconds{{{_RUN}}}", "{{run}} worker {{worker}}"
                    ),
                    unit="s",
                    alert="StokerStraggler",
                    help="All workers wait for the slowest.",
                ),
                Panel(
                    title="Restarts in the last hour",
                    queries=_of(
                        f"increase(stoker_train_restarts_total{{{_RUN}}}[1h])", "{{run}} {{cause}}"
                    ),
                    unit="short",
                    help="By cause.",
                ),
                Panel(
                    title="Steps per second",
                    queries=_of(
                        f"sum by (run) (rate(stoker_train_steps_total{{{_RUN}}}[$__rate_interval]))"
                    ),
                    unit="short",
                    help="0: it stands still.",
                ),
            ),
        ),
        Row(
            title="Runs",
            lines=(
                Panel(
                    title="Epoch",
                    queries=_of(f"stoker_train_epoch{{{_RUN}}}"),
                    unit="short",
                    help="Epochs finished.",
                ),
                Panel(
                    title="Runs by team",
                    queries=_of(
                        f'count by (team) (stoker_run_info{{{_RUN},experiment=~"$experiment"}})',
                        "{{team}}",
                    ),
                    unit="short",
                    help="Runs that are scraped now.",
                ),
            ),
        ),
    ),
)
