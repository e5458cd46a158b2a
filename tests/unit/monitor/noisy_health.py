"""Healthy hours as they really are: noise, peaks, validations, a restart, a new version; one sample a minute."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import exp

from tests.unit.monitor.alert_cases import GPU, HOUR, MODEL, RUN, SERVER, VERSION

MINUTES = 4 * HOUR
_RARE = f'{SERVER},model_name="rare"'
_random = random.Random(28)


def _values(value_of: Callable[[int], float]) -> str:
    return _text(value_of(minute) for minute in range(MINUTES))


def _text(values: Iterable[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)


def _near(mean: float, spread: float, *, peak: float, peak_share: float = 0.02) -> str:
    """Around a mean, with a peak of one sample now and then."""
    return _values(
        lambda _: peak if _random.random() < peak_share else abs(_random.gauss(mean, spread))
    )


def _counter(per_minute: Callable[[int], float]) -> str:
    return _text(accumulate(per_minute(minute) for minute in range(MINUTES)))


def _validates(minute: int) -> bool:
    """Four minutes in every forty."""
    return minute % 40 >= 36


def _training() -> dict[str, str]:
    loss = (
        f"stoker_train_loss{{{RUN}}}",
        # It falls, each call has its own, and the learning rate's warm restart is a bump.
        _values(
            lambda m: (
                (0.3 + 2 * exp(-m / 60) + 0.2 * (100 < m < 130)) * _random.lognormvariate(0, 0.4)
            )
        ),
    )
    waits = _values(lambda m: 0.6 if m < 4 or m % 90 == 0 else abs(_random.gauss(0.05, 0.03)))
    return {
        loss[0]: loss[1],
        f"stoker_train_input_wait_ratio{{{RUN}}}": waits,
        f"stoker_train_goodput_ratio{{{RUN}}}": _values(lambda m: min(0.93, 0.1 + 0.03 * m)),
        f"stoker_train_checkpoint_age_seconds{{{RUN}}}": _values(lambda m: m % 50 * 60),
        f'stoker_train_straggler_ratio{{{RUN},worker="0"}}': _near(0.98, 0.05, peak=1.4),
        f'stoker_train_straggler_ratio{{{RUN},worker="1"}}': _near(1.02, 0.05, peak=1.4),
        f"stoker_gpu_sm_active_ratio{{{GPU}}}": _values(
            lambda m: 0.0 if _validates(m) else _random.uniform(0.6, 1.0)
        ),
        f"stoker_gpu_temperature_celsius{{{GPU}}}": _near(78, 3, peak=88),
        f'stoker_gpu_throttled{{{GPU},reason="heat (driver)"}}': _values(
            lambda _: float(_random.random() < 0.1)
        ),
        f"stoker_gpu_memory_used_bytes{{{GPU}}}": _near(7.6e10, 2e8, peak=7.9e10),
        'stoker_exporter_last_sample_age_seconds{instance="h:9400",job="stoker-exporter"}': _near(
            0.5, 0.3, peak=60
        ),
    }


def _requests(labels: str, rate: Callable[[int], float], *, failed: float) -> dict[str, str]:
    """Requests of a model, some of which fail, and 0.5 % of which are slow."""
    noisy = [max(0.0, _random.gauss(rate(m), rate(m) ** 0.5)) for m in range(MINUTES)]
    found = {
        f'stoker_request_count{{{labels},status="OK"}}': _counter(lambda m: noisy[m]),
        f'stoker_request_count{{{labels},status="INTERNAL"}}': _counter(
            lambda m: float(_random.random() < failed * noisy[m])
        ),
        f"stoker_request_latency_count{{{labels}}}": _counter(lambda m: noisy[m]),
    }
    for bound, share in (("37481.3", 0.995), ("67466.4", 0.995), ("121440", 1.0), ("+Inf", 1.0)):
        name = f'stoker_request_latency_bucket{{{labels},le="{bound}"}}'
        found[name] = _text(accumulate(share * each for each in noisy))
    return found


def _serving() -> dict[str, str]:
    """A model under a load that doubles at noon, one that is seldom called, and a restart of the server."""
    busy = _requests(VERSION, lambda m: 600 * (1 + (m > 120)), failed=0.0002)
    rare = _requests(f'{_RARE},version="1"', lambda _: 3, failed=0.01)
    grown = accumulate([2e9, *(_random.choice([0, 0, 2e5]) for _ in range(MINUTES - 1))])
    return {
        **busy,
        **rare,
        f"up{{{SERVER}}}": _values(lambda m: float(m not in {60, 61})),
        f"stoker_queued_requests{{{MODEL}}}": _near(0.1, 0.1, peak=4),
        f"stoker_queued_requests{{{_RARE}}}": _near(0.0, 0.0, peak=1),
        f'stoker_requests_without_thread{{{SERVER},entrypoint="REST"}}': _near(0, 0, peak=3),
        f"stoker_model_loaded{{{VERSION}}}": "1+0x150 stale",
        f'stoker_model_loaded{{{MODEL},version="8"}}': f"_x149 1+0x{MINUTES}",
        f'process_resident_memory_bytes{{{SERVER},worker="0"}}': _text(grown),
        f'stoker_prediction_skew_ratio{{{MODEL},column="fare"}}': _near(0.06, 0.04, peak=0.3),
        f'stoker_prediction_drift_ratio{{{MODEL},column="fare"}}': _near(0.06, 0.04, peak=0.3),
    }


NOISY = {**_training(), **_serving()}
"""Replaces series of `HEALTHY`."""
