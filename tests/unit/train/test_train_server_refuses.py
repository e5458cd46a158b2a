"""What a parameter server cannot do, having no one step after the other, is refused by name."""

from __future__ import annotations

import re
from typing import Any

import keras
import pytest
from tests.integration.train.small import on_one_device

from stoker.core.errors import ConfigError
from stoker.train.config import TensorBoardConfig, TrainConfig
from stoker.train.parameter_server.loop import refuse_ordered_settings
from stoker.train.setup.build_model import BuiltModel


class _OwnStep(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def refuse(
    config: dict[str, Any], resolved: dict[str, Any], model: type[keras.Model] = keras.Sequential
) -> None:
    built = model([keras.Input((2,)), keras.layers.Dense(1)])
    built.compile(optimizer="sgd", loss="mse")
    given = BuiltModel(model=built, adapt=lambda features: features)
    refuse_ordered_settings(given, TrainConfig(**config), on_one_device(**resolved))


@pytest.mark.parametrize(
    ("config", "resolved", "said"),
    [
        ({"deterministic": True}, {}, "train.deterministic"),
        ({"xla": True}, {}, "train.xla: true"),
        ({"on_nan": "rollback"}, {}, "train.on_nan: rollback"),
        ({"reduction_dtype": "bfloat16"}, {}, "train.reduction_dtype: bfloat16"),
        ({"reduction_bytes_per_pack": 1024}, {}, "train.reduction_bytes_per_pack: 1024"),
        ({}, {"accumulate": 4}, "train.accumulate: 4"),
        ({}, {"replicas": 2}, "train.replicas: 2"),
        ({"tensorboard": TensorBoardConfig(profile="2:3")}, {}, "train.tensorboard.profile"),
        (
            {"tensorboard": TensorBoardConfig(histograms_every_steps=5)},
            {},
            "train.tensorboard.histograms_every_steps",
        ),
        (
            {"tensorboard": TensorBoardConfig(embeddings={"words": None})},
            {},
            "train.tensorboard.embeddings",
        ),
    ],
)
def test_what_needs_one_step_after_the_other_is_refused_by_name(
    config: dict[str, Any], resolved: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Received: {said}.")):
        refuse(config, resolved)


def test_a_step_of_the_models_own_is_refused_and_a_plain_training_is_not() -> None:
    with pytest.raises(ConfigError, match="a model with a train_step of its own"):
        refuse({}, {}, _OwnStep)

    refuse({}, {})
    refuse({"tensorboard": TensorBoardConfig(histograms_every_steps=0)}, {})
