"""MFU of a model: operations a second, by the peak that was measured once and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from stoker.measure import mfu, peak_flops
from stoker.measure.mfu import ModelRate, PeakFile, device_name, full_rates, model_rate

Rates = Callable[[str, tuple[Any, ...]], dict[Any, float]]


def model(*layers: Any, shape: tuple[int | None, ...] = (8, 8, 4)) -> keras.Model:
    return keras.Sequential([keras.Input(shape), *layers])


def given(**rates: float) -> Rates:
    return lambda _dtype, _kinds: {
        "convolutions": rates["convolutions"],
        "products of matrices": rates["products"],
    }


def test_each_kind_has_its_own_peak() -> None:
    both = model(keras.layers.Conv2D(8, 3), keras.layers.Flatten(), keras.layers.Dense(64))
    convolutions, products = 6 * 6 * 8 * 2 * 9 * 4, 2 * 288 * 64

    rate = model_rate(both, rates=given(convolutions=1e9, products=2e9))

    work = convolutions + products
    assert rate.flops_per_sample == 3 * work
    assert rate.peak_per_s is not None
    assert rate.peak_per_s == pytest.approx(work / (convolutions / 1e9 + products / 2e9))
    assert rate.peak_of == "convolutions and products of matrices in float32"
    assert rate.mfu(100.0) == pytest.approx(300 * work / rate.peak_per_s)
    assert rate.mfu(100.0, devices=2) == pytest.approx(150 * work / rate.peak_per_s)
    assert rate.to_json(devices=2)["peak_flops_per_s"] == pytest.approx(2 * rate.peak_per_s)


def test_a_kind_that_is_next_to_nothing_is_not_measured() -> None:
    calls: list[tuple[str, ...]] = []

    def rates(_dtype: str, kinds: tuple[str, ...]) -> dict[Any, float]:
        calls.append(kinds)
        return dict.fromkeys(kinds, 1e9)

    layers = [keras.layers.Conv2D(32, 3), keras.layers.Conv2D(32, 3)]
    model_rate(
        model(*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)), rates=rates
    )

    assert calls == [("convolutions",)]


def test_the_reason_for_a_missing_mfu_is_reported() -> None:
    class Own(keras.Model):  # type: ignore[misc]  # Keras has no types
        def call(self, inputs: Any) -> Any:
            return inputs

    class Fails(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        broken = False

        def call(self, inputs: Any) -> Any:
            if self.broken:
                raise KeyError("only once")
            return inputs

    rates, fails = given(convolutions=1e9, products=1e9), Fails()
    failing = model(fails)
    fails.broken = True
    whys = [
        model_rate(each, rates=rates).why
        for each in (
            Own(),
            model(keras.layers.Flatten()),
            failing,
            model(
                keras.layers.Conv2D(4, 3),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(2),
                shape=(None, None, 3),
            ),
        )
    ]

    assert "needs `inputs`" in whys[0]
    assert whys[1] == "the model has no products of matrices and no convolutions"
    assert whys[2].startswith("the model could not be traced: ")
    # Its largest part would be missing in the figure.
    assert "Conv2D of a size that is not known" in whys[3]
    assert ModelRate(why=whys[1]).mfu(10.0) is None


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (tf.errors.ResourceExhaustedError(None, None, "OOM"), "ResourceExhaustedError"),
        (ValueError("whatever the device's library raises"), "ValueError"),
        ({}, "KeyError"),
        ({"products of matrices": 0.0}, "ZeroDivisionError"),
    ],
    ids=["memory", "library", "no rate", "zero"],
)
def test_a_peak_that_cannot_be_measured_leaves_the_count(found: Any, why: str) -> None:
    def rates(_dtype: str, _kinds: tuple[str, ...]) -> dict[Any, float]:
        if isinstance(found, Exception):
            raise found
        return dict(found)

    rate = model_rate(model(keras.layers.Dense(4)), rates=rates)

    assert rate.flops_per_sample
    assert rate.mfu(1.0) is None
    assert rate.why == f"the peak was not measured: {why}"


def test_a_peak_is_measured_once_for_a_device_and_a_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[str, str]] = []

    def quick_peak(dtype: str, kind: str, *, seconds: float) -> float:
        assert 0 < seconds < 1
        measured.append((dtype, kind))
        return 1e9

    monkeypatch.setattr(mfu, "quick_peak", quick_peak)
    file = tmp_path / "peaks.json"
    for _ in range(2):
        assert PeakFile(file).rates("float32", ("convolutions",)) == {"convolutions": 1e9}
    PeakFile(file).rates("float32", ("convolutions", "products of matrices"))
    PeakFile(file).rates("bfloat16", ("convolutions",))

    assert measured == [
        ("float32", "convolutions"),
        ("float32", "products of matrices"),
        ("bfloat16", "convolutions"),
    ]
    assert set(json.loads(file.read_text())) == {device_name()}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"CPU": 3}', '{"CPU": {"float32": {"convolutions": "x"}}}', '{"GPU": {}}'],
)
def test_a_damaged_file_counts_as_empty(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mfu, "quick_peak", lambda *_, **__: 2e9)
    file = tmp_path / "peaks.json"
    file.write_text(content)

    assert PeakFile(file).rates("float32", ("convolutions",)) == {"convolutions": 2e9}
    assert PeakFile(file).rates("float32", ("convolutions",)) == {"convolutions": 2e9}


def test_a_file_that_cannot_be_written_costs_no_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mfu, "quick_peak", lambda *_, **__: 2e9)

    found = PeakFile(tmp_path / "missing" / "peaks.json").rates("float32", ("convolutions",))

    assert found == {"convolutions": 2e9}


@pytest.mark.alone
def test_the_quick_peak_is_near_the_best_of_all_sizes(tmp_path: Path) -> None:
    model_ = model(keras.layers.Dense(4))
    # First, as steps come before it in a run: the first products of a process are slow.
    full = model_rate(model_, rates=full_rates(1.0))
    quick = model_rate(model_, rates=PeakFile(tmp_path / "peaks.json").rates)

    assert quick.peak_per_s is not None
    assert full.peak_per_s is not None
    # Other processes on this machine may use the cores of either.
    assert 0.2 < quick.peak_per_s / full.peak_per_s < 5


def test_where_the_memory_is_taken_a_smaller_size_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[int, ...]] = []

    def best(candidates: Any, *, seconds: float) -> Any:
        (candidate,) = candidates
        tried.append(candidate.size)
        if len(tried) < 2:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")
        return candidate

    sizes = {"CPU": ((8, 14, 8), (4, 14, 8)), "GPU": ((8, 14, 8), (4, 14, 8))}
    monkeypatch.setattr(peak_flops, "QUICK_CONVOLUTIONS", sizes)
    monkeypatch.setattr(peak_flops, "_best", best)
    peak_flops.quick_peak("float32", "convolutions", seconds=0.1)

    assert tried == [(8, 14, 8), (4, 14, 8)]
