"""Runs many steps in one call from Python, on batches of an iterator or on a resident batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from stoker.train.step.one_program import OneProgram, multi_step_program
from stoker.train.step.program import flat, next_in_place, unflat
from stoker.train.step.step_totals import StepResult, StepTotals, totals_of_step

Step = Callable[[Any], StepResult]
"""Type of the result of `make_train_step`."""


def make_multi_step(
    step: Step,
    *,
    rows_per_step: int | None,
    single_step: bool = False,
    overlap: bool = False,
    check_finite: Callable[[], tf.Tensor] | None = None,
) -> Any:
    """Return a function that runs many steps in one call, and measures the time that they wait for input.

    A call ends early after a step that is not finite, or if a worker must stop.

    Args:
        step: The result of `make_train_step`.
        rows_per_step: Number of rows of a step, if an element contains the rows of a whole call; None if
            an element contains the rows of a single step.
        single_step: Whether a call runs only one step; a loop around it would cost about 0.1 ms.
        overlap: Whether operations for which no other operation waits may run during the next step;
            variables are still written before the next step. It must be False with several replicas,
            because all-reduces of different steps could be mixed up.
        check_finite: For steps that update without a check: checks at the end of a call whether all
            variables that the steps wrote are finite.

    Returns:
        A `tf.function` of the iterator, the number of steps (int64), whether to check, and the unused
        input (see `StepInput`); it returns `StepTotals`. If the unused input is empty, each step on a
        single device takes its own batch. A call before a checkpoint is always checked.
    """
    some_of = _reader(step, rows_per_step=rows_per_step, single_step=single_step, overlap=overlap)

    # Without AutoGraph, which would take a third of the tracing time, in every process.
    @tf.function(reduce_retracing=True, autograph=False)
    def multi_step(
        iterator: Any, steps: tf.Tensor, check: Any = True, left: Any = ()
    ) -> StepTotals:
        totals = some_of(iterator, steps, left)
        if check_finite is None:
            return totals
        is_due = tf.logical_or(check, tf.reduce_any(totals.signals > 0))
        with tf.control_dependencies([totals.loss_sum]):
            seen = tf.cond(is_due, check_finite, lambda: tf.constant(True))
        return totals._replace(finite=tf.logical_and(totals.finite, seen))

    return multi_step


def _reader(
    step: Step, *, rows_per_step: int | None, single_step: bool, overlap: bool
) -> Callable[..., StepTotals]:
    """Return the function that runs steps on elements of the form that the feed yields."""
    if rows_per_step is not None:
        return _CallReader(step, rows_per_step=rows_per_step, single_step=single_step)
    program = multi_step_program(step)
    if program is not None:
        return _GroupReader(program)
    return _BatchReader(step, single_step=single_step, parallel_iterations=2 if overlap else 1)


class _WaitClock:
    """Measures the time that the device waits for input."""

    def __init__(self) -> None:
        self._now_s = clock_function()

    def __call__(self, take: Callable[[], Any], after: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Take input after the operation `after`; return it, and the time until all of it was available."""
        with tf.control_dependencies([after]):
            begun_s = self._now_s()
        with tf.control_dependencies([begun_s]):
            taken = take()
        with tf.control_dependencies(tf.nest.flatten(taken, expand_composites=True)):
            return taken, self._now_s() - begun_s

    def behind(self, ended: list[Any], taken: Any) -> tf.Tensor:
        """Return how much later than the end of a step its prefetched input arrived, seconds, float64.

        The two readings of the clock delay neither each other nor later operations.
        """
        with tf.control_dependencies(ended):
            ended_s = self._now_s()
        with tf.control_dependencies(tf.nest.flatten(taken, expand_composites=True)):
            return tf.maximum(self._now_s() - ended_s, 0.0)


class _BatchReader:
    """Runs steps on an iterator with one element per step."""

    def __init__(self, step: Step, *, single_step: bool, parallel_iterations: int) -> None:
        self._step, self._single_step, self._parallel_iterations = (
            step,
            single_step,
            parallel_iterations,
        )
        self._clock = _WaitClock()

    def __call__(self, iterator: Any, steps: tf.Tensor, left: Any) -> StepTotals:
        if isinstance(iterator, tf.data.Iterator):
            if left:
                return self._prefetching(iterator, steps, left)
            return self._inline(iterator, steps)

        # With several replicas, an element cannot be kept between two calls, so nothing is prefetched.
        def one(after: tf.Tensor) -> StepTotals:
            element, wait_s = self._clock(lambda: next(iterator), after)
            return totals_of_step(self._step(element))._replace(wait_s=wait_s)

        if self._single_step:
            return one(tf.constant(0.0))
        return _loop_until_done(steps, lambda _, after, ahead: (one(after), ahead), ())[0]

    def _inline(self, iterator: Any, steps: tf.Tensor) -> StepTotals:
        """Run steps whose thread takes each batch itself, while nothing else runs.

        If another thread prefetched the batch, TensorFlow might start that thread late in its order of
        execution, for example at the end of the step, and the next step would have to wait.
        """

        def one(waited_s: tf.Tensor) -> tuple[StepResult, tf.Tensor]:
            batch, wait_s = self._clock(lambda: next_in_place(iterator), waited_s)
            # Start the step only after the clock has stopped; otherwise its work would count as waiting.
            with tf.control_dependencies([wait_s]):
                return self._step(batch), waited_s + wait_s

        nothing = tf.constant(0.0, tf.float64)
        if self._single_step:
            result, wait_s = one(nothing)
            return totals_of_step(result)._replace(wait_s=wait_s)
        totals, wait_s = _loop_single_steps(steps, one, nothing, parallel_iterations=1)
        return totals._replace(wait_s=wait_s)

    def _prefetching(self, iterator: Any, steps: tf.Tensor, left: Any) -> StepTotals:
        """Run steps that prefetch the next batch while they compute; the last one, for the next call."""

        def one(state: Any) -> tuple[StepResult, Any]:
            batch, waited_s = state
            ahead = next(iterator)
            before = len(_operations())
            result = self._step(batch)
            # The step ends when all its writes have ended, and not when its loss is known.
            written = [each for each in _operations()[before:] if _writes(each)]
            wait_s = self._clock.behind([result.loss_sum, *written], ahead)
            return result, (ahead, waited_s + wait_s)

        first = unflat(left, iterator.element_spec), tf.constant(0.0, tf.float64)
        if self._single_step:
            result, (ahead, wait_s) = one(first)
            totals = totals_of_step(result)
        else:
            totals, (ahead, wait_s) = _loop_single_steps(
                steps, one, first, parallel_iterations=self._parallel_iterations
            )
        return totals._replace(wait_s=wait_s, left=flat(ahead))


class _GroupReader:
    """Runs steps on an iterator whose elements contain the batches of several steps."""

    def __init__(self, program: OneProgram) -> None:
        self._program = program
        self._clock = _WaitClock()

    def __call__(self, iterator: Any, steps: tf.Tensor, left: Any) -> StepTotals:
        size = self._program.steps_per_program

        def some(done: tf.Tensor, after: tf.Tensor, left: Any) -> tuple[StepTotals, Any]:
            (group, used), wait_s = self._clock(
                lambda: _with_unused(iterator, left, size=size), after
            )
            rows = tf.nest.map_structure(lambda t: tf.reshape(t, [-1, *t.shape[2:]]), group)
            totals = self._program.several(rows, tf.minimum(steps - done, size - used), used)
            return totals._replace(wait_s=wait_s), (group, used + totals.steps)

        totals, left = _loop_until_done(steps, some, _packed(left, iterator))
        group, used = left
        return totals._replace(left=(*flat(group), used))


def _packed(left: Any, iterator: Any) -> tuple[Any, tf.Tensor]:
    """Return the last group in the iterator's structure, and how many of its batches are used."""
    *group, used = left
    return unflat(group, iterator.element_spec), used


class _CallReader:
    """Runs steps on an iterator whose elements contain the rows of a whole call."""

    def __init__(self, step: Step, *, rows_per_step: int, single_step: bool) -> None:
        self._step, self._rows, self._single_step = step, rows_per_step, single_step
        self._program = multi_step_program(step)
        self._clock = _WaitClock()

    def __call__(self, iterator: Any, steps: tf.Tensor, _: Any) -> StepTotals:
        call, wait_s = self._clock(lambda: next(iterator), tf.constant(0.0))
        if self._single_step:
            totals = self._some_steps(call, tf.constant(0, tf.int64), steps)
        else:
            totals, _ = _loop_until_done(
                steps,
                lambda done, _, ahead: (self._some_steps(call, done, steps - done), ahead),
                (),
            )
        return totals._replace(wait_s=wait_s)

    def _some_steps(self, call: Any, done: tf.Tensor, left: tf.Tensor) -> StepTotals:
        size, program, zero = self._rows, self._program, tf.constant(0, tf.int64)
        if program is None:
            return totals_of_step(self._step(step_of(call, done, size)))
        whole = tf.shape(tf.nest.flatten(call)[0], tf.int64)[0] // size
        count = tf.minimum(tf.minimum(left, whole - done), program.steps_per_program)
        return tf.cond(
            done < whole,
            lambda: program.several(
                _part_of(call, done * size, program.steps_per_program * size), count, zero
            ),
            # The last step of an epoch, which may have fewer rows.
            lambda: totals_of_step(self._step(step_of(call, done, size))),
        )


class _LoopState(NamedTuple):
    """Values that are passed from step to step of a call; as few as possible, because each costs time."""

    done: tf.Tensor
    """Number of steps done, int64; the last one counts even if it is not finite."""

    loss_sum: tf.Tensor
    rows: tf.Tensor
    last: StepResult


def _loop_single_steps(
    steps: tf.Tensor,
    one: Callable[[Any], tuple[StepResult, Any]],
    state: Any,
    *,
    parallel_iterations: int,
) -> tuple[StepTotals, Any]:
    """Run single steps until all are done, one is not finite, or a stop is requested.

    Args:
        steps: Number of steps, at least one.
        one: Runs a step: state -> result of the step, and state of the next step.
        state: State of the first step.
        parallel_iterations: Number of steps that may run partly in parallel.

    Returns:
        The totals without the wait for input, and the last state.
    """

    def is_left(state_: _LoopState, _: Any) -> tf.Tensor:
        well = tf.logical_and(state_.last.finite, tf.equal(state_.last.signals[0], 0))
        return tf.logical_and(state_.done < steps, well)

    def one_more(state_: _LoopState, state: Any) -> tuple[_LoopState, Any]:
        result, state = one(state)
        return _LoopState(
            state_.done + 1,
            state_.loss_sum + result.loss_sum,
            state_.rows + result.rows,
            result,
        ), state

    zero = tf.constant(0.0)
    before = StepResult(zero, zero, tf.constant(True), tf.constant([0, 0]))
    nothing = _LoopState(tf.constant(0, tf.int64), zero, zero, before)
    state_, state = tf.while_loop(
        is_left, one_more, (nothing, state), parallel_iterations=parallel_iterations
    )
    last = state_.last
    return totals_of_step(last)._replace(
        loss_sum=state_.loss_sum,
        rows=state_.rows,
        steps=state_.done - tf.cast(tf.logical_not(last.finite), tf.int64),
    ), state


def _loop_until_done(
    steps: tf.Tensor,
    some: Callable[[tf.Tensor, tf.Tensor, Any], tuple[StepTotals, Any]],
    ahead: Any,
) -> tuple[StepTotals, Any]:
    """Run groups of steps until all are done.

    Args:
        steps: Number of steps.
        some: Runs a group: (number of steps done, a tensor to wait for, prefetched input) -> totals, and
            input that was prefetched for the next steps.
        ahead: Input that was prefetched for the first steps.

    Returns:
        Totals of all steps, and input that was prefetched for later steps.
    """

    def is_left(state_: StepTotals, _: Any) -> tf.Tensor:
        going = tf.logical_and(state_.finite, tf.equal(state_.signals[0], 0))
        return tf.logical_and(state_.steps < steps, going)

    def some_more(state_: StepTotals, ahead: Any) -> tuple[StepTotals, Any]:
        totals, ahead = some(state_.steps, state_.loss_sum, ahead)
        return state_.and_then(totals), ahead

    nothing = StepTotals(
        loss_sum=tf.constant(0.0),
        rows=tf.constant(0.0),
        wait_s=tf.constant(0.0, tf.float64),
        steps=tf.constant(0, tf.int64),
        finite=tf.constant(True),
        signals=tf.constant([0, 0]),
        last_loss=tf.constant(0.0),
    )
    all_of_them: StepTotals
    all_of_them, left = tf.while_loop(is_left, some_more, (nothing, ahead), parallel_iterations=1)
    return all_of_them, left


@tf.autograph.experimental.do_not_convert
def _with_unused(iterator: Any, left: Any, *, size: int) -> Any:
    """Return a group with unused batches, the old one or a new one, and how many of its batches are used."""
    _, used = left
    return tf.cond(used < size, lambda: left, lambda: (next(iterator), tf.constant(0, tf.int64)))


@tf.autograph.experimental.do_not_convert
def _part_of(call: Any, first: tf.Tensor, rows: int) -> Any:
    """Return some rows of a call; rows after its last row are zeros."""

    def cut(tensor: tf.Tensor) -> tf.Tensor:
        part = tensor[first : first + rows]
        missing = rows - tf.shape(part)[0]
        padded = tf.pad(part, [tf.stack([0, missing]), *[[0, 0]] * (tensor.shape.rank - 1)])
        return tf.ensure_shape(padded, [rows, *tensor.shape[1:]])

    return tf.nest.map_structure(cut, call)


def _operations() -> list[tf.Operation]:
    """Return the operations of the graph that is being traced, in the order of their creation."""
    return list(tf.compat.v1.get_default_graph().get_operations())


def _writes(operation: tf.Operation) -> bool:
    return operation.op_def.is_stateful and operation.type != "ReadVariableOp"


def clock_function() -> Callable[[], tf.Tensor]:
    """Return a function that adds an operation to the graph; the operation reads a clock, seconds."""
    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:
        # TensorFlow refuses its own clock if operations must be deterministic, for the whole
        # process.
        return _python_clock
    return tf.timestamp


def _python_clock() -> tf.Tensor:
    # The check for Python inside the step recognizes Stoker's operations by this name.
    with tf.name_scope("stoker"):
        read = tf.numpy_function(lambda: np.float64(time.monotonic()), [], tf.float64)
        return tf.ensure_shape(read, [])


def step_of(call: Any, step: tf.Tensor | int, rows: int) -> Any:
    """Return the rows of a step, from the rows of a call."""
    return tf.nest.map_structure(lambda tensor: tensor[step * rows : (step + 1) * rows], call)


def make_run_resident(
    step: Step, sample: Any, *, fixed: bool = False
) -> Callable[[Any, tf.Tensor], tf.Tensor]:
    """Return a function that runs steps on an element in memory, to measure T_ceil.

    Args:
        step: The result of `make_train_step`.
        sample: An element for a step. The function accepts any number of rows, as the step on real input
            does. With a TPU, the number of rows is that of a replica.
        fixed: Whether to trace for the sample's number of rows. If all batches have the same shape, XLA
            would otherwise compile the step a second time.
    """
    program = multi_step_program(step)
    batch_spec = tf.nest.map_structure(
        lambda part: (
            tf.TensorSpec([part.shape[0] if fixed else None, *part.shape[1:]], part.dtype)
            if tf.is_tensor(part)
            else tf.type_spec_from_value(part)
        ),
        sample,
    )

    def some(element: Any, left: tf.Tensor) -> StepTotals:
        if program is None:
            return totals_of_step(step(element))
        batches = tf.nest.map_structure(
            lambda tensor: _part_of(
                tf.concat([tensor] * program.steps_per_program, 0),
                0,
                program.steps_per_program * program.rows,
            ),
            element,
        )
        count = tf.minimum(left, program.steps_per_program)
        return program.several(batches, count, tf.constant(0, tf.int64))

    @tf.function(input_signature=[batch_spec, tf.TensorSpec([], tf.int64)], autograph=False)
    def run_resident(element: Any, steps: tf.Tensor) -> tf.Tensor:
        def some_more(loss_sum: tf.Tensor, done: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            totals = some(element, steps - done)
            # Count steps even if they are not finite, so that the measurement ends.
            return loss_sum + totals.loss_sum, done + tf.maximum(totals.steps, 1)

        nothing = tf.constant(0.0), tf.constant(0, tf.int64)
        loss_sum, _ = tf.while_loop(
            lambda _, done: done < steps, some_more, nothing, parallel_iterations=1
        )
        return loss_sum

    return run_resident
