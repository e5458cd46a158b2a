"""Many steps in one Python call, over an iterator or over one resident batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from stoker.train.step.one_program import OneProgram, does_several
from stoker.train.step.step_input import flat, taken_here, unflat
from stoker.train.step.step_totals import Outcome, Sums, sums_of

Step = Callable[[Any], Outcome]
"""What `make_train_step` makes."""


def make_run_fed(
    step: Step,
    *,
    rows_a_step: int | None,
    alone: bool = False,
    overlap: bool = False,
    sound: Callable[[], tf.Tensor] | None = None,
) -> Any:
    """Many steps over an iterator in one call, with the wait for input timed inside the graph.

    A call ends before its time after a step that was not finite, or when a worker is asked to end.

    Args:
        step: What `make_train_step` made.
        rows_a_step: Where an element holds the rows of a whole call: how many of them make a step.
            None where an element is for one step.
        alone: A call is one step: a loop around it would cost about 0.1 ms.
        overlap: What a step writes is written before the next one begins; whether what nobody waits for
            may end later. Not over replicas: an exchange of one step would meet that of another
            step on another replica.
        sound: Where steps update at once: looks, when the call ends, whether what they have written
            is finite.

    Returns:
        A `tf.function` of the iterator, the number of steps, int64, whether to look, and what is
        left, as in `Source`, that gives `Sums`. Where nothing is left, each step of one device takes
        its own batch. A call after which something is saved looks in any case.
    """
    some_of = _reader(step, rows_a_step=rows_a_step, alone=alone, overlap=overlap)

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


def _reader(
    step: Step, *, rows_a_step: int | None, alone: bool, overlap: bool
) -> Callable[..., Sums]:
    """What takes elements, does steps, and has something left for the next call."""
    if rows_a_step is not None:
        return _OfCall(step, rows_a_step=rows_a_step, alone=alone)
    program = does_several(step)
    if program is not None:
        return _OfGroups(program)
    return _OfBatches(step, alone=alone, at_once=2 if overlap else 1)


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

    def behind(self, ended: list[Any], taken: Any) -> tf.Tensor:
        """How much later than a step's end there is what was asked for before it, seconds, float64.

        Neither clock holds up the other, or what comes next.
        """
        with tf.control_dependencies(ended):
            ended_s = self._now_s()
        with tf.control_dependencies(tf.nest.flatten(taken, expand_composites=True)):
            return tf.maximum(self._now_s() - ended_s, 0.0)


class _OfBatches:
    """Steps over an iterator whose elements are for one step each."""

    def __init__(self, step: Step, *, alone: bool, at_once: int) -> None:
        self._step, self._alone, self._at_once = step, alone, at_once
        self._timed = _Timed()

    def __call__(self, iterator: Any, steps: tf.Tensor, left: Any) -> Sums:
        if isinstance(iterator, tf.data.Iterator):
            if left:
                return self._one_ahead(iterator, steps, left)
            return self._one_then_another(iterator, steps)

        # What is handed to several replicas has no place between two calls.
        def one(after: tf.Tensor) -> Sums:
            element, wait_s = self._timed(lambda: next(iterator), after)
            return sums_of(self._step(element))._replace(wait_s=wait_s)

        if self._alone:
            return one(tf.constant(0.0))
        return _until_ended(steps, lambda _, after, ahead: (one(after), ahead), ())[0]

    def _one_then_another(self, iterator: Any, steps: tf.Tensor) -> Sums:
        """A batch is taken by the thread that computes, and nothing else runs meanwhile.

        Taken ahead, by a thread of its own, it would be asked for where TensorFlow's order of a trace
        has it: at the end, for one, where the step then waits for that thread.
        """

        def one(waited_s: tf.Tensor) -> tuple[Outcome, tf.Tensor]:
            batch, wait_s = self._timed(lambda: taken_here(iterator), waited_s)
            # Whatever the step reads comes behind, or it would be counted as waiting.
            with tf.control_dependencies([wait_s]):
                return self._step(batch), waited_s + wait_s

        nothing = tf.constant(0.0, tf.float64)
        if self._alone:
            outcome, wait_s = one(nothing)
            return sums_of(outcome)._replace(wait_s=wait_s)
        sums, wait_s = _one_by_one(steps, one, nothing, at_once=1)
        return sums._replace(wait_s=wait_s)

    def _one_ahead(self, iterator: Any, steps: tf.Tensor, left: Any) -> Sums:
        """While a step is computed, the batch of the next one is taken, also of the next call's first."""

        def one(state: Any) -> tuple[Outcome, Any]:
            batch, waited_s = state
            ahead = next(iterator)
            before = len(_operations())
            outcome = self._step(batch)
            # It ends when all that it writes is written, which is later than its loss is known.
            written = [each for each in _operations()[before:] if _writes(each)]
            wait_s = self._timed.behind([outcome.loss_sum, *written], ahead)
            return outcome, (ahead, waited_s + wait_s)

        first = unflat(left, iterator.element_spec), tf.constant(0.0, tf.float64)
        if self._alone:
            outcome, (ahead, wait_s) = one(first)
            sums = sums_of(outcome)
        else:
            sums, (ahead, wait_s) = _one_by_one(steps, one, first, at_once=self._at_once)
        return sums._replace(wait_s=wait_s, left=flat(ahead))


class _OfGroups:
    """Steps of a program over an iterator whose elements are the batches of several."""

    def __init__(self, program: OneProgram) -> None:
        self._program = program
        self._timed = _Timed()

    def __call__(self, iterator: Any, steps: tf.Tensor, left: Any) -> Sums:
        size = self._program.together

        def some(done: tf.Tensor, after: tf.Tensor, left: Any) -> tuple[Sums, Any]:
            (group, used), wait_s = self._timed(
                lambda: _with_some(iterator, left, size=size), after
            )
            rows = tf.nest.map_structure(lambda t: tf.reshape(t, [-1, *t.shape[2:]]), group)
            sums = self._program.several(rows, tf.minimum(steps - done, size - used), used)
            return sums._replace(wait_s=wait_s), (group, used + sums.steps)

        sums, left = _until_ended(steps, some, _packed(left, iterator))
        group, used = left
        return sums._replace(left=(*flat(group), used))


def _packed(left: Any, iterator: Any) -> tuple[Any, tf.Tensor]:
    """What is left, as the iterator has it, and how much of it is used."""
    *group, used = left
    return unflat(group, iterator.element_spec), used


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


class _SoFar(NamedTuple):
    """What must be known between two steps of a call: what a loop hands on costs each of them."""

    done: tf.Tensor
    """Steps, int64; the last one counts, finite or not."""

    loss_sum: tf.Tensor
    rows: tf.Tensor
    last: Outcome


def _one_by_one(
    steps: tf.Tensor,
    one: Callable[[Any], tuple[Outcome, Any]],
    state: Any,
    *,
    at_once: int,
) -> tuple[Sums, Any]:
    """Steps by themselves, until all are done, one is not finite, or the end is asked for.

    Args:
        steps: How many, at least one.
        one: Takes a state; gives what became of this step, and the next state.
        state: Of the first step.
        at_once: Steps of which something may run at a time.

    Returns:
        What they did, their wait for input not counted, and the last state.
    """

    def is_left(so_far: _SoFar, _: Any) -> tf.Tensor:
        well = tf.logical_and(so_far.last.finite, tf.equal(so_far.last.signals[0], 0))
        return tf.logical_and(so_far.done < steps, well)

    def one_more(so_far: _SoFar, state: Any) -> tuple[_SoFar, Any]:
        outcome, state = one(state)
        return _SoFar(
            so_far.done + 1,
            so_far.loss_sum + outcome.loss_sum,
            so_far.rows + outcome.rows,
            outcome,
        ), state

    zero = tf.constant(0.0)
    before = Outcome(zero, zero, tf.constant(True), tf.constant([0, 0]))
    nothing = _SoFar(tf.constant(0, tf.int64), zero, zero, before)
    so_far, state = tf.while_loop(is_left, one_more, (nothing, state), parallel_iterations=at_once)
    last = so_far.last
    return sums_of(last)._replace(
        loss_sum=so_far.loss_sum,
        rows=so_far.rows,
        steps=so_far.done - tf.cast(tf.logical_not(last.finite), tf.int64),
    ), state


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
        return so_far.and_then(sums), ahead

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


def _operations() -> list[tf.Operation]:
    """The operations of the graph that is being traced, in the order of their creation."""
    return list(tf.compat.v1.get_default_graph().get_operations())


def _writes(operation: tf.Operation) -> bool:
    return operation.op_def.is_stateful and operation.type != "ReadVariableOp"


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


def make_run_resident(
    step: Step, sample: Any, *, fixed: bool = False
) -> Callable[[Any, tf.Tensor], tf.Tensor]:
    """The same steps on one element that stays on the device: the ceiling that input can reach.

    Args:
        step: What `make_train_step` made.
        sample: The element of one step, so that a step for any number of rows is compiled, as for
            fed batches; or of as many as each replica has been handed.
        fixed: Compile it for the sample's number of rows: XLA would compile a step that is fed batches
            of one known shape once more.
    """
    program = does_several(step)
    batch_spec = tf.nest.map_structure(
        lambda part: (
            tf.TensorSpec([part.shape[0] if fixed else None, *part.shape[1:]], part.dtype)
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
