"""The error of a failed trial names its cause in one line."""

from __future__ import annotations

from typing import NoReturn

import pytest

from stoker.app.tuning.child import answer_of
from stoker.core.errors import UserError


def failing(error: Exception) -> dict[str, str]:
    def fail() -> NoReturn:
        raise error

    return answer_of(fail)


def test_the_error_of_a_users_python_comes_before_tensorflows_wrapping() -> None:
    text = (
        "{{function_node __wrapped__IteratorGetNext_output_types_2_device_/CPU:0}} ValueError: disk gone\n"
        "Traceback (most recent call last):\n\n  File x, line 2\n\nValueError: disk gone\n"
        "\t [[{{node PyFunc}}]] [Op:IteratorGetNext]"
    )

    assert failing(RuntimeError(text)) == {
        "failed": "crash",
        "text": "RuntimeError: ValueError: disk gone",
    }


def test_tensorflows_first_line_that_says_nothing_is_left_out() -> None:
    text = (
        "Graph execution error:\n\nDetected at node Assert defined at\nassertion failed: [it ended]"
    )

    assert "Graph execution error" not in failing(RuntimeError(text))["text"]
    assert failing(RuntimeError("Graph execution error:"))["text"].endswith("execution error:")
    assert failing(RuntimeError(""))["text"] == "RuntimeError: "


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("measured steps must fit in memory", "memory"),
        ("a step of train.batch_size 8 does not fit in memory", "memory"),
        ("measured steps must give finite numbers", "refused"),
        ("train.xla must be true or false", "refused"),
    ],
)
def test_non_finite_numbers_are_not_a_lack_of_memory(rule: str, kind: str) -> None:
    assert failing(UserError(rule))["failed"] == kind
