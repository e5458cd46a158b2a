"""Which way a monitored metric is better."""

from __future__ import annotations

import pytest

from stoker.train.config import TrainConfig
from stoker.train.context.monitor import resolve_monitor_mode


@pytest.mark.parametrize(
    ("monitor", "outputs", "mode"),
    [
        ("val_loss", ("",), "min"),
        ("val_accuracy", ("",), "max"),
        ("val_mean_absolute_error", ("",), "min"),
        ("val_loss_accuracy", ("loss", "kind"), "max"),
        ("val_loss_loss", ("loss", "kind"), "min"),
        ("val_error_kind_auc", ("error", "error_kind"), "max"),
        ("val_blossom_mae", ("blossom", "kind"), "min"),
        ("val_loss", ("loss", "kind"), "min"),
    ],
)
def test_an_outputs_name_says_nothing_of_its_metrics(
    monitor: str, outputs: tuple[str, ...], mode: str
) -> None:
    assert resolve_monitor_mode(TrainConfig(monitor=monitor), outputs).monitor_mode == mode


def test_what_is_said_holds() -> None:
    config = TrainConfig(monitor="val_loss", monitor_mode="max")

    assert resolve_monitor_mode(config, ("",)).monitor_mode == "max"
