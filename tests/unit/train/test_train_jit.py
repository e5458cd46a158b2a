"""Functions that XLA compiles: their names, their random numbers, and calls on copies of variables."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from stoker.internals.tensorflow_internals import ops
from stoker.train.step.jit import SteadyNames, jit, steady_names
from stoker.train.step.xla_trial import call_on_copies, copies_of_captures


def test_a_call_on_copies_leaves_every_variable_as_it_is() -> None:
    weight, count = tf.Variable(tf.constant([1.0, 2.0])), tf.Variable(tf.constant(3, tf.int64))
    fixed = tf.constant([5.0, 5.0])

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        def body(x: tf.Tensor) -> tf.Tensor:
            count.assign_add(1)
            return weight.assign_add(x * fixed) + tf.cast(count, tf.float32)

        return jit(body, role="step")(x)

    traced = step.get_concrete_function(tf.TensorSpec([2]))

    given = call_on_copies(traced, (tf.constant([1.0, 1.0]),), copies_of_captures(traced))

    np.testing.assert_array_equal(given, [1 + 5 + 4, 2 + 5 + 4])
    np.testing.assert_array_equal(weight, [1.0, 2.0])
    assert int(count) == 3


def numbers_of(names: SteadyNames, content: str, before: int) -> list[int]:
    for _ in range(before):
        ops.uid()
    with names(content):
        return [ops.uid() for _ in range(3)]


def test_names_depend_on_what_is_traced_and_not_on_what_was_traced_before() -> None:
    first = numbers_of(SteadyNames(), "step float32[8,2]", before=0)

    assert numbers_of(SteadyNames(), "step float32[8,2]", before=1000) == first
    assert numbers_of(SteadyNames(), "step float32[9,2]", before=0) != first
    assert ops.uid() < first[0], "afterwards TensorFlow numbers as before"


def test_no_two_functions_of_a_process_have_the_same_name() -> None:
    names = SteadyNames()
    found = [number for _ in range(3) for number in numbers_of(names, "step", before=0)]

    assert len(set(found)) == len(found)
    with names("step"), pytest.raises(RuntimeError, match="cannot be nested"), names("step"):
        pass


def test_a_trace_that_fails_leaves_the_numbers_to_tensorflow() -> None:
    plain = ops.uid
    with pytest.raises(ZeroDivisionError), steady_names("step"):
        raise ZeroDivisionError

    assert ops.uid is plain


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_uniform_numbers_are_the_same_with_xla_and_without(dtype: tf.DType) -> None:
    def draw(seed: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_uniform([37, 5], seed, dtype=dtype)

    plain = tf.function(draw, autograph=False)
    compiled = tf.function(jit(draw, role=f"draw {dtype}"), autograph=False)
    for seed in ([0, 1], [2**31 - 3, 77]):
        one, other = (drawn(tf.constant(seed)).numpy() for drawn in (plain, compiled))
        np.testing.assert_array_equal(one, other)
        assert 0.0 <= one.min() < 0.1
        assert 0.9 < one.max() < 1.0
