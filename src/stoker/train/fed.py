"""Many steps in one Python call, over an iterator or over one resident batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from stoker.train.one_program import OneProgram, does_several
from stoker.train.outcome import Outcome, Sums, sums_of

Step = Callable[[Any], Outcome]
"""What `make_train_step` makes."""

Several = Callable[[Any, tf.Tensor, tf.Tensor], Sums]
"""A group of batches, how many steps at most, and how many of it are used -> what those did."""


def make_run_fed(
    step: Step,
    *,
    rows_a_step: int | None,
    alone: bool = False,
    group: int = 1,
    sound: Callable[[], tf.Tensor] | None = None,
) -> Any:
    """Many steps over an iterator in one call, with the wait for input timed inside the graph.

    A call ends before its time after a step that was not finite, or when a worker is asked to end.
    Steps do not overlap: an exchange of one step that does not wait for the weights would meet that
    of another step on another replica.

    Args:
        step: What `make_train_step` made.
        rows_a_step: Where an element holds the rows of a whole call: how many of them make a step.
            None where an element is for one step.
        alone: A call is one step: a loop around it would cost about 0.1 ms.
        group: Steps whose batches are an element; where a program does several, it says so itself.
        sound: Where steps update at once: looks, when the call ends, whether what they have written
            is finite.

    Returns:
        A `tf.function` of the iterator, the number of steps, int64, whether to look, and what is
        left of a group, as in `Source`, that gives `Sums`. A call after which something is saved
        looks in any case.
    """
    some_of = _reader(step, rows_a_step=rows_a_step, alone=alone, group=group)

    # AutoGraph took a third of the time that it takes to trace this, in every process.
    @tf.function(reduce_retracing=True, autograph=False)
    def run_fed(iterator: Any, steps: tf.Tensor, look: Any = True, left: Any = ()) -> Sums:
        sums = some_of(iterator, steps, left)
        if sound is None:
            return sums
        asked = tf.logical_or(look, tf.reduce_any(sums.signals > 0))
        with tf.control_dependencies([sums.loss_sum]):
            seen = tf.cond(asked, sound, lambda: tf.constant(True))
        return sums._replace(finite=tf.logical_and(sums.finite, seen))

    return run_fed


def _reader(step: Step, *, rows_a_step: int | None, alone: bool, group: int) -> Callable[..., Sums]:
    """What takes elements, does steps, and has something left for the next call."""
    if rows_a_step is not None:
        return _OfCall(step, rows_a_step=rows_a_step, alone=alone)
    program = does_several(step)
    if program is not None:
        return _OfGroups(_in_a_program(program), program.together)
    return _OfBatches(step, alone=alone) if group == 1 else _OfGroups(_one_by_one(step), group)


class _Timed:
    """How long the device waits for what is taken."""

    def __init__(self) -> None:
        self._now_s = _clock()

    def __call__(self, take: Callable[[], Any], after: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """The clock starts when what came before has ended, and stops when all is there."""
        with tf.control_dependencies([after]):
            asked_s = self._now_s()
        with tf.control_dependencies([asked_s]):
            taken = take()
        with tf.control_dependencies(tf.nest.flatten(taken, expand_composites=True)):
            return taken, self._now_s() - asked_s


class _OfBatches:
    """Steps over an iterator whose elements are for one step each."""

    def __init__(self, step: Step, *, alone: bool) -> None:
        self._step, self._alone = step, alone
        self._timed = _Timed()

    def __call__(self, iterator: Any, steps: tf.Tensor, _: Any) -> Sums:
        def one(after: tf.Tensor) -> Sums:
            element, wait_s = self._timed(lambda: next(iterator), after)
            return sums_of(self._step(element))._replace(wait_s=wait_s)

        if self._alone:
            return one(tf.constant(0.0))
        if isinstance(iterator, tf.data.Iterator):
            return self._one_ahead(iterator, steps)
        # What is handed to several replicas cannot be a condition's.
        return _until_ended(steps, lambda _, after, ahead: (one(after), ahead), ())[0]

    def _one_ahead(self, iterator: Any, steps: tf.Tensor) -> Sums:
        """While a step is computed, the batch of the next one is taken."""

        def some(done: tf.Tensor, _: tf.Tensor, batch: Any) -> tuple[Sums, Any]:
            ahead = _next_or(iterator, batch, more=done + 1 < steps)
            sums = sums_of(self._step(batch))
            # What the device waits for begins when it has ended.
            _, wait_s = self._timed(lambda: ahead, sums.loss_sum)
            return sums._replace(wait_s=wait_s), ahead

        batch, waited_s = self._timed(lambda: next(iterator), tf.constant(0.0))
        sums, _ = _until_ended(steps, some, batch)
        return sums._replace(wait_s=sums.wait_s + waited_s)


class _OfGroups:
    """Steps over an iterator whose elements are the batches of several steps."""

    def __init__(self, several: Several, size: int) -> None:
        self._several, self._size = several, size
        self._timed = _Timed()

    def __call__(self, iterator: Any, steps: tf.Tensor, left: Any) -> Sums:
        size = self._size

        def some(done: tf.Tensor, after: tf.Tensor, left: Any) -> tuple[Sums, Any]:
            (group, used), wait_s = self._timed(
                lambda: _with_some(iterator, left, size=size), after
            )
            sums = self._several(group, tf.minimum(steps - done, size - used), used)
            return sums._replace(wait_s=wait_s), (group, used + sums.steps)

        sums, left = _until_ended(steps, some, left)
        return sums._replace(left=left)


def _in_a_program(program: OneProgram) -> Several:
    def several(group: Any, steps: tf.Tensor, used: tf.Tensor) -> Sums:
        rows = tf.nest.map_structure(lambda t: tf.reshape(t, [-1, *t.shape[2:]]), group)
        return program.several(rows, steps, used)

    return several


def _one_by_one(step: Step) -> Several:
    """One step only, so that sums are added up as without groups."""

    def several(group: Any, _: tf.Tensor, used: tf.Tensor) -> Sums:
        return sums_of(step(tf.nest.map_structure(lambda tensor: tensor[used], group)))

    return several


class _OfCall:
    """Steps over an iterator whose elements hold the rows of a whole call."""

    def __init__(self, step: Step, *, rows_a_step: int, alone: bool) -> None:
        self._step, self._rows, self._alone = step, rows_a_step, alone
        self._program = does_several(step)
        self._timed = _Timed()

    def __call__(self, iterator: Any, steps: tf.Tensor, _: Any) -> Sums:
        call, wait_s = self._timed(lambda: next(iterator), tf.constant(0.0))
        if self._alone:
            sums = self._some(call, tf.constant(0, tf.int64), steps)
        else:
            sums, _ = _until_ended(
                steps, lambda done, _, ahead: (self._some(call, done, steps - done), ahead), ()
            )
        return sums._replace(wait_s=wait_s)

    def _some(self, call: Any, done: tf.Tensor, left: tf.Tensor) -> Sums:
        size, program, zero = self._rows, self._program, tf.constant(0, tf.int64)
        if program is None:
            return sums_of(self._step(step_of(call, done, size)))
        whole = tf.shape(tf.nest.flatten(call)[0], tf.int64)[0] // size
        count = tf.minimum(tf.minimum(left, whole - done), program.together)
        return tf.cond(
            done < whole,
            lambda: program.several(
                _part_of(call, done * size, program.together * size), count, zero
            ),
            # What is left at an epoch's end.
            lambda: sums_of(self._step(step_of(call, done, size))),
        )


def _until_ended(
    steps: tf.Tensor, some: Callable[[tf.Tensor, tf.Tensor, Any], tuple[Sums, Any]], ahead: Any
) -> tuple[Sums, Any]:
    """Some steps after another, until all are done.

    Args:
        steps: How many.
        some: Takes the steps done, what has to be waited for, and what was taken ahead for these
            steps; gives what they did, and what was taken ahead for those after them.
        ahead: What was taken for the first ones.

    Returns:
        What all of them did, and what was taken ahead for those after them.
    """

    def is_left(so_far: Sums, _: Any) -> tf.Tensor:
        going = tf.logical_and(so_far.finite, tf.equal(so_far.signals[0], 0))
        return tf.logical_and(so_far.steps < steps, going)

    def some_more(so_far: Sums, ahead: Any) -> tuple[Sums, Any]:
        sums, ahead = some(so_far.steps, so_far.loss_sum, ahead)
        return sums._replace(
            loss_sum=so_far.loss_sum + sums.loss_sum,
            rows=so_far.rows + sums.rows,
            wait_s=so_far.wait_s + sums.wait_s,
            steps=so_far.steps + sums.steps,
        ), ahead

    nothing = Sums(
        loss_sum=tf.constant(0.0),
        rows=tf.constant(0.0),
        wait_s=tf.constant(0.0, tf.float64),
        steps=tf.constant(0, tf.int64),
        finite=tf.constant(True),
        signals=tf.constant([0, 0]),
        last_loss=tf.constant(0.0),
    )
    all_of_them: Sums
    all_of_them, left = tf.while_loop(is_left, some_more, (nothing, ahead), parallel_iterations=1)
    return all_of_them, left


@tf.autograph.experimental.do_not_convert
def _next_or(iterator: Any, last: Any, *, more: tf.Tensor) -> Any:
    """The next element; where there is to be none, the last one again."""
    return tf.cond(more, lambda: next(iterator), lambda: last)


@tf.autograph.experimental.do_not_convert
def _with_some(iterator: Any, left: Any, *, size: int) -> Any:
    """A group of which some is not used yet, and how much of it is used."""
    _, used = left
    return tf.cond(used < size, lambda: left, lambda: (next(iterator), tf.constant(0, tf.int64)))


@tf.autograph.experimental.do_not_convert
def _part_of(call: Any, first: tf.Tensor, rows: int) -> Any:
    """So many rows of a call; behind its last ones there are zeros."""

    def cut(tensor: tf.Tensor) -> tf.Tensor:
        part = tensor[first : first + rows]
        missing = rows - tf.shape(part)[0]
        padded = tf.pad(part, [tf.stack([0, missing]), *[[0, 0]] * (tensor.shape.rank - 1)])
        return tf.ensure_shape(padded, [rows, *tensor.shape[1:]])

    return tf.nest.map_structure(cut, call)


def _clock() -> Callable[[], tf.Tensor]:
    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:
        # TensorFlow refuses its own clock where operations must be deterministic, which holds for
        # the whole process.
        return _python_clock
    return tf.timestamp


def _python_clock() -> tf.Tensor:
    # By its name a check for Python inside the step knows that it is ours.
    with tf.name_scope("stoker"):
        read = tf.numpy_function(lambda: np.float64(time.monotonic()), [], tf.float64)
        return tf.ensure_shape(read, [])


def step_of(call: Any, step: tf.Tensor | int, rows: int) -> Any:
    """The rows of one step, cut out of the rows of a call."""
    return tf.nest.map_structure(lambda tensor: tensor[step * rows : (step + 1) * rows], call)


def make_run_resident(step: Step, sample: Any) -> Callable[[Any, tf.Tensor], tf.Tensor]:
    """The same steps on one element that stays on the device: the ceiling that input can reach.

    Args:
        step: What `make_train_step` made.
        sample: The element of one step, so that a step for any number of rows is compiled, as for
            fed batches; or of as many as each replica has been handed.
    """
    program = does_several(step)
    batch_spec = tf.nest.map_structure(
        lambda part: (
            tf.TensorSpec([None, *part.shape[1:]], part.dtype)
            if tf.is_tensor(part)
            else tf.type_spec_from_value(part)
        ),
        sample,
    )

    def some(element: Any, left: tf.Tensor) -> Sums:
        if program is None:
            return sums_of(step(element))
        batches = tf.nest.map_structure(
            lambda tensor: _part_of(
                tf.concat([tensor] * program.together, 0), 0, program.together * program.rows
            ),
            element,
        )
        count = tf.minimum(left, program.together)
        return program.several(batches, count, tf.constant(0, tf.int64))

    @tf.function(input_signature=[batch_spec, tf.TensorSpec([], tf.int64)], autograph=False)
    def run_resident(element: Any, steps: tf.Tensor) -> tf.Tensor:
        def some_more(loss_sum: tf.Tensor, done: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            sums = some(element, steps - done)
            # Also where a step is not finite: what is measured ends.
            return loss_sum + sums.loss_sum, done + tf.maximum(sums.steps, 1)

        nothing = tf.constant(0.0), tf.constant(0, tf.int64)
        loss_sum, _ = tf.while_loop(
            lambda _, done: done < steps, some_more, nothing, parallel_iterations=1
        )
        return loss_sum

    return run_resident
