from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from stoker.cluster.devices import Devices, Gpu, find_devices
from stoker.cluster.resources import Resources
from stoker.core.errors import ConfigError
from stoker.train.config import AutoInputs, TrainConfig, resolve

CPU = Devices(cpu_cores=2, memory_bytes=2**34, gpus=())
H100 = Gpu(name="NVIDIA H100", memory_bytes=80 << 30, compute_capability=(9, 0))
T4 = Gpu(name="Tesla T4", memory_bytes=16 << 30, compute_capability=(7, 5))
P100 = Gpu(name="Tesla P100", memory_bytes=16 << 30, compute_capability=(6, 0))
V100 = Gpu(name="NVIDIA V100", memory_bytes=16 << 30, compute_capability=(7, 0))


@pytest.mark.parametrize(
    ("rows", "batch_size"), [(1, 16), (454, 16), (1437, 16), (12_000, 128), (10**9, 512)]
)
def test_the_auto_batch_size_is_a_power_of_two_below_a_64th_of_the_rows(
    rows: int, batch_size: int
) -> None:
    resolved = resolve(TrainConfig(), AutoInputs(devices=CPU, rows=rows, string_features=False))

    assert resolved.batch_size == batch_size
    assert 1 <= resolved.steps_per_call <= 50


@pytest.mark.parametrize(
    ("gpus", "strings", "precision", "tried"),
    [
        ((), False, "float32", False),
        ((H100,), False, "mixed_bfloat16", True),
        ((H100,), True, "mixed_bfloat16", False),
        ((V100,), False, "mixed_float16", True),
        ((T4,), False, "mixed_float16", True),
        ((H100, V100), False, "mixed_float16", False),
        ((P100,), False, "float32", True),
        ((H100, P100), False, "float32", False),
    ],
)
def test_auto_precision_and_the_trial_of_xla_follow_from_the_devices(
    gpus: tuple[Gpu, ...], strings: bool, precision: str, tried: bool
) -> None:
    devices = Devices(cpu_cores=8, memory_bytes=2**36, gpus=gpus)
    resolved = resolve(
        TrainConfig(), AutoInputs(devices=devices, rows=1000, string_features=strings)
    )

    assert (resolved.precision, resolved.xla_trial) == (precision, tried)
    assert not resolved.xla, "training begins without it"


@pytest.mark.parametrize(
    ("settings", "tuned", "why"),
    [
        ({"deterministic": True}, False, "train.deterministic"),
        ({}, True, "stoker.lock.yaml has the measured settings"),
        ({"xla": True}, False, "as set"),
        ({"xla": False}, False, "as set"),
    ],
)
def test_nothing_is_measured_where_a_run_must_repeat_or_was_tuned(
    settings: dict[str, Any], tuned: bool, why: str
) -> None:
    devices = Devices(cpu_cores=8, memory_bytes=2**36, gpus=(H100,))
    inputs = AutoInputs(devices=devices, rows=1000, string_features=False, tuned=tuned)

    resolved = resolve(TrainConfig(**settings), inputs)

    assert not resolved.xla_trial
    assert resolved.xla is settings.get("xla", False)
    assert resolved.why["xla"] == why


@pytest.mark.parametrize(
    ("gpus", "configured", "why"),
    [
        ((), "auto", "no GPU"),
        ((H100,), "auto", "compute capability 9.0 has tensor cores for bfloat16"),
        ((T4,), "auto", "compute capability 7.5 has tensor cores for float16, not for bfloat16"),
        ((P100,), "auto", "compute capability 6.0 has no tensor cores"),
        ((P100,), "mixed_float16", "as set"),
    ],
)
def test_the_run_records_why_its_precision_is_what_it_is(
    gpus: tuple[Gpu, ...], configured: Any, why: str
) -> None:
    devices = Devices(cpu_cores=8, memory_bytes=2**36, gpus=gpus)
    inputs = AutoInputs(devices=devices, rows=1000, string_features=False)

    assert resolve(TrainConfig(precision=configured), inputs).why["precision"] == why


def test_a_precision_that_is_set_by_name_is_kept() -> None:
    config = TrainConfig(batch_size=7, steps_per_call=3, precision="mixed_float16", xla=True)
    resolved = resolve(config, AutoInputs(devices=CPU, rows=1000, string_features=False))

    assert (resolved.batch_size, resolved.steps_per_call) == (7, 3)
    assert (resolved.precision, resolved.xla) == ("mixed_float16", True)


def test_xla_on_strings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.xla: true needs numeric features"):
        resolve(TrainConfig(xla=True), AutoInputs(devices=CPU, rows=10, string_features=True))


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"batch_size": 0}, {"seed": -1}, {"monitor": "loss"}]
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"train\."):
        TrainConfig(**wrong)  # type: ignore[arg-type]  # mypy cannot check **


def test_this_machine_has_cores_and_memory_and_says_so() -> None:
    devices = find_devices()

    assert devices.cpu_cores >= 1
    assert devices.memory_bytes > 2**28
    assert "CPU cores" in devices.describe()


@pytest.mark.parametrize(
    "wrong",
    [
        {"accelerators": "4 GPUs"},
        {"accelerators": "H100:0"},
        {"nodes": 0},
        {"usd_per_hour": -0.5},
        {"usd_per_hour": float("nan")},
    ],
)
def test_resources_of_another_form_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"resources\."):
        Resources(**wrong)  # type: ignore[arg-type]  # mypy cannot check **


def test_a_worker_of_parameter_servers_computes_one_batch_by_itself() -> None:
    devices = Devices(cpu_cores=8, memory_bytes=2**36, gpus=(H100, H100))
    cluster = AutoInputs(
        devices=devices, rows=10_000, string_features=False, workers=3, parameter_servers=1
    )

    resolved = resolve(TrainConfig(batch_size=32), cluster)

    assert (resolved.strategy, resolved.replicas, resolved.global_batch) == (
        "parameter_server",
        1,
        32,
    )
    assert not resolved.xla


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, 1),
        ({"accumulate": 3}, 3),
        ({"replicas": 4}, 4),
        ({"accumulate": 2, "replicas": 4}, 8),
    ],
)
@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_the_learning_rate_is_multiplied_by_the_rule_of_its_name(
    rule: Literal["none", "linear", "sqrt"], settings: dict[str, Any], parts: int
) -> None:
    config = TrainConfig(batch_size=8, scale_lr=rule, **settings)

    resolved = resolve(config, AutoInputs(devices=CPU, rows=1000, string_features=False))

    expected = {"none": 1.0, "linear": float(parts), "sqrt": math.sqrt(parts)}
    assert resolved.lr_factor == pytest.approx(expected[rule])
    assert resolved.global_batch == 8 * parts


def test_the_learning_rate_is_that_of_all_workers_batches_together() -> None:
    config = TrainConfig(batch_size=8, scale_lr="linear", accumulate=2, replicas=2)
    three = AutoInputs(devices=CPU, rows=1000, string_features=False, workers=3)

    resolved = resolve(config, three)

    assert (resolved.replicas, resolved.global_batch, resolved.lr_factor) == (6, 96, 12.0)


@pytest.mark.parametrize(
    ("settings", "gpus", "cluster", "expected"),
    [
        ({}, 0, {}, ("one_device", 1, 1, "no GPU")),
        ({}, 1, {}, ("one_device", 1, 1, "one GPU")),
        ({}, 2, {}, ("mirrored", 2, 1, "2 GPUs on this machine")),
        ({}, 4, {}, ("mirrored", 4, 1, "4 GPUs on this machine")),
        ({"replicas": 2}, 4, {}, ("mirrored", 2, 1, "4 GPUs on this machine")),
        ({"replicas": 1}, 0, {}, ("one_device", 1, 1, "no GPU")),
        ({"replicas": 2}, 0, {}, ("mirrored", 2, 1, "train.replicas is 2")),
        ({}, 0, {"workers": 3}, ("multi_worker", 3, 3, "TF_CONFIG names 3 workers")),
        ({}, 2, {"workers": 3}, ("multi_worker", 6, 3, "TF_CONFIG names 3 workers")),
        ({"replicas": 2}, 0, {"workers": 2}, ("multi_worker", 4, 2, "TF_CONFIG names 2 workers")),
        (
            {},
            2,
            {"workers": 2, "parameter_servers": 1},
            ("parameter_server", 1, 2, "TF_CONFIG names 1 parameter servers"),
        ),
        ({"strategy": "one_device"}, 4, {}, ("one_device", 1, 1, "as set")),
        ({"strategy": "mirrored"}, 1, {}, ("mirrored", 1, 1, "as set")),
        ({"strategy": "mirrored"}, 3, {}, ("mirrored", 3, 1, "as set")),
        (
            {"strategy": "mirrored", "replicas": 2},
            0,
            {"workers": 3},
            ("mirrored", 2, 1, "as set"),
        ),
    ],
)
def test_auto_strategy_follows_from_cluster_and_devices_and_says_why(
    settings: dict[str, Any],
    gpus: int,
    cluster: dict[str, Any],
    expected: tuple[str, int, int, str],
) -> None:
    devices = Devices(cpu_cores=8, memory_bytes=2**36, gpus=(V100,) * gpus)
    inputs = AutoInputs(devices=devices, rows=10_000, string_features=False, **cluster)

    resolved = resolve(TrainConfig(**settings), inputs)

    strategy, replicas, workers, why = expected
    assert (resolved.strategy, resolved.replicas, resolved.workers) == (strategy, replicas, workers)
    assert resolved.why["strategy"] == why


def test_one_device_with_replicas_is_refused() -> None:
    config = TrainConfig(strategy="one_device", replicas=2)

    with pytest.raises(ConfigError, match="one_device has one replica"):
        resolve(config, AutoInputs(devices=CPU, rows=10, string_features=False))
