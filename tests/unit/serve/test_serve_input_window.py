"""The sample of a window of requests: each row has the same chance, within a limit of memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.core.statistics.columns import ColumnStatistics
from stoker.serve.observability.input_window import (
    MAX_ROWS,
    MAX_TEXT,
    InputWindow,
    sampled_inputs,
)


def column(name: str, dtype: str, length: int | None = None) -> ColumnStatistics:
    about: dict[str, Any] = {"count": 1, "missing": 0, "distinct": 1, "numbers": None}
    return ColumnStatistics(name=name, dtype=dtype, length=length, lengths=None, top=(), **about)


TRAINING = {
    each.name: each
    for each in (
        column("fare", "float32"),
        column("kind", "string"),
        column("place", "float32", 2),
        column("photo", "image"),
        column("tags", "string", 0),
        column("wide", "float32", 1_000),
    )
}


def window() -> InputWindow:
    return InputWindow(TRAINING, began_s=0.0)


def add(held: InputWindow, inputs: dict[str, Any]) -> None:
    held.add(sampled_inputs(inputs, rows=1_000))


def request(fares: Any) -> dict[str, Any]:
    rows = len(fares)
    return {
        "fare": np.asarray(fares, np.float32)[:, None],
        "kind": np.array([b"cash"] * rows, object),
        "place": np.zeros((rows, 2), np.float32),
        "photo": np.array([b"\x89PNG" * (10_000 + row) for row in range(rows)], object),
        "tags": np.array([["a", "b"]] * rows, object),
        "wide": np.zeros((rows, 1_000), np.float32),
        "unknown": np.zeros(rows),
    }


def test_only_columns_that_can_be_compared_are_kept() -> None:
    held = window()
    add(held, request([1.0, 2.0, 3.0]))
    add(held, {"fare": np.zeros(2, np.float32)})  # lacks the others
    add(held, request([4.0]) | {"fare": np.array([["text"]])})
    add(held, {"none": np.zeros(3)})

    found = {each.name: each for each in held.statistics()}

    assert held.seen == 3
    assert set(found) == {"fare", "kind", "place", "photo"}
    assert found["fare"].numbers is not None
    assert (found["fare"].numbers.min, found["fare"].numbers.max, found["fare"].count) == (1, 3, 3)
    assert [(top.value, top.count) for top in found["kind"].top] == [("cash", 3)]
    assert found["place"].count == 6
    assert found["photo"].lengths is not None
    assert (found["photo"].lengths.min, found["photo"].lengths.max) == (40_000, 40_008)


def test_more_rows_than_a_window_holds_are_a_fair_sample() -> None:
    held, rows = window(), 20 * MAX_ROWS
    for start in range(0, rows, 50):
        add(held, request(range(start, start + 50)))

    (fare,) = (each for each in held.statistics() if each.name == "fare")

    assert held.seen == rows
    assert fare.count == MAX_ROWS
    assert fare.numbers is not None
    assert fare.numbers.mean is not None
    # Five standard errors of a uniform sample.
    assert abs(fare.numbers.mean / rows - 0.5) < 5 * (1 / 12 / MAX_ROWS) ** 0.5


def test_memory_has_a_limit_whatever_the_texts_are() -> None:
    held = window()
    for number in range(3 * MAX_ROWS // 50):
        texts = [f"{number} {row} " + "x" * 100_000 for row in range(50)]
        add(held, request(range(50)) | {"kind": np.array(texts, object)})

    most = MAX_ROWS * (5 * 8 + 60 + MAX_TEXT)
    assert MAX_ROWS * MAX_TEXT < held.held_bytes <= most


def test_what_waits_for_the_window_holds_neither_images_nor_long_texts() -> None:
    large = {
        "photo": np.array([b"x" * 1_000_000] * 50, object),
        "kind": np.array(["é" * 10_000] * 50),
    }

    sampled = sampled_inputs(large, rows=20)

    assert sampled.held_bytes < 20 * 2_500
    assert sampled.sizes["photo"].tolist() == [1_000_000] * 20
    held = window()
    held.add(sampled)
    (kind,) = (each for each in held.statistics() if each.name == "kind")
    assert [(top.value, top.count) for top in kind.top] == [("é" * MAX_TEXT, 20)]
