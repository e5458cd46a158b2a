"""The order of the calls that connect to a TPU; the TPU is simulated."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.cluster.devices import Devices
from stoker.core.errors import ConfigError
from stoker.train.config import AutoInputs, TrainConfig, resolve
from stoker.train.setup.strategy import TPU_UNTESTED, Distribution, _tpu

CPU = Devices(cpu_cores=2, memory_bytes=2**34, gpus=())
GROUNDS: dict[str, Any] = {"devices": CPU, "rows": 5000, "string_features": False}
TPU: dict[str, Any] = {"strategy": "tpu", "replicas": 8}


def reach(*, replicas: int, hosts: int = 1) -> tuple[list[tuple[Any, ...]], Distribution]:
    """What was done in which order to reach a TPU of 8 cores, and what came of it."""
    done: list[tuple[Any, ...]] = []

    def step(name: str, answer: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            done.append((name, *arguments, *named.values()))
            return answer

        return call

    there = SimpleNamespace(num_replicas_in_sync=8, extended=SimpleNamespace(num_hosts=hosts))
    distribution = _tpu(
        "pod-7",
        replicas=replicas,
        make_resolver=step("resolve", "resolver"),
        connect=step("connect", None),
        initialize=step("initialize", None),
        make_strategy=step("strategy", there),
    )
    return done, distribution


def test_a_tpu_is_connected_then_initialized_then_given_a_strategy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        done, distribution = reach(replicas=8)

    assert done == [
        ("resolve", "pod-7"),
        ("connect", "resolver"),
        ("initialize", "resolver"),
        ("strategy", "resolver"),
    ]
    assert (distribution.name, distribution.replicas, distribution.workers) == ("tpu", 8, 1)
    assert TPU_UNTESTED in caplog.messages
    assert "not run on hardware" in TPU_UNTESTED


def test_a_tpu_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match="needs a TPU that this machine can reach"):
        _tpu("", replicas=8)


def test_a_tpu_of_another_size_or_of_several_hosts_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be the number of the TPU's cores") as wrong:
        reach(replicas=4)
    assert "This TPU has 8" in wrong.value.line()
    with pytest.raises(ConfigError, match="a TPU of one host"):
        reach(replicas=8, hosts=4)


@pytest.mark.parametrize(
    ("settings", "inputs", "named"),
    [
        ({}, {"string_features": True}, "features that are strings"),
        ({"precision": "mixed_float16"}, {}, "mixed_float16"),
        ({"xla": False}, {}, "train.xla"),
        ({"xla": True}, {}, "train.xla"),
        ({}, {"batches_from_elsewhere": True}, "data.service"),
        ({}, {"workers": 2}, "several workers"),
        ({"replicas": "auto"}, {}, "train.replicas: auto"),
        ({"batch_size": 1000}, {}, "5000 rows, and 8000 rows per step"),
    ],
)
def test_what_a_tpu_cannot_do_is_refused_by_name(
    settings: dict[str, Any], inputs: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(TrainConfig(**TPU | settings), AutoInputs(**GROUNDS | inputs))

    assert named in refused.value.line()
    assert "tpu" in refused.value.line()


def test_a_tpu_computes_in_bfloat16_and_takes_whole_steps() -> None:
    settings = TPU | {"batch_size": 100, "steps_per_call": 50}

    resolved = resolve(TrainConfig(**settings), AutoInputs(**GROUNDS))

    assert (resolved.strategy, resolved.replicas, resolved.workers) == ("tpu", 8, 1)
    assert (resolved.precision, resolved.xla) == ("mixed_bfloat16", False)
    # 5000 rows are 6 whole steps of 800.
    assert resolved.steps_per_call == 6
