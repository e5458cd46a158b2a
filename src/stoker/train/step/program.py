"""One compiled form of a run's step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from stoker.train.step.step_input import Source
from stoker.train.step.step_totals import Sums


class Program:
    """The step as TensorFlow runs it, compiled by XLA or not."""

    def __init__(self, step: Any, run_fed: Any, *, xla: bool) -> None:
        """Store the functions; nothing is traced yet.

        Args:
            step: The result of `make_step`.
            run_fed: The result of `make_run_fed` for it.
            xla: Whether XLA compiles it.
        """
        self.step, self.run_fed, self.xla = step, run_fed, xla
        self.traced: Any = None
        self.compiled_rows: set[int] = set()
        """Rows per step for which it was compiled."""

    def trace(self, source: Source) -> Any:
        """The concrete function of a call, traced if necessary.

        Args:
            source: The calls' input.
        """
        if self.traced is None:
            arguments = source.iterator, *_asked(1, look=True), source.left_spec
            self.traced = self.run_fed.get_concrete_function(*arguments)
        return self.traced

    def call(self, source: Source, iterator: Any, steps: int, *, look: bool) -> Sums:
        """Run some steps.

        Args:
            source: Receives what the call leaves unread.
            iterator: The steps' input: that of the source, or one with the same elements.
            steps: Number of steps, at least one.
            look: As in `make_run_fed`.
        """
        traced = self.trace(source)
        arguments = iterator, *_asked(steps, look=look)
        tensors = [*tf.nest.flatten(arguments, expand_composites=True), *source.left]
        # Selecting the function by structure, the public way, takes TensorFlow a quarter of a
        # millisecond.
        sums: Sums = traced._call_flat(tensors, traced.captured_inputs)  # noqa: SLF001 - as above
        source.left = sums.left
        return sums


def _asked(steps: int, *, look: bool) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.constant(steps, tf.int64), tf.constant(look)
