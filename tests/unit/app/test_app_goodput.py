"""The text about a training's wall time for the user."""

from __future__ import annotations

from typing import Any

from stoker.cli.progress import goodput_line


def facts(goodput: float | None = 0.5, **parts: float) -> dict[str, Any]:
    return {"goodput": goodput, "wall_time": {"run": {"parts": parts}}}


def test_the_line_names_the_share_the_largest_other_part_and_what_to_do() -> None:
    line = goodput_line(facts(steps=41.0, start=6.0, compile=50.0, other_stages=900.0, ending=3.0))

    assert line is not None
    assert line.startswith("41% of 1:40 was steps; most of the rest: compiling and autotuning, ")
    assert line.endswith(
        "50.0 s (train.xla: false saves this time, but makes steps slower, which matters in a longer training)"
    )


def test_there_is_no_line_without_a_measurement() -> None:
    assert goodput_line(facts(None, steps=1.0)) is None
    assert goodput_line({"steps": 3}) is None
    assert goodput_line(facts()) is None
