"""The compiled form of a run's step, and the input of its calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.internals.tensorflow_internals import call_flat, is_op_determinism_enabled
from stoker.train.step.step_totals import StepTotals

GROUPS_AHEAD = 2
"""Number of groups that are prefetched, so that the step does not wait when it takes a group."""


@dataclass(kw_only=True, slots=True)
class StepInput:
    """An iterator, and the elements that a call has taken for the next call."""

    iterator: Any
    group: int = 1
    """Number of steps per element; 1 if an element contains the rows of a whole call."""

    ahead: bool = False
    """Whether a call starts with a batch that an earlier call has taken, and takes a batch for the next call;
    False if each step takes its own batch."""

    endless: bool = False
    """Whether the next pass starts immediately after each pass."""

    left: Any = ()
    """The tensors of the batch that was taken for the next call; empty if there is none. With groups: the
    tensors of the last group, and how many of its batches are used, int64."""

    @property
    def left_spec(self) -> Any:
        """The `tf.TensorSpec`s of `left`, which are the same in every call."""
        if self.ahead:
            return tuple(tf.nest.flatten(self.iterator.element_spec, expand_composites=True))
        return tuple(tf.TensorSpec(each.shape, each.dtype) for each in self.left)

    def take_first(self) -> float:
        """Take the first batch, if none is taken yet; return the time that it took, seconds, else 0."""
        if self.left:
            return 0.0
        begun_s = time.monotonic()
        self.left = flat(self.iterator.get_next())
        return time.monotonic() - begun_s


def flat(element: Any) -> tuple[tf.Tensor, ...]:
    """Return the tensors of an element as a flat tuple."""
    return tuple(tf.nest.flatten(element, expand_composites=True))


def unflat(tensors: Sequence[tf.Tensor], spec: Any) -> Any:
    """Return the element with these tensors; the inverse of `flat`."""
    return tf.nest.pack_sequence_as(spec, list(tensors), expand_composites=True)


def takes_batches_inline(spec: Any) -> bool:
    """Return whether each step takes its own batch: only if batches are plain tensors and operations run one by one.

    Deterministic operations exclude this: TensorFlow then removes the prefetch from a pipeline that calls Python or
    draws random numbers, and the step would wait for all work of the pipeline.
    """
    plain = all(isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(spec))
    must_be_exact = is_op_determinism_enabled()
    one_at_a_time = tf.config.threading.get_inter_op_parallelism_threads() == 1
    return plain and one_at_a_time and not must_be_exact


def next_in_place(iterator: Any) -> Any:
    """Add `next(iterator)` to a graph, run by the current thread; TensorFlow's own uses another thread.

    Args:
        iterator: An iterator of plain tensors.
    """
    specs = tf.nest.flatten(iterator.element_spec)
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    tensors = tf.raw_ops.IteratorGetNextSync(
        iterator=resource,
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    return tf.nest.pack_sequence_as(iterator.element_spec, tensors)


def placeholder_input(element: Any) -> Any:
    """Return an iterator that repeats this element without delay."""
    # Turn off TensorFlow's autotuner: there is nothing to tune, and it would delay the end of an iterator if
    # the clock was set back.
    options = tf.data.Options()
    options.autotune.enabled = False
    return iter(tf.data.Dataset.from_tensors(element).repeat().with_options(options))


def group_batches(batches: tf.data.Dataset[Any], size: int) -> StepInput:
    """Group batches of fixed shapes into elements of [size, *batch].

    This saves time, because taking an element in the graph costs about 30 us of CPU time, even if it is small.

    Args:
        batches: An endless dataset.
        size: Number of batches per element.
    """
    groups = batches.batch(size, drop_remainder=True).prefetch(GROUPS_AHEAD)
    nothing = [tf.zeros(spec.shape, spec.dtype) for spec in tf.nest.flatten(groups.element_spec)]
    return StepInput(
        iterator=iter(groups), group=size, left=(*nothing, tf.constant(size, tf.int64))
    )


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
        """Numbers of rows per step for which it was compiled."""

    def trace(self, step_input: StepInput) -> Any:
        """Return the concrete function of a call; trace it if necessary.

        Args:
            step_input: The input of the calls.
        """
        if self.traced is None:
            arguments = step_input.iterator, *_call_arguments(1, check=True), step_input.left_spec
            self.traced = self.multi_step.get_concrete_function(*arguments)
        return self.traced

    def call(self, step_input: StepInput, iterator: Any, steps: int, *, check: bool) -> StepTotals:
        """Run some steps.

        Args:
            step_input: Receives the input that the call takes but does not use.
            iterator: The iterator to read: that of `step_input`, or another one with elements of the same form.
            steps: Number of steps, at least one.
            check: As in `make_multi_step`.
        """
        traced = self.trace(step_input)
        arguments = iterator, *_call_arguments(steps, check=check)
        tensors = [*tf.nest.flatten(arguments, expand_composites=True), *step_input.left]
        totals: StepTotals = call_flat(traced, tensors, traced.captured_inputs)
        step_input.left = totals.left
        return totals


def _call_arguments(steps: int, *, check: bool) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.constant(steps, tf.int64), tf.constant(check)
