"""A healthy machine and its faults, as series of one sample a minute, and the alerts that each has to raise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GPU = 'instance="h:9400",job="stoker-exporter",gpu="0",uuid="GPU-1"'
RUN = 'instance="h:9500",job="stoker-train",run="r1"'
SERVER = 'instance="h:8501",job="stoker-server"'
MODEL = f'{SERVER},model_name="taxi"'
VERSION = f'{MODEL},version="7"'

HOUR = 60
"""Samples."""


def flat(value: float) -> str:
    """A series that keeps its value for as long as a case lasts."""
    return f"{value}+0x{{n}}"


def rising(per_minute: float, start: float = 0.0) -> str:
    return f"{start}+{per_minute}x{{n}}"


def latency(*, slow_share: float, per_minute: float = 600.0) -> dict[str, str]:
    """Requests of which a share takes 67 to 121 ms, and the others less than 37 ms."""
    fast = rising(per_minute * (1.0 - slow_share))
    bounds = {"37481.3": fast, "67466.4": fast, "121440": rising(per_minute)}
    buckets = {**bounds, "+Inf": rising(per_minute)}
    return {
        f'stoker_request_latency_bucket{{{VERSION},le="{le}"}}': values
        for le, values in buckets.items()
    } | {f"stoker_request_latency_count{{{VERSION}}}": rising(per_minute)}


def requests(per_minute: float, **failed_per_minute: float) -> dict[str, str]:
    name = f"stoker_request_count{{{VERSION},status="
    return {f'{name}"OK"}}': rising(per_minute)} | {
        f'{name}"{status}"}}': rising(rate) for status, rate in failed_per_minute.items()
    }


HEALTHY: dict[str, str] = {
    'up{instance="h:9400",job="stoker-exporter"}': flat(1),
    f"up{{{SERVER}}}": flat(1),
    'up{instance="h:9500",job="stoker-train"}': flat(1),
    'up{instance="other:80",job="not-ours"}': flat(0),
    'stoker_exporter_last_sample_age_seconds{instance="h:9400",job="stoker-exporter"}': flat(1),
    f"stoker_gpu_sm_active_ratio{{{GPU}}}": flat(0.97),
    f"stoker_gpu_kernel_ran_ratio{{{GPU}}}": flat(1),
    f'stoker_gpu_process_memory_bytes{{{GPU},pid="7",run="r1",model=""}}': flat(4e10),
    f"stoker_gpu_temperature_celsius{{{GPU}}}": flat(71),
    f'stoker_gpu_throttled{{{GPU},reason="power limit"}}': flat(1),
    f'stoker_gpu_throttled{{{GPU},reason="heat (hardware)"}}': flat(0),
    f'stoker_gpu_ecc_errors_total{{{GPU},kind="corrected"}}': rising(1),
    f'stoker_gpu_ecc_errors_total{{{GPU},kind="uncorrected"}}': flat(2),
    f"stoker_gpu_memory_used_bytes{{{GPU}}}": flat(7.6e10),
    f"stoker_gpu_memory_bytes{{{GPU}}}": flat(8e10),
    f"stoker_gpu_lost{{{GPU}}}": flat(0),
    f"stoker_train_input_wait_ratio{{{RUN}}}": flat(0.02),
    f"stoker_train_busy_ratio{{{RUN}}}": flat(0.98),
    f"stoker_train_loss{{{RUN}}}": "2-0.0001x{n}",
    f"stoker_train_checkpoint_age_seconds{{{RUN}}}": flat(600),
    f"stoker_train_goodput_ratio{{{RUN}}}": flat(0.95),
    f'stoker_train_straggler_ratio{{{RUN},worker="0"}}': flat(0.95),
    f'stoker_train_straggler_ratio{{{RUN},worker="1"}}': flat(1.05),
    **requests(600, INVALID_ARGUMENT=60, INTERNAL=0.3),
    **latency(slow_share=0.005),
    f"stoker_queued_requests{{{MODEL}}}": flat(0.1),
    f'stoker_requests_without_thread{{{SERVER},entrypoint="REST"}}': flat(0.005),
    f'stoker_requests_without_thread{{{SERVER},entrypoint="GRPC"}}': flat(0),
    f"stoker_model_loaded{{{VERSION}}}": flat(1),
    f'process_resident_memory_bytes{{{SERVER},worker="0"}}': rising(1e4, 2e9),
    f'stoker_prediction_skew_ratio{{{MODEL},column="fare"}}': flat(0.05),
    f'stoker_prediction_drift_ratio{{{MODEL},column="fare"}}': flat(0.05),
    f'stoker_rollout_phase{{{MODEL},phase="running"}}': flat(1),
    f'stoker_rollout_phase{{{MODEL},phase="rolled back"}}': flat(0),
}
"""Two of ten thousand requests fail by the server's fault, one in eleven by the client's."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What differs from health, and what has to fire when."""

    name: str
    changed: Mapping[str, str]
    fires: Mapping[str, set[str]]
    """Time -> the alerts that fire then, Watchdog left out."""
    minutes: int = HOUR
    """Samples of each series, which may be more than are read."""
    every: str = "1m"
    """Between two samples, and between two evaluations."""

    def as_test(self) -> dict[str, Any]:
        """A test for `promtool test rules`."""
        series = {**HEALTHY, **self.changed}
        return {
            "interval": self.every,
            "name": self.name,
            "input_series": [
                {"series": name, "values": values.format(n=self.minutes)}
                for name, values in series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing",alertname!="Watchdog"}) > bool 0',
                    "eval_time": at,
                    "exp_samples": [
                        {"labels": f'{{alertname="{alert}"}}', "value": 1}
                        for alert in sorted(alerts)
                    ],
                }
                for at, alerts in self.fires.items()
            ],
        }


def after(minutes: int, before: float, then: float) -> str:
    """A value that is another one after some minutes."""
    return f"{before}+0x{minutes - 1} {then}+0x{{n}}"


def fault(alert: str, changed: Mapping[str, str], *, early: str = "9m", late: str = "18m") -> Case:
    """A fault that starts after 5 minutes: the alert does not fire early, and alone fires late."""
    return Case(name=alert, changed=changed, fires={early: set(), late: {alert}})


def near(alert: str, changed: Mapping[str, str], *, late: str = "22m") -> Case:
    """Close to the limit of an alert, but healthy."""
    return Case(name=f"almost {alert}", changed=changed, fires={"11m": set(), late: set()})


_IDLE = f"stoker_gpu_sm_active_ratio{{{GPU}}}"
_HELD = f'stoker_gpu_process_memory_bytes{{{GPU},pid="7",run="r1",model=""}}'
_HOT = f"stoker_gpu_temperature_celsius{{{GPU}}}"
_SLOWED = f'stoker_gpu_throttled{{{GPU},reason="heat (hardware)"}}'
_ECC = f'stoker_gpu_ecc_errors_total{{{GPU},kind="uncorrected"}}'
_USED = f"stoker_gpu_memory_used_bytes{{{GPU}}}"
_AGE = 'stoker_exporter_last_sample_age_seconds{instance="h:9400",job="stoker-exporter"}'
_WAIT = f"stoker_train_input_wait_ratio{{{RUN}}}"
_LOSS = f"stoker_train_loss{{{RUN}}}"
_CHECKPOINT = f"stoker_train_checkpoint_age_seconds{{{RUN}}}"
_GOODPUT = f"stoker_train_goodput_ratio{{{RUN}}}"
_WORKER = f'stoker_train_straggler_ratio{{{RUN},worker="1"}}'
QUEUED = f"stoker_queued_requests{{{MODEL}}}"
_HUNG, _HUNG_VERSION = (text.replace("taxi", "hung") for text in (MODEL, VERSION))
"""A model that answers nothing, on a server whose other model does."""

_WITHOUT_THREAD = f'stoker_requests_without_thread{{{SERVER},entrypoint="REST"}}'
_LOADED = f"stoker_model_loaded{{{VERSION}}}"
_LOADING = f'stoker_model_loaded{{{MODEL},version=""}}'
_NEWER = f'stoker_model_loaded{{{MODEL},version="8"}}'
_MEMORY = f'process_resident_memory_bytes{{{SERVER},worker="0"}}'
_SKEW = f'stoker_prediction_skew_ratio{{{MODEL},column="fare"}}'
_DRIFT = f'stoker_prediction_drift_ratio{{{MODEL},column="fare"}}'
_ROLLED_BACK = f'stoker_rollout_phase{{{MODEL},phase="rolled back"}}'

FAULTS: tuple[Case, ...] = (
    fault("StokerTargetDown", {f"up{{{SERVER}}}": after(5, 1, 0)}, early="6m"),
    fault("StokerExporterWithoutData", {_AGE: after(5, 1, 301)}, early="5m"),
    fault("StokerGpuIdle", {_IDLE: after(5, 0.97, 0.01)}, early="10m"),
    fault("StokerGpuHot", {_HOT: after(5, 71, 88)}),
    fault("StokerGpuThrottled", {_SLOWED: after(5, 0, 1)}),
    fault("StokerGpuEccErrors", {_ECC: after(5, 2, 3)}, early="4m"),
    fault("StokerGpuMemoryNearlyFull", {_USED: after(5, 7.6e10, 7.9e10)}, early="14m"),
    fault("StokerGpuLost", {f"stoker_gpu_lost{{{GPU}}}": after(5, 0, 1)}, early="4m"),
    fault("StokerInputBound", {_WAIT: after(5, 0.02, 0.5)}),
    fault("StokerLossNotFinite", {_LOSS: after(5, 2, float("nan"))}, early="4m"),
    Case(
        name="StokerLossNotFinite: infinite",
        changed={_LOSS: "2+0x4 +Inf"},
        fires={"4m": set(), "5m": {"StokerLossNotFinite"}},
    ),
    fault("StokerLossDiverging", {_LOSS: after(5, 1, 2.5)}, early="19m", late="32m"),
    fault("StokerNoCheckpoint", {_CHECKPOINT: rising(60, 1200)}, early="40m", late="45m"),
    fault("StokerGoodputLow", {_GOODPUT: after(5, 0.95, 0.6)}, early="34m", late="40m"),
    fault("StokerStraggler", {_WORKER: after(5, 1, 1.3)}),
    Case(
        name="StokerErrorBudgetBurn in five minutes: 30 % of requests fail",
        changed=requests(600, UNAVAILABLE=260),
        fires={"0m": set(), "5m": {"StokerErrorBudgetBurn"}},
    ),
    Case(
        name="StokerErrorBudgetBurn over six hours: 1 % fail, and the ticket later",
        changed=requests(600, INTERNAL=6),
        fires={
            "10m": {"StokerErrorBudgetBurn"},
            "120m": {"StokerErrorBudgetBurn", "StokerErrorBudgetBurnSlow"},
        },
        minutes=2 * HOUR,
    ),
    Case(
        name="StokerErrorBudgetBurnSlow: 0.2 % fail",
        changed=requests(600, INTERNAL=1.2),
        fires={"30m": set(), "120m": {"StokerErrorBudgetBurnSlow"}},
        minutes=2 * HOUR,
    ),
    Case(
        name="StokerLatencyBudgetBurn: 20 % are too slow",
        changed=latency(slow_share=0.2),
        fires={"0m": set(), "10m": {"StokerLatencyBudgetBurn"}},
    ),
    Case(
        name="StokerLatencyBudgetBurnSlow: 2 % are too slow",
        changed=latency(slow_share=0.02),
        fires={"30m": set(), "120m": {"StokerLatencyBudgetBurnSlow"}},
        minutes=2 * HOUR,
    ),
    fault("StokerQueueGrowing", {QUEUED: after(5, 0.1, 2)}),
    fault("StokerQueueGrowing", {_WITHOUT_THREAD: after(5, 0, 2)}),
    fault(
        "StokerQueueGrowing",
        {
            **requests(0, INTERNAL=0, INVALID_ARGUMENT=0),
            **latency(slow_share=0.0, per_minute=0),
            QUEUED: after(5, 0, 1),
        },
    ),
    fault("StokerQueueGrowing", {QUEUED: "_", _WITHOUT_THREAD: after(5, 0, 2)}),
    fault(
        "StokerQueueGrowing",
        {
            f'stoker_request_count{{{_HUNG_VERSION},status="OK"}}': flat(5),
            f"stoker_queued_requests{{{_HUNG}}}": after(5, 0, 1),
        },
    ),
    fault("StokerModelNotLoaded", {_LOADED: after(5, 1, 0)}, early="5m", late="7m"),
    fault("StokerModelNotLoaded", {_LOADED: "1+0x4 stale", _LOADING: "_x5 0+0x{n}"}, early="14m"),
    fault("StokerModelNotLoaded", {_LOADED: "_", _LOADING: flat(0)}, early="9m", late="11m"),
    Case(
        name="StokerServerMemoryGrowth",
        changed={_MEMORY: rising(2.5e7, 2e9)},
        fires={"6h": set(), "505m": {"StokerServerMemoryGrowth"}},
        minutes=9 * HOUR,
        every="5m",
    ),
    fault("StokerPredictionSkew", {_SKEW: after(5, 0.05, 0.3)}, early="30m", late="40m"),
    fault("StokerPredictionDrift", {_DRIFT: after(5, 0.05, 0.3)}, early="30m", late="40m"),
    Case(
        name="StokerRolledBack, for an hour",
        changed={_ROLLED_BACK: after(5, 0, 1)},
        fires={"4m": set(), "6m": {"StokerRolledBack"}, "70m": set()},
        minutes=2 * HOUR,
    ),
)

ALMOST: tuple[Case, ...] = (
    near(
        "StokerErrorBudgetBurn: half of the requests fail, but of one in two seconds",
        {
            **requests(15, INTERNAL=15, INVALID_ARGUMENT=0),
            **latency(slow_share=0.0, per_minute=15),
            QUEUED: flat(0),
        },
    ),
    near("StokerTargetDown", {f"up{{{SERVER}}}": "1+0x9 0 0 1+0x{n}"}),
    near("StokerExporterWithoutData", {_AGE: flat(299)}),
    near("StokerGpuIdle: little, but more than 5 %", {_IDLE: flat(0.06)}),
    near("StokerGpuIdle: no run holds it", {_IDLE: flat(0), _HELD: "_"}),
    near(
        "StokerGpuIdle and others: a card that reports nothing but that it is there",
        {name: "_" for name in HEALTHY if "_gpu_" in name and "_lost" not in name},
    ),
    near("StokerGpuHot", {_HOT: flat(87)}),
    near("StokerGpuThrottled", {_SLOWED: "1 0 0 0 " * 15}),
    near("StokerGpuMemoryNearlyFull", {_USED: flat(7.7e10)}),
    near("StokerInputBound", {_WAIT: flat(0.19)}),
    near("StokerLossDiverging: a peak", {_LOSS: "1+0x9 9 1+0x{n}"}),
    near("StokerLossDiverging: a noisy loss", {_LOSS: "1 0.3 0.8 0.25 " * 15}),
    near(
        "StokerLossDiverging: a loss that falls to a quarter in ten minutes",
        {_LOSS: " ".join(f"{8 * 0.87**minute:.4f}" for minute in range(HOUR))},
        late="40m",
    ),
    near("StokerNoCheckpoint", {_CHECKPOINT: flat(3599)}),
    near("StokerGoodputLow: a run that has begun", {_GOODPUT: "0.1 0.3 0.5+0.01x{n}"}, late="40m"),
    near("StokerStraggler", {_WORKER: flat(1.19)}),
    near("StokerLatencyBudgetBurn", latency(slow_share=0.009)),
    near("StokerQueueGrowing", {QUEUED: flat(0.4)}),
    near(
        "StokerQueueGrowing: another server's requests wait",
        {_WITHOUT_THREAD.replace("h:8501", "other:8501"): flat(99)},
    ),
    near(
        "StokerQueueGrowing: one scrape of a model with few requests sees one wait",
        {
            **requests(6, INTERNAL=0, INVALID_ARGUMENT=0),
            **latency(slow_share=0.0, per_minute=6),
            QUEUED: "0+0x8 1 0+0x{n}",
        },
    ),
    near("StokerQueueGrowing: a server of an earlier release", {_WITHOUT_THREAD: "_"}),
    Case(
        name="almost StokerServerMemoryGrowth",
        changed={_MEMORY: rising(1e5, 2e9)},
        fires={"505m": set()},
        minutes=9 * HOUR,
        every="5m",
    ),
    near("StokerPredictionSkew", {_SKEW: flat(0.19)}, late="36m"),
    near("StokerPredictionDrift", {_DRIFT: flat(0.19)}, late="36m"),
    near(
        "StokerModelNotLoaded: a newer version replaced it",
        {_LOADED: "1+0x20 stale", _NEWER: "_x18 1+0x{n}"},
    ),
    near("StokerModelNotLoaded: a newer version failed", {_NEWER: "_x5 0+0x{n}"}),
    near("StokerModelNotLoaded: removed on purpose", {_LOADED: "1+0x5 stale"}),
    near(
        "StokerModelNotLoaded: a server starts again and loads for nine minutes, its newest version in vain",
        {_LOADED: "1+0x4 stale _x8 1+0x{n}", _LOADING: "_x5 0+0x8 stale", _NEWER: "_x7 0+0x{n}"},
    ),
)

HEALTH: tuple[Case, ...] = (
    Case(name="a healthy hour", changed={}, fires={f"{m}m": set() for m in range(1, 61)}),
)
