"""`train.reduction_bytes_per_pack`: it reaches TensorFlow, and no weight is another one for it."""

from __future__ import annotations

import itertools
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.integration.train.killed import Trainer
from tests.integration.train.small import small_dataset

from stoker.cluster.devices import Devices
from stoker.core.errors import ConfigError
from stoker.data.features.preprocessing.build import build_transform
from stoker.train.config import AutoInputs, TrainConfig, resolve
from stoker.train.setup.strategy import PACKS_WITHOUT_EFFECT, make_distribution
from stoker.train.step.custom_train_step import check_custom_train_step

GRADIENTS = 4
"""Of the model `plain`: two kernels, two biases."""

PACKS = {0: 1, 1: GRADIENTS + 1, 40: 2}
"""Bytes of a pack -> packs; the sums of losses and rows go with the gradients."""


@pytest.fixture(scope="module")
def trained(
    trainer: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[list[Any]], list[int]]:
    """The weights of each scenario, and in how many packs TensorFlow sent, in its order."""
    folder = tmp_path_factory.mktemp("packs")
    dataset = small_dataset(folder / "dataset")
    transform = build_transform(dataset, None, folder / "transform", label="y")
    scenarios = [
        {"model": "plain", "replicas": 2, "settings": {"reduction_bytes_per_pack": size_bytes}}
        for size_bytes in PACKS
    ]
    trainer.script(
        Path(__file__).with_name("packs_child.py"),
        *(dataset.root, transform.root, folder),
        stdin=json.dumps(scenarios),
    )
    said = (folder / "sent.log").read_text().splitlines()
    sent = [re.findall(r"tensors: (\d+) all_reduces.*num_packs = (\d+)", line) for line in said]
    packs = [int(packs) for [(tensors, packs)] in sent if int(tensors) == GRADIENTS + 1]
    weights = [
        list(np.load(folder / str(index) / "weights.npz").values())
        for index in range(len(scenarios))
    ]
    return weights, packs


@pytest.mark.soak
def test_gradients_go_in_the_configured_number_of_packs(trained: tuple[Any, list[int]]) -> None:
    _, packs = trained

    assert [count for count, _ in itertools.groupby(packs)] == list(PACKS.values())


@pytest.mark.soak
def test_however_they_are_packed_two_replicas_sum_to_the_same_bits(
    trained: tuple[list[list[Any]], Any],
) -> None:
    (plain, *others), _ = trained

    assert any(np.any(value != 0) for value in plain)
    for other in others:
        for ours, theirs in zip(plain, other, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_pack_size_without_effect_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_distribution("one_device", replicas=1, reduction_bytes_per_pack=1 << 20)
    assert caplog.messages == [PACKS_WITHOUT_EFFECT]

    caplog.clear()
    make_distribution("one_device", replicas=1)
    assert caplog.messages == []


def test_a_size_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.reduction_bytes_per_pack must be at least 0"):
        TrainConfig(reduction_bytes_per_pack=-1)
    assert TrainConfig(reduction_bytes_per_pack=1 << 30).reduction_bytes_per_pack == 1 << 30


CPU = Devices(cpu_cores=2, memory_bytes=2**34, gpus=())
GROUNDS: dict[str, Any] = {"devices": CPU, "rows": 1000, "string_features": False}


def test_a_step_of_the_users_own_between_replicas_and_a_tpu_refuse_it() -> None:
    class Own(keras.Model):  # type: ignore[misc]  # Keras has no types
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    config = TrainConfig(reduction_bytes_per_pack=1 << 20, replicas=2)
    mirrored = resolve(config, AutoInputs(**GROUNDS))
    with pytest.raises(ConfigError, match=r"train\.reduction_bytes_per_pack"):
        check_custom_train_step(Own(), config, mirrored)
    # Between workers the strategy itself cuts into packs.
    check_custom_train_step(Own(), config, replace(mirrored, strategy="multi_worker", workers=2))

    on_tpu = TrainConfig(reduction_bytes_per_pack=1 << 20, strategy="tpu", replicas=8)
    with pytest.raises(ConfigError, match=r"train\.reduction_bytes_per_pack"):
        resolve(on_tpu, AutoInputs(**GROUNDS))
