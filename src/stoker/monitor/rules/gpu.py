"""Recording rules and alerts of GPUs."""

from __future__ import annotations

from stoker.monitor.rules.rule import Alert, Recording, Severity

RECORDINGS = (
    Recording(
        record="gpu:stoker_gpu_active:ratio_avg5m",
        # GPM's activity of the SMs; without GPM, NVML's share of time in which some kernel ran.
        expr="avg_over_time(stoker_gpu_sm_active_ratio[5m]) or avg_over_time(stoker_gpu_kernel_ran_ratio[5m])",
    ),
    Recording(
        record="gpu:stoker_gpu_memory_used:ratio",
        expr="stoker_gpu_memory_used_bytes / stoker_gpu_memory_bytes",
    ),
    Recording(
        record="gpu:stoker_gpu_power_limit:ratio",
        expr="stoker_gpu_power_watts / stoker_gpu_power_limit_watts",
    ),
)

_HELD = 'max by (instance, uuid) (stoker_gpu_process_memory_bytes{run!=""}) > 0'

_SLOWED = "heat.*|power brake"
"""Throttle reasons that are faults. The power limit is not one: it is reached at full load."""

_WHERE = "GPU {{ $labels.gpu }} at {{ $labels.instance }}"

ALERTS = (
    Alert(
        name="StokerGpuIdle",
        expr=f"gpu:stoker_gpu_active:ratio_avg5m < 0.05 and on (instance, uuid) ({_HELD})",
        lasts="5m",
        severity=Severity.TICKET,
        summary=f"{_WHERE} is idle, but a run holds it",
        description="For 10 minutes its SMs were active less than 5 % of the time: the run waits for input, hangs or has ended badly.",
    ),
    Alert(
        name="StokerGpuHot",
        expr="stoker_gpu_temperature_celsius > 87",
        lasts="5m",
        severity=Severity.PAGE,
        summary=f"{_WHERE} has {{{{ $value }}}} degrees Celsius",
        description="Near this temperature the card lowers its clocks; above it, it switches off.",
    ),
    Alert(
        name="StokerGpuThrottled",
        expr=f'avg_over_time(stoker_gpu_throttled{{reason=~"{_SLOWED}"}}[5m]) > 0.5',
        lasts="5m",
        severity=Severity.TICKET,
        summary=f"{_WHERE} is slowed down: {{{{ $labels.reason }}}}",
        description="Heat or the power supply holds its clocks down more than half of the time.",
    ),
    Alert(
        name="StokerGpuEccErrors",
        expr='increase(stoker_gpu_ecc_errors_total{kind=~".*uncorrected.*"}[1h]) > 0',
        severity=Severity.PAGE,
        summary=f"{_WHERE} has uncorrected ECC errors",
        description="Its memory lost data that could not be corrected: results since then are in doubt, and the card may need to be replaced.",
    ),
    Alert(
        name="StokerGpuMemoryNearlyFull",
        expr="gpu:stoker_gpu_memory_used:ratio > 0.97",
        lasts="10m",
        severity=Severity.TICKET,
        summary=f"{_WHERE} uses {{{{ $value | humanizePercentage }}}} of its memory",
        description="The next allocation may fail; lower the batch size, or move a model to another GPU.",
    ),
    Alert(
        name="StokerGpuLost",
        expr="stoker_gpu_lost == 1",
        severity=Severity.PAGE,
        summary=f"{_WHERE} is lost: the driver does not reach it",
        description="It fell off the bus; what ran on it has failed or hangs, and it takes a reset or a reboot.",
    ),
)
