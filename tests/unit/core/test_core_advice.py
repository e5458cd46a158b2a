"""Advice for errors of the user's code that TensorFlow runs in an unusual place."""

from __future__ import annotations

import pytest

from stoker.core.user_code import advice_for


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            AttributeError(
                "Exception encountered when calling Mine.call().\n\n'NoneType' object has no attribute "
                "'replica_id_in_sync_group'\n\nArguments received: x=<KerasTensor shape=(None, 16)>"
            ),
            "get_replica_context() is None",
        ),
        (TypeError("Cannot convert a KerasTensor"), "tensors have no values"),
        (ValueError("of the user's own"), ""),
    ],
)
def test_advice_names_the_cause(error: Exception, words: str) -> None:
    advice = advice_for(error)

    assert words in advice
    assert bool(words) == bool(advice)
