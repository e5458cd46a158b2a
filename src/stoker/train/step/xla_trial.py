"""Finds out whether XLA makes a run faster, while the run trains and without delaying it.

The run begins with the form of the step that needs no compiler. During one of its calls, the main thread
traces the step for XLA. Then another thread lets XLA compile it, with a call on copies of the variables. After
that, both forms of the step take turns on the run's own batches, and the faster one is kept. A checkpoint
records the decision, and after this checkpoint only the chosen form is used.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import tensorflow as tf

from stoker.cluster.compile_flags import give_way, publish
from stoker.core.threads import outlives_python
from stoker.core.user_code import first_line
from stoker.internals.tensorflow_internals import call_flat
from stoker.train.config import TEST_SWITCH
from stoker.train.context.position import Position
from stoker.train.health.degradation import check_xla
from stoker.train.step.compiled import CompiledStep
from stoker.train.step.oom import is_out_of_memory
from stoker.train.step.program import Program, StepInput, flat
from stoker.train.step.step_totals import StepTotals

_LOG = logging.getLogger(__name__)

MIN_REMAINING_S = 60.0
"""XLA is tried only if at least this much time of the run remains, at the current speed, seconds."""

PAIRS, MAX_PAIRS = 5, 51
"""Minimum and maximum number of pairs of calls that are compared, a call of each form of the step. They are odd,
so that the median is one of the measured times."""

FORM_S = 0.5
"""Target for the total time of the compared calls of each form, seconds: short calls need more pairs."""

CALL_S = 0.25
"""Target for the time of a compared call, seconds: short compared with the run, but long compared with the
clock's resolution and the scheduler's time slice."""

MARGIN = 1.02
"""Minimum speedup for a switch to XLA: a smaller one is noise."""

SWITCH_S = 1.0
"""Minimum time that the switch must save in the rest of the run, seconds: the switch costs a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """The plan of the run's next call."""

    steps: int
    """Number of steps."""

    program: Program | None = None
    """The form of the step that runs; None: the current one."""

    compared: bool = False
    """Whether the time of the call is used in the comparison."""

    meanwhile: Callable[[], None] | None = None
    """Work for the main thread while another thread runs the call; None: the main thread runs the call."""

    def run(self, call: Callable[[], StepTotals]) -> tuple[StepTotals, float]:
        """Run the call.

        Args:
            call: Runs it.

        Returns:
            The totals of its steps, and the time that they took, seconds.
        """
        if self.meanwhile is None:
            return _timed(call)
        with ThreadPoolExecutor(1, "stoker-step") as pool:
            running = pool.submit(_timed, call)
            self.meanwhile()
            return running.result()


def _timed(call: Callable[[], StepTotals]) -> tuple[StepTotals, float]:
    begun_s = time.monotonic()
    totals = call()
    # Reading a number waits until the device has finished.
    int(totals.steps)
    return totals, time.monotonic() - begun_s


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision which form of the step is kept."""

    xla: bool
    why: str
    """Reason for the user, e.g. `1.31x (12.1 -> 9.2 ms per step)`."""


class XlaTrial:
    """The trial of XLA in a run; `decision` is None until its end."""

    def __init__(
        self,
        current: Callable[[], CompiledStep],
        position: Position,
        *,
        wanted: bool,
    ) -> None:
        """Store the arguments; nothing starts yet.

        Args:
            current: Returns the run's current step.
            position: The run's position.
            wanted: Whether XLA is tried.
        """
        self._current, self._position = current, position
        self._least_left_s = float(os.environ.get(TEST_SWITCH, MIN_REMAINING_S))
        self._step_s = 0.0
        self._calls = 0
        self._program: Program | None = None
        self._compiling: _Compiling | None = None
        self._warm = False
        self._pairs: list[bool] = []
        self._step_times_s: dict[bool, list[float]] = {False: [], True: []}
        self.decision: Decision | None = None
        self.wanted = wanted
        if wanted and (why := current().why_xla_is_impossible):
            self._decide(xla=False, why=f"not tried, {why}")

    @property
    def in_progress(self) -> bool:
        """Whether the trial uses memory for a second form of the step."""
        compiling = self._compiling is not None and not self._compiling.ended
        return compiling or (self._program is not None and self.decision is None)

    def plan_call(self, step_input: StepInput, planned: int, *, whole: bool) -> CallPlan:
        """Plan the next call.

        Args:
            step_input: The input of the call.
            planned: Maximum number of steps.
            whole: Whether the call must have exactly `planned` steps.
        """
        if not self.wanted or self.decision is not None:
            return CallPlan(steps=planned)
        if self._program is None:
            if self._calls >= 2 and self._left_s() >= self._least_left_s:
                return CallPlan(steps=planned, meanwhile=lambda: self._trace(step_input))
            return CallPlan(steps=planned)
        compiling = self._compiling
        if compiling is None or not compiling.ended:
            return CallPlan(steps=planned)
        if compiling.error is not None:
            self._decide(xla=False, why=f"not used, {compiling.error}")
            return CallPlan(steps=planned)
        steps = planned if whole else min(planned, max(1, round(CALL_S / self._step_s)))
        if not self._warm:
            # The first call of the new form is not compared, because it loads the compiled program.
            self._warm = True
            return CallPlan(steps=1 if not whole else planned, program=self._program)
        if not self._pairs:
            self._plan_comparison(steps)
            if self.decision is not None:
                return CallPlan(steps=planned)
        by_xla = self._pairs[-1]
        return CallPlan(steps=steps, compared=True, program=self._program if by_xla else None)

    def record_call(self, plan: CallPlan, steps: int, wall_s: float) -> None:
        """Record the time of a call.

        Args:
            plan: The result of `plan_call` for this call.
            steps: Number of its steps.
            wall_s: Time that they took, seconds.
        """
        if not self.wanted or self.decision is not None:
            return
        self._calls += 1
        if plan.compared:
            self._step_times_s[self._pairs.pop()].append(wall_s / steps)
            if not self._pairs:
                self._compare()
        elif plan.program is None:
            self._step_s = wall_s / steps

    def give_up(self, why: str, *, wait: bool = False) -> None:
        """End the trial without XLA.

        Args:
            why: Reason for the user.
            wait: Whether to wait until the compiler has ended; it uses memory until then.
        """
        if self.wanted and self.decision is None:
            self._decide(xla=False, why=why)
        if wait and self._compiling is not None:
            self._compiling.join()
            self._compiling = None

    def drop(self, why: str) -> None:
        """End the trial without XLA, even if it has decided for XLA but no step has used it yet."""
        if self.wanted and self._program is not None and self._position.xla is None:
            self._decide(xla=False, why=why)

    def adopted(self) -> CompiledStep:
        """Return the current step in the form that XLA compiled, if the trial chose it."""
        step = self._current()
        return step if self._program is None else step.with_program(self._program)

    def _trace(self, step_input: StepInput) -> None:
        try:
            program = self._current().trace_for_xla(step_input)
        except Exception as error:  # noqa: BLE001 - whatever the user's layers raise: the run goes on without
            self._decide(xla=False, why=f"not used, the step cannot be traced: {first_line(error)}")
            return
        if (finding := check_xla(program.traced)) is not None:
            self._decide(xla=False, why=f"not used, {finding.message}")
            return
        self._program = program
        elements = self._current().source.elements_to_compile()
        self._compiling = _Compiling(program, step_input, elements)

    def _left_s(self) -> float:
        return self._step_s * (self._position.steps - self._position.step)

    def _plan_comparison(self, steps: int) -> None:
        """Plan the order of the compared calls; end the trial if too few steps remain for a gain after it."""
        left = self._position.steps - self._position.step
        pairs = min(MAX_PAIRS, max(PAIRS, round(FORM_S / (steps * self._step_s)) | 1))
        if left < 4 * pairs * steps:
            self._decide(xla=False, why="not used, too few steps remain for a comparison")
            return
        for pair in range(pairs):
            # The first call of a pair warms up the machine for the second one, so the forms change places.
            self._pairs += [True, False] if pair % 2 else [False, True]

    def _compare(self) -> None:
        before_s, after_s = median(self._step_times_s[False]), median(self._step_times_s[True])
        gain = before_s / after_s
        comparison = f"{gain:.2f}x ({1e3 * before_s:.3g} -> {1e3 * after_s:.3g} ms per step)"
        left = self._position.steps - self._position.step
        if gain < MARGIN:
            self._decide(xla=False, why=f"{comparison}, not used")
        elif (before_s - after_s) * left < SWITCH_S:
            self._decide(xla=False, why=f"{comparison}, not used: too few steps remain to pay off")
        else:
            used = f"{comparison}, used from the checkpoint at step {self._position.step:,} on"
            self._decide(xla=True, why=used)

    def _decide(self, *, xla: bool, why: str) -> None:
        self.decision = Decision(xla=xla, why=why)
        if not xla:
            self._program = None
        _LOG.warning("XLA: %s", why)


class _Compiling:
    """A thread in which XLA compiles a step, for each number of rows that the step can have."""

    def __init__(self, program: Program, step_input: StepInput, elements: list[Any]) -> None:
        self.error: str | None = None
        self._program, self._elements = program, elements
        self._ahead = step_input.ahead
        self._thread = threading.Thread(target=self._run, name="stoker-xla", daemon=True)
        self._thread.start()
        outlives_python(self._thread, does="XLA compiles")

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            for element in self._elements:
                try:
                    self._compile(element)
                except tf.errors.OpError as error:
                    if not give_way(error):
                        raise
                    self._compile(element)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises: the run goes on without
            out = is_out_of_memory(error)
            what = "compiling it needs more memory than is left" if out else first_line(error)
            self.error = what
        else:
            publish()

    def _compile(self, element: Any) -> None:
        traced = self._program.traced
        # Create the copies in this thread, so that training continues in the main thread.
        copies = copies_of_captures(traced)
        left = flat(element) if self._ahead else ()
        iterator = iter(tf.data.Dataset.from_tensors(element).repeat())
        arguments = iterator, tf.constant(1, tf.int64), tf.constant(True)
        totals = call_on_copies(traced, (*arguments, *left), copies)
        np.asarray(totals.loss_sum)


def copies_of_captures(function: Any) -> list[tf.Variable]:
    """Return copies of all variables that a concrete function uses, on the same devices with the same values.

    Args:
        function: A concrete function.

    Returns:
        A copy for each captured variable, in the order of `function.captured_inputs`.
    """
    copies = []
    for variable in _captured(function):
        if variable is not None:
            with tf.device(variable.device):
                copies.append(tf.Variable(_copied(variable), trainable=False))
    return copies


def call_on_copies(function: Any, args: Any, copies: Sequence[tf.Variable]) -> Any:
    """Call a concrete function so that it reads and writes only copies of its variables.

    Args:
        function: A concrete function.
        args: Its arguments, nested; they are flattened in TensorFlow's order.
        copies: The result of `copies_of_captures`.
    """
    left = iter(copies)
    captures = [
        tensor if variable is None else next(left).handle
        for tensor, variable in zip(function.captured_inputs, _captured(function), strict=True)
    ]
    flat = tf.nest.flatten(args, expand_composites=True)
    return call_flat(function, flat, captures)


def _copied(variable: tf.Variable) -> tf.Tensor:
    """Return a variable's value in separate memory, because a step may write the variable's memory in place."""
    value = variable.read_value()
    if value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_complex:
        return value + tf.zeros([], value.dtype)
    return tf.zeros(value.shape, value.dtype)


def _captured(function: Any) -> list[tf.Variable | None]:
    """Return the variable of each captured input; None for a tensor or another resource."""
    variables = {id(variable.handle): variable for variable in function.graph.variables}
    return [variables.get(id(tensor)) for tensor in function.captured_inputs]
