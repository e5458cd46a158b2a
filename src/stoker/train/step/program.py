"""One compiled form of a run's step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from stoker.train.step.step_input import StepInput
from stoker.train.step.step_totals import StepTotals


class Program:
    """The step as TensorFlow runs it, compiled by XLA or not."""

    def __init__(self, step: Any, multi_step: Any, *, xla: bool) -> None:
        """Store the functions; nothing is traced yet.

        Args:
            step: The result of `make_step`.
            multi_step: The result of `make_multi_step` for it.
            xla: Whether XLA compiles it.
        """
        self.step, self.multi_step, self.xla = step, multi_step, xla
        self.traced: Any = None
        self.compiled_rows: set[int] = set()
        """Rows per step for which it was compiled."""

    def trace(self, step_input: StepInput) -> Any:
        """The concrete function of a call, traced if necessary.

        Args:
            step_input: The calls' input.
        """
        if self.traced is None:
            arguments = step_input.iterator, *_call_arguments(1, check=True), step_input.left_spec
            self.traced = self.multi_step.get_concrete_function(*arguments)
        return self.traced

    def call(self, step_input: StepInput, iterator: Any, steps: int, *, check: bool) -> StepTotals:
        """Run some steps.

        Args:
            step_input: Receives what the call leaves unread.
            iterator: The steps' input: that of the source, or one with the same elements.
            steps: Number of steps, at least one.
            check: As in `make_multi_step`.
        """
        traced = self.trace(step_input)
        arguments = iterator, *_call_arguments(steps, check=check)
        tensors = [*tf.nest.flatten(arguments, expand_composites=True), *step_input.left]
        # Selecting the function by structure, the public way, takes TensorFlow a quarter of a
        # millisecond.
        totals: StepTotals = traced._call_flat(tensors, traced.captured_inputs)  # noqa: SLF001 - as above
        step_input.left = totals.left
        return totals


def _call_arguments(steps: int, *, check: bool) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.constant(steps, tf.int64), tf.constant(check)
