"""The section `train.elastic`, and what is refused with it."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.cluster.devices import Devices
from stoker.core.errors import ConfigError
from stoker.train.config import AutoInputs, ResolvedTraining, TrainConfig, resolve
from stoker.train.elastic import ElasticConfig, require_size

CPU = Devices(cpu_cores=2, memory_bytes=2**34, gpus=())


def resolved(config: TrainConfig, **inputs: Any) -> ResolvedTraining:
    plain: dict[str, Any] = {"devices": CPU, "rows": 12_000, "string_features": False}
    return resolve(config, AutoInputs(**plain | inputs))


@pytest.mark.parametrize(
    ("fewest", "most", "sizes"),
    [(1, 8, (1, 2, 4, 8)), (2, 8, (2, 4, 8)), (3, 8, (4, 8)), (2, 6, (2, 3, 6)), (7, 7, (7,))],
)
def test_allowed_numbers_of_workers_are_divisors(
    fewest: int, most: int, sizes: tuple[int, ...]
) -> None:
    elastic = ElasticConfig(min=fewest, max=most)

    assert elastic.sizes == sizes
    for workers in range(1, most + 2):
        if workers in sizes:
            require_size(elastic, workers)
        else:
            with pytest.raises(ConfigError, match="must have " + ", ".join(map(str, sizes))):
                require_size(elastic, workers)


@pytest.mark.parametrize("wrong", [{"max": 1}, {"max": 4, "min": 5}, {"max": 4, "min": 0}])
def test_impossible_numbers_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"train\.elastic\.(min|max) must be from"):
        ElasticConfig(**wrong)


def test_a_step_is_the_same_for_every_number_of_workers() -> None:
    config = TrainConfig(elastic=ElasticConfig(max=4), scale_lr="linear")

    alone, of_two, of_four = (resolved(config, workers=workers) for workers in (1, 2, 4))

    assert [one.replicas for one in (alone, of_two, of_four)] == [1, 2, 4]
    for one in (alone, of_two, of_four):
        assert (one.virtual_workers, one.batch_size, one.global_batch) == (4, 32, 128)
        assert (one.lr_factor, one.steps_per_call, one.xla_trial) == (4.0, 50, False)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"accumulate": 2}, "train.accumulate: 2"),
        ({"reduction_dtype": "bfloat16"}, "train.reduction_dtype: bfloat16"),
        ({"strategy": "parameter_server"}, "train.strategy: parameter_server"),
        ({"strategy": "tpu", "replicas": 8}, "train.strategy: tpu"),
    ],
)
def test_settings_with_which_a_step_would_depend_on_the_workers_are_refused(
    settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(elastic=ElasticConfig(max=4), **settings)

    assert f"Received: {named}." in caught.value.line()


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"data_service": True, "batches_from_elsewhere": True}, "data.service"),
        ({"workers": 2, "parameter_servers": 1}, "parameter servers"),
    ],
)
def test_surroundings_that_would_change_a_step_are_refused(
    inputs: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"Received: {named}"):
        resolved(TrainConfig(elastic=ElasticConfig(max=4)), **inputs)
