"""Recording rules and alerts about GPUs."""

from __future__ import annotations

from stoker.monitor.rules.rule import Alert, Recording, Severity

RECORDINGS = (
    Recording(
        record="gpu:stoker_gpu_active:ratio_avg5m",
        # With GPM, the activity of the SMs; without GPM, NVML's share of time in which any kernel ran.
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
"""Pattern of throttle reasons that are faults. The power limit is not a fault: it is reached at full load."""

_WHERE = "GPU {{ $labels.gpu }} at {{ $labels.instance }}"

ALERTS = (
    Alert(
        name="StokerGpuIdle",
        expr=f"gpu:stoker_gpu_active:ratio_avg5m < 0.05 and on (instance, uuid) ({_HELD})",
        lasts="5m",
        severity=Severity.TICKET,
        summary=f"{_WHERE} is idle, but a run uses its memory",
        description="For 10 minutes its SMs were active less than 5 % of the time: the run waits for input, hangs, or did not end cleanly.",
    ),
    Alert(
        name="StokerGpuHot",
        expr="stoker_gpu_temperature_celsius > 87",
        lasts="5m",
        severity=Severity.PAGE,
        summary=f"{_WHERE} is at {{{{ $value }}}} degrees Celsius",
        description="Near this temperature the card lowers its clocks; if it gets hotter, it shuts down.",
    ),
    Alert(
        name="StokerGpuThrottled",
        expr=f'avg_over_time(stoker_gpu_throttled{{reason=~"{_SLOWED}"}}[5m]) > 0.5',
        lasts="5m",
        severity=Severity.TICKET,
        summary=f"{_WHERE} is slowed down: {{{{ $labels.reason }}}}",
        description="Heat or the power supply keeps its clocks low for more than half of the time.",
    ),
    Alert(
        name="StokerGpuEccErrors",
        expr='increase(stoker_gpu_ecc_errors_total{kind=~".*uncorrected.*"}[1h]) > 0',
        severity=Severity.PAGE,
        summary=f"{_WHERE} has uncorrected ECC errors",
        description="Its memory had errors that could not be corrected: results since then may be wrong, and the card may have to be replaced.",
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
        summary=f"{_WHERE} is lost: the driver cannot reach it",
        description="The GPU fell off the bus: programs on it have failed or hang. Reset the GPU, or reboot the machine.",
    ),
)
