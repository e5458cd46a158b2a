"""Which operations of a step are Stoker's own."""

from __future__ import annotations

import pytest
import tensorflow as tf

from stoker.train.health.step_operations import is_stoker_scope, step_operations


def test_the_second_scope_of_stokers_name_is_stokers_too() -> None:
    @tf.function
    def step() -> tf.Tensor:
        parts = []
        for _ in range(3):
            with tf.name_scope("stoker"):
                parts.append(tf.random.uniform([]))
        return tf.add_n(parts)

    operations = [o for o in step_operations(step.get_concrete_function()) if "Random" in o.kind]

    assert [o.operation.name.split("/")[0] for o in operations] == [
        "stoker",
        "stoker_1",
        "stoker_2",
    ]
    assert all(o.is_own for o in operations)


@pytest.mark.parametrize("name", ["stokers/x", "my_stoker/x", "stoker_a/x", "stoker_/x"])
def test_a_scope_that_only_looks_like_it_is_the_users(name: str) -> None:
    assert not is_stoker_scope(name)
