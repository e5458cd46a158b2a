"""The same global batch, however it is spread, trains to the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.train.killed import Trainer

from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform

pytestmark = pytest.mark.timeout(3600)

SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {"model": "plain"},
    "plain on 2": {"model": "plain", "replicas": 2},
    "plain on 4": {"model": "plain", "replicas": 4},
    "plain on 2, streamed": {"model": "plain", "replicas": 2, "memory_bytes": 0},
    "plain on 2, XLA": {"model": "plain", "replicas": 2, "settings": {"xla": True}},
    "plain, 4 passes": {"model": "plain", "settings": {"accumulate": 4}},
    "plain on 2, 4 passes, XLA": {
        "model": "plain",
        "replicas": 2,
        "settings": {"accumulate": 4, "xla": True},
    },
    "clipped": {"model": "plain", "settings": {"clip_norm": 0.05}},
    "clipped on 2": {"model": "plain", "replicas": 2, "settings": {"clip_norm": 0.05}},
    "averaged": {"model": "plain", "settings": {"ema": 0.9}},
    "averaged on 2": {"model": "plain", "replicas": 2, "settings": {"ema": 0.9}},
    "embedded": {"model": "embedded"},
    "embedded on 2": {"model": "embedded", "replicas": 2},
    "embedded on 2, 2 passes": {
        "model": "embedded",
        "replicas": 2,
        "settings": {"accumulate": 2},
    },
    "synced": {"model": "synced"},
    "synced on 2, streamed": {"model": "synced", "replicas": 2, "memory_bytes": 0},
    "dropped on 2": {"model": "dropped", "replicas": 2},
    "dropped on 2, 2 passes": {
        "model": "dropped",
        "replicas": 2,
        "settings": {"accumulate": 2, "xla": True},
    },
    "own loss": {"model": "own_loss"},
    "own loss on 2": {"model": "own_loss", "replicas": 2},
    "own loss on 2, more passes than rows": {
        "model": "own_loss",
        "replicas": 2,
        "settings": {"accumulate": 8},
        "global_batch": 208,
    },
    "sent as bfloat16": {
        "model": "plain",
        "replicas": 2,
        "settings": {"reduction_dtype": "bfloat16"},
    },
    "normed on 2": {"model": "normed", "replicas": 2, "steps_per_call": 1},
    "normed on 2, more a call": {"model": "normed", "replicas": 2, "steps_per_call": 7},
    "bfloat16 on 2": {
        "model": "normed",
        "replicas": 2,
        "settings": {"precision": "mixed_bfloat16"},
    },
    "float16 on 2": {
        "model": "normed",
        "replicas": 2,
        "settings": {"precision": "mixed_float16", "accumulate": 2},
    },
}


SOAK = (
    "plain on 4",
    "plain on 2, streamed",
    "plain on 2, XLA",
    "plain, 4 passes",
    "averaged on 2",
    "embedded on 2",
    "synced",
    "synced on 2, streamed",
    "dropped on 2",
    "normed on 2",
    "normed on 2, more a call",
    "bfloat16 on 2",
)
"""Scenarios of `make soak` alone. `make test` runs each of their settings with another one."""


def in_both(names: list[str]) -> list[Any]:
    """Parameters, one for each scenario; those of `SOAK` are marked."""
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in SOAK)) for name in names]


@pytest.fixture(scope="module")
def trained(
    in_soak: bool,
    trainer: Trainer,
    dataset: Dataset,
    transform: Transform,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """Scenario -> its facts and weights; without those of `SOAK` unless a selected test needs them."""
    found: dict[str, tuple[dict[str, Any], list[Any]]] = {}
    # A process has one size of group for its collectives.
    for sizes in ((1, 2), (4,)):
        scenarios = {
            name: scenario
            for name, scenario in SCENARIOS.items()
            if scenario.get("replicas", 1) in sizes and (in_soak or name not in SOAK)
        }
        if scenarios:
            out = tmp_path_factory.mktemp("strategies")
            found |= run_scenarios(trainer, scenarios, out, (dataset, transform))
    return found


def run_scenarios(
    trainer: Trainer,
    scenarios: dict[str, dict[str, Any]],
    out: Path,
    data: tuple[Dataset, Transform],
) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """Run all in one process of their own; scenario -> its facts and weights."""
    trainer.script(
        Path(__file__).with_name("strategy_scenarios.py"),
        *(data[0].root, data[1].root, out),
        stdin=json.dumps(list(scenarios.values())),
    )
    results: list[dict[str, Any]] = json.loads((out / "results.json").read_text())
    return {
        name: (result, list(np.load(out / str(index) / "weights.npz").values()))
        for index, (name, result) in enumerate(zip(scenarios, results, strict=True))
    }


PAIRS = (
    ("plain", "plain on 2"),
    ("plain", "plain on 4"),
    ("plain on 2", "plain on 2, streamed"),
    ("plain on 2", "plain on 2, XLA"),
    ("plain", "plain, 4 passes"),
    ("plain", "plain on 2, 4 passes, XLA"),
    ("clipped", "clipped on 2"),
    ("averaged", "averaged on 2"),
    ("embedded", "embedded on 2"),
    ("embedded", "embedded on 2, 2 passes"),
    ("synced", "synced on 2, streamed"),
    ("own loss", "own loss on 2"),
    ("normed on 2", "normed on 2, more a call"),
)
"""Scenarios that must train to the same weights."""


@pytest.mark.parametrize(
    ("one", "other"),
    [pytest.param(one, other, marks=[pytest.mark.soak] * (other in SOAK)) for one, other in PAIRS],
)
def test_the_same_global_batch_trains_to_the_same_weights(
    trained: dict[str, Any], one: str, other: str
) -> None:
    """The epoch's last batch is short and odd, so that replicas and passes have unequal shares."""
    for ours, theirs in zip(trained[one][1], trained[other][1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)
    for name, value in trained[one][0]["metrics"].items():
        assert trained[other][0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5)


def test_a_pass_beyond_the_rows_of_a_short_batch_counts_nothing(trained: dict[str, Any]) -> None:
    """The last batch has 2 rows for 16 passes; the mean of no rows would be NaN, which no weight of 0 makes 0."""
    metrics = trained["own loss on 2, more passes than rows"][0]["metrics"]

    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("name", in_both([name for name in SCENARIOS if "dropped" not in name]))
def test_all_replicas_end_with_equal_weights(trained: dict[str, Any], name: str) -> None:
    assert trained[name][0]["apart"] == []


@pytest.mark.parametrize("name", in_both([name for name in SCENARIOS if "dropped" in name]))
def test_replicas_drop_units_of_their_own(trained: dict[str, Any], name: str) -> None:
    """And nothing else of them differs: weights, and the states of what is drawn, are the same."""
    assert trained[name][0]["apart"] == ["seen/units"]


@pytest.mark.parametrize("name", in_both(["bfloat16 on 2", "float16 on 2", "sent as bfloat16"]))
def test_fewer_bits_learn_as_well(trained: dict[str, Any], name: str) -> None:
    assert trained[name][0]["metrics"]["val_accuracy"] > 0.75


def test_settings_that_should_change_the_result_do(trained: dict[str, Any]) -> None:
    """Else the tests above would compare runs in which the setting was ignored."""
    plain = trained["plain"]
    for name in ("clipped", "sent as bfloat16"):
        pairs = zip(plain[1], trained[name][1], strict=True)
        assert max(float(np.abs(a - b).max()) for a, b in pairs) > 1e-5, name
    # The average is kept in addition to the weights, and is validated.
    averaged = trained["averaged"][0]["metrics"]
    assert abs(plain[0]["metrics"]["val_loss"] - averaged["val_loss"]) > 1e-3
