"""The line of progress, and the settings of what is watched."""

from __future__ import annotations

import pytest

from stoker.core.config import build
from stoker.core.errors import ConfigError
from stoker.train.config import TensorBoardConfig, profiled_steps
from stoker.train.watch.progress_line import ProgressLine


def test_the_line_says_where_how_fast_how_busy_and_how_good() -> None:
    line = ProgressLine(steps=4000, epochs=10, monitor="val_auc")
    line(
        step=1200,
        epoch=3,
        scalars={"val_auc": 0.912345, "val_loss": 0.33444, "epoch": 3.0},
    )
    scalars = {
        "loss": 0.31234,
        "step_time_s": 0.01234,
        "samples_per_s": 10412.4,
        "busy_fraction": 0.931,
        "input_wait": 0.0121,
    }

    assert line(step=1250, epoch=3, scalars=scalars) == (
        "epoch 4/10, step 1,250/4,000, 12.3 ms/step, 10,412 samples/s, U 93%, W 1.2%, "
        "loss 0.3123, val_loss 0.3344, val_auc 0.9123"
    )


def test_what_is_not_known_yet_is_not_shown() -> None:
    line = ProgressLine(steps=4, epochs=2, monitor="val_loss")

    assert line(step=1, epoch=0, scalars={"loss": 1.0}) == "epoch 1/2, step 1/4, loss 1"
    assert line(step=4, epoch=2, scalars={}) == "epoch 2/2, step 4/4, loss 1"


def test_noise_above_a_busy_fraction_of_one_is_not_shown() -> None:
    line = ProgressLine(steps=4, epochs=2, monitor="val_loss")

    assert "U 100%" in line(step=1, epoch=0, scalars={"busy_fraction": 1.07})


@pytest.mark.parametrize("profile", ["20", "0:5", "9:3", "a:b", "1:2:3", "-1:4", ""])
def test_a_profile_of_no_steps_is_refused(profile: str) -> None:
    with pytest.raises(ConfigError, match="must be START:STOP"):
        TensorBoardConfig(profile=profile)


def test_the_settings_are_read_from_yamls_values() -> None:
    raw = {"embeddings": {"city": "city", "color": None}, "profile": "20:30"}
    config = build(TensorBoardConfig, raw)

    assert config.embeddings == {"city": "city", "color": None}
    assert profiled_steps(config.profile or "") == (20, 30)
    with pytest.raises(ConfigError, match="at least 0"):
        build(TensorBoardConfig, {"histograms_every_steps": -1})
