from __future__ import annotations

from typing import Any

import pytest

from stoker.core.errors import ConfigError
from stoker.evaluate.config import EvaluateConfig, Gate, SliceGate, slice_columns


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"metrics": ("acuracy",)}, "Did you mean 'accuracy'"),
        ({"metrics": ("acc",)}, "Did you mean 'accuracy'"),
        ({"gates": {"aucc": Gate(min=0.5)}}, "Did you mean 'auc'"),
        ({"slice_gates": {"aucc": SliceGate(slices=("x",), min=0.5)}}, "Did you mean 'auc'"),
        ({"gates": {"auc": Gate()}}, r"evaluate\.gates\.auc must set at least one"),
        ({"gates": {"auc": Gate(min=float("nan"))}}, r"evaluate\.gates\.auc\.min must be a finite"),
        ({"gates": {"auc": Gate(max=float("inf"))}}, r"evaluate\.gates\.auc\.max must be a finite"),
        ({"gates": {"auc": Gate(min=True)}}, r"evaluate\.gates\.auc\.min must be a finite"),
        ({"gates": {"auc": Gate(min=0.9, max=0.8)}}, r"auc\.min must not be above .*auc\.max"),
        ({"gates": {"auc": Gate(max_drop=-0.1)}}, r"evaluate\.gates\.auc\.max_drop must be at"),
        ({"gates": {"auc": Gate(max_drop=float("nan"))}}, r"auc\.max_drop must be a finite"),
        ({"gates": {"calibration": Gate(max_drop=0.1)}}, r"calibration\.max_drop needs a metric"),
        ({"slice_gates": {"auc": SliceGate(slices=(), min=0.5)}}, r"slice_gates\.auc\.slices must"),
        ({"slice_gates": {"auc": SliceGate(slices=("x",))}}, r"slice_gates\.auc must set min"),
        (
            {"slice_gates": {"auc": SliceGate(slices=("x",), min=0.5, min_rows=0)}},
            r"slice_gates\.auc\.min_rows must be at least 1",
        ),
        (
            {"slice_gates": {"auc": SliceGate(slices=("x",), min=0.5, max=0.1)}},
            r"slice_gates\.auc\.min must not be above",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_its_full_key(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EvaluateConfig(**arguments)


def test_the_columns_of_slices_and_slice_gates_are_read_once() -> None:
    config = EvaluateConfig(
        slices=("a", "a*b"), slice_gates={"auc": SliceGate(slices=("c", "a"), min=0.5)}
    )

    assert config.all_slices == ("a", "a*b", "c")
    assert slice_columns(config, ["a", "b", "c", "d"]) == ("a", "b", "c")


def test_a_slice_by_an_unknown_column_names_the_nearest() -> None:
    config = EvaluateConfig(slices=("payment_typ",))

    with pytest.raises(ConfigError, match="Did you mean 'payment_type'"):
        slice_columns(config, ["payment_type", "fare"])
