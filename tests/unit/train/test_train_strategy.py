"""The order in which a TPU is reached, with stand-ins for hardware that nobody here has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stoker.cluster.devices import Devices
from stoker.core.errors import ConfigError
from stoker.train.config import Grounds, TrainConfig, resolve
from stoker.train.strategy import _tpu


def test_a_tpu_is_connected_then_initialised_then_given_a_strategy() -> None:
    done: list[tuple[str, Any]] = []

    def step(name: str, answer: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            done.append((name, *arguments, *named.values()))
            return answer

        return call

    distribution = _tpu(
        "pod-7",
        make_resolver=step("resolve", "resolver"),
        connect=step("connect", None),
        initialise=step("initialise", None),
        make_strategy=step("strategy", SimpleNamespace(num_replicas_in_sync=8)),
    )

    assert done == [
        ("resolve", "pod-7"),
        ("connect", "resolver"),
        ("initialise", "resolver"),
        ("strategy", "resolver"),
    ]
    assert (distribution.name, distribution.replicas, distribution.workers) == ("tpu", 8, 1)


def test_a_tpu_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match="needs a TPU that this machine can reach"):
        _tpu("")


def test_training_on_a_tpu_is_refused_with_what_is_missing() -> None:
    cpu = Devices(cpu_cores=2, memory_bytes=2**34, gpus=())

    with pytest.raises(ConfigError, match="a TPU takes batches of one size only"):
        resolve(TrainConfig(strategy="tpu"), Grounds(devices=cpu, rows=9, string_features=False))
