"""Durations as people write them, for every option that takes one."""

from __future__ import annotations

import pytest

from stoker.cli.commands.tune import budget_of
from stoker.core.durations import seconds_of
from stoker.core.errors import ConfigError


def test_a_duration_is_the_sum_of_its_parts() -> None:
    read = [seconds_of(text, name="--x") for text in ("90s", "4h", "1h30m", "1.5d", " 0s ")]

    assert read == [90, 14_400, 5_400, 129_600, 0]


@pytest.mark.parametrize(
    "text", ["", "4", "h", "-1h", "9999d", "\u0664h", "1h" * 9_000, "9" * 400 + "s", "1h 5m"]
)
def test_another_form_is_one_line_with_the_name_of_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--x must be a duration from 0 s to a year"):
        seconds_of(text, name="--x")


def test_a_limit_of_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="from 1 s"):
        seconds_of("0s", name="--x", least_s=1.0)


def test_a_budget_without_a_unit_is_seconds() -> None:
    assert [budget_of(text) for text in ("90", "1.5m", "8760h")] == [90, 90, 365 * 86_400]
    with pytest.raises(ConfigError, match="--budget must be a duration from 1 s to a year"):
        budget_of("9" * 400)
