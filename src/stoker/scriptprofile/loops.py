"""The training loops: the measurements of each, the split of a step, and the cost of its input."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from stoker.measure.device_time import DeviceTime
from stoker.scriptprofile.input_stages import StageCost, stage_costs
from stoker.scriptprofile.observations import (
    BUSY,
    NOWHERE,
    BatchHook,
    Feed,
    FirstPass,
    Node,
    Place,
    Reached,
    Stage,
    to_place,
)

MIN_STEPS = 5
"""Minimum number of measured steps for which the split of a step is computed."""

MAX_BUSY = 1.5
"""A higher U (T_ceil / T_real) is a measurement error: on a batch in memory, a step can only be faster."""

UNPARTED = "input, Python, Keras"
"""Name of the part of a step of `fit` outside the compiled step if the wait for input is unknown."""

OVER = 1.005
"""A U of at least this is printed as 100 %, followed by the measured value."""

OVERLAPPED = "Python, Keras, and the input's work during the step"
"""Name of the part of a step of `fit` that is neither waiting nor the compiled step, if the input uses many
cores."""

MIN_COST = 0.5
"""If W is unknown, time outside computation counts as waiting for input only if the input's CPU time for a batch is at
least this share of that time."""

MUCH_INPUT_CPU = 0.2
"""The CPU time of the input matters if it is above this share of the time of all cores that the script may use."""

ITS_INPUT = "its input"
"""Name of the part of a real step that is missing if the batch is in memory. How much of this part is waiting is
unknown."""

TRANSFER = "transfer to the GPU"
"""Name of the part of the compiled step that copies a batch. It is measured while nothing else runs, so it is the
maximum that the copy can cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSplit:
    """How the mean step of a loop is split into parts."""

    step_s: float
    """T_real: mean duration of a real step, seconds."""

    parts: Mapping[str, float]
    """Part -> seconds per step; the sum of all parts is the step's duration."""

    input_wait: float | None
    """W, the share of the step spent waiting for input, in [0, 1]; None if unknown."""

    python: float | None
    """Share of the step that Python takes between the calls of the compiled step, in [0, 1]; for
    `model.fit`, the smallest of all rounds. None if unknown."""

    busy: float | None
    """U = T_ceil / T_real: duration of a step on a batch in memory, divided by the duration of a real step. At most
    about 1; None if unknown."""

    no_busy: str
    """Why U was not measured; "" if it was."""

    no_wait: str = ""
    """Why W was not measured; "" if it was."""

    def shown_busy(self) -> str:
        """`U 97%`; empty if U was not measured.

        It shows at most 100 %, even if noise makes the measured value larger; the measured value follows then.
        """
        if self.busy is None:
            return ""
        measured = f"{self.busy:.0%}"
        return f"U {measured}" if self.busy < OVER else f"U 100% ({measured} as measured)"

    def input_share(self) -> float | None:
        """If W is unknown, the largest share of a step that the input can take, in [0, 1]; None if unknown too."""
        part_s = self.parts.get(ITS_INPUT, self.parts.get(UNPARTED))
        return None if part_s is None else part_s / self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class InputWait:
    """The share of a step spent waiting for input, and how it was determined."""

    share: float
    """The share, in [0, 1]."""

    text: str
    """A clause: `the step waits 40% of its time`."""

    measured: bool
    """Whether the share is the measured W; otherwise it is estimated from U and the cost of the input's stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStarts:
    """The wait of `fit` before the first step of each epoch except the first."""

    each_s: float
    """Seconds per epoch, without the duration of a step itself: the median, or the shorter of two."""

    share: float
    """All of these waits, divided by the total time of these waits, the measured steps, and a pass that fills a cache;
    in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Loop(ABC):
    """A training loop: one line of the script that trains. Times are in seconds."""

    kind: ClassVar[str]
    """Name of this kind of loop for programs."""

    title: ClassVar[str]
    """Name of this kind of loop for users."""

    no_wait: ClassVar[str] = ""
    """Why it may be unknown how long a step waits for its input."""

    min_steps: ClassVar[int] = MIN_STEPS

    place: Place
    passes: int
    steps: int
    measured_steps: int
    first_s: float
    """Total time of the excluded steps: steps that traced, compiled, warmed up, filled a cache, or came right
    after a window in which U was measured."""
    period_s: float
    """Total time of the measured steps, each from its start to the start of the next."""
    call_s: float
    """Total time in calls of the measured steps."""
    rows: int
    """Samples per step; 0 if unknown."""
    stages: tuple[Stage, ...]
    """Stages of the input in the script, last stage first."""
    nodes: tuple[Node, ...]
    """Stages of the input that TensorFlow ran, last stage first; empty if it recorded none."""
    timeline: tuple[tuple[float, float, float, float, float], ...]
    """For each of the first steps: its start, and the durations of wait, call, synchronization and whole step."""
    rounds: tuple[Mapping[str, float], ...] = ()
    """Measurements of U: each is a pair of windows, one with real data, one on a batch in memory."""
    no_ceiling: str = ""
    """Why `rounds` is empty; "" if it is not."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the model; for a loop in the user's own code, how many replicas share a batch."""
    pid: int = 0
    cores: int = 1
    """Number of cores that the loop's process may use."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """File with the graph of a step, or why it was not written."""
    reached: Reached | None = None
    """The operations of a step and the device's peak; None if they were not requested."""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """Folder with a trace of the devices, or why it is missing."""
    device: DeviceTime | None = None
    """Device time by kernel class, from that trace."""
    no_device: str = ""
    """Why `device` is missing although there is a device to trace; "" otherwise."""
    measuring_s: float = 0.0
    """Time that the measurement itself took; not part of the steps."""
    first_pass: FirstPass | None = None
    """The pass that filled a cache; None if the input has no cache, or if no later pass read it."""

    @cached_property
    def split(self) -> StepSplit | None:
        """The split of a step; None if too few steps were measured."""
        if self.measured_steps < self.min_steps or self.period_s <= 0:
            return None
        return self._split()

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """Each stage of the input with its CPU time per sample, last stage first."""
        return stage_costs(self.nodes, self.stages, rows=self.rows)

    @property
    def wait(self) -> float | None:
        """W; None if it was not measured."""
        return None if self.split is None else self.split.input_wait

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization (MFU); None if unknown."""
        if self.split is None or self.reached is None:
            return None
        return self.reached.mfu(self.split.step_s)

    @property
    def epoch_starts(self) -> EpochStarts | None:
        """The waits at the start of epochs; None if they are not known."""
        return None

    @property
    def unit(self) -> str:
        """What a "step" of this loop is called on the page."""
        return "step"

    @property
    def batches_a_pass(self) -> int:
        """Batches per pass; 0 if unknown."""
        return -(-self.steps // self.passes) * self.steps_per_execution if self.passes else 0

    @property
    def steps_per_execution(self) -> int:
        """Steps per call of the compiled function."""
        return int(self.model.get("steps_per_execution", 1))

    @property
    def made_at(self) -> Place:
        """The line that created the model; if unknown, the line of the loop."""
        return to_place(self.model.get("made")) or self.place

    @property
    def compiled_at(self) -> Place:
        """The line that compiled the model; if unknown, the line of the loop."""
        return to_place(self.model.get("compiled")) or self.place

    def user_stages(self) -> list[Stage]:
        """Stages that the user's code created, without the stages that `fit` creates for arrays."""
        near = (self.place, NOWHERE)
        return [each for each in self.stages if each.in_user_code or each.place not in near]

    def counted(self) -> str:
        """`1,000 steps`, or `250 calls of 4 steps`."""
        together = self.steps_per_execution
        return f"{self.steps:,} {'steps' if together == 1 else f'calls of {together} steps'}"

    def input_wait(self) -> InputWait | None:
        """The share of a step spent waiting for input; None if it is unknown."""
        if self.wait is None:
            return None
        text = f"the step waits {self.wait:.0%} of its time"
        return InputWait(share=self.wait, text=text, measured=True)

    @abstractmethod
    def _split(self) -> StepSplit:
        """Return the split of a step; called only if enough steps were measured."""

    def _step_split(
        self,
        step_s: float,
        parts: Mapping[str, float],
        *,
        compiled: str,
        wait: float | None = None,
        python: float | None = None,
        no_busy: str = "",
    ) -> StepSplit:
        """Return a split with U; the transfer to the GPU is separated from the compiled part."""
        ratio = self._per_call(_ratio)
        slower = (
            f"a step on a batch in memory took {ratio:.2g} times as long as a real step: other programs "
            "were busy on this machine"
        )
        return StepSplit(
            step_s=step_s,
            parts=self._with_transfer(parts, of=compiled),
            input_wait=wait,
            python=python,
            busy=ratio if self.rounds and ratio <= MAX_BUSY else None,
            no_busy=("" if ratio <= MAX_BUSY else slower) if self.rounds else no_busy,
            no_wait=self.no_wait if wait is None else "",
        )

    def _with_transfer(self, parts: Mapping[str, float], *, of: str) -> Mapping[str, float]:
        transfer_s = min(self._per_call(_transfer_s), parts[of])
        if transfer_s <= 0:
            return parts
        split: dict[str, float] = {}
        for name, part_s in parts.items():
            if name == of:
                split[TRANSFER] = transfer_s
            split[name] = part_s - (transfer_s if name == of else 0.0)
        return split

    def _per_call(self, figure: Callable[[Mapping[str, float]], float]) -> float:
        """The median of a figure over all rounds; 0 without rounds."""
        return statistics.median(map(figure, self.rounds)) if self.rounds else 0.0

    def _not_the_cores(self, wait: float) -> float:
        """Limit W to [0, 1], and on a busy machine to 1 - U: there, waiting for a core looks like waiting for input."""
        if self.rounds and self._per_call(lambda each: each.get("real_away", 0.0)) >= BUSY:
            wait = min(wait, 1.0 - min(map(_ratio, self.rounds)))
        return min(1.0, max(0.0, wait))


def _real_s(each: Mapping[str, float]) -> float:
    """T_real of a round, seconds per step."""
    return each["real_s"] / each["calls"]


def _transfer_s(each: Mapping[str, float]) -> float:
    return each.get("transfer_s", 0.0) / each["calls"]


def _ceiling_s(each: Mapping[str, float]) -> float:
    """T_ceil of a round, seconds per step, as if other programs had used the CPU as much as during T_real."""
    quiet_s = each["ceiling_s"] * (1.0 - each.get("ceiling_away", 0.0))
    return quiet_s / max(0.01, 1.0 - each.get("real_away", 0.0)) / each["calls"]


def _ratio(each: Mapping[str, float]) -> float:
    """T_ceil / T_real of a round."""
    return _ceiling_s(each) / _real_s(each)


@dataclass(frozen=True, kw_only=True)
class FitLoop(Loop):
    """A call of `model.fit`."""

    kind = "fit"
    title = "model.fit"
    no_wait = "tf.data did not record the times between the elements of this input"

    gaps: tuple[tuple[float, float], ...] = ()
    """For some series of steps: sum of the gaps between consecutive input elements, and total time, seconds."""
    feed: Feed | None = None
    """The Python object that makes the batches, if any."""
    hooks: tuple[BatchHook, ...] = ()
    """The methods of its callbacks that Keras calls before or after a batch."""
    starts: tuple[float, ...] = ()
    """For each epoch except the first: seconds from its start to the end of its first step."""

    @property
    def epoch_starts(self) -> EpochStarts | None:
        """The waits at the start of epochs; None with a single epoch, or if nothing was measured."""
        if self.split is None or not self.starts:
            return None
        each_s = max(0.0, statistics.median_low(self.starts) - self.split.step_s)
        waited_s = each_s * len(self.starts)
        # The measured steps do not include the pass that fills a cache, so its time is added.
        filled_s = 0.0 if self.first_pass is None else self.first_pass.wall_s
        return EpochStarts(each_s=each_s, share=waited_s / (waited_s + self.period_s + filled_s))

    def input_wait(self) -> InputWait | None:
        """The share of a step spent waiting for input: W, or if W is unknown, an estimate from U and the stages.

        None if both are unknown, or if the stages cost too little to be the cause.
        """
        split = self.split
        if split is None or split.input_wait is not None:
            return super().input_wait()
        share, cost_s = split.input_share(), self._input_cpu_s()
        if share is None or cost_s < MIN_COST * share * split.step_s:
            return None
        text = (
            f"{share:.0%} of the step is not computation, and a batch costs {1e3 * cost_s:.3g} ms of "
            f"CPU time while a step takes {1e3 * split.step_s:.3g} ms (W was not measured)"
        )
        return InputWait(share=share, text=text, measured=False)

    def _split(self) -> StepSplit:
        wait = self._gap_wait()
        if not self.rounds:
            step_s, call_s = self.period_s / self.measured_steps, self.call_s / self.measured_steps
            parts = {"step and its input": call_s, "Keras, callbacks": max(0.0, step_s - call_s)}
            why = self.no_ceiling or "the training was too short"
            return self._step_split(
                step_s, parts, compiled="step and its input", wait=wait, no_busy=why
            )
        real_s = self._per_call(_real_s)
        wait_s = min(real_s, (wait or 0.0) * real_s)
        compute_s = min(self._per_call(_ceiling_s), real_s - wait_s)
        rest_s = max(0.0, real_s - wait_s - compute_s)
        # Noise makes a real window slower: the smallest share of Python over all rounds is the least noisy.
        python = None if wait is None else max(0.0, 1.0 - max(map(_ratio, self.rounds)) - wait)
        parts = {"waiting for input": wait_s, "compiled step": compute_s, "Python, Keras": rest_s}
        if wait is None:
            parts = {"compiled step": compute_s, UNPARTED: rest_s}
        elif self._input_cpu_s() > MUCH_INPUT_CPU * self.cores * real_s:
            # A real step shares the cores with the input; on a batch in memory, the step has all cores. So `rest_s`
            # may be due to the input or to Python.
            python = None
            parts = {"waiting for input": wait_s, "compiled step": compute_s, OVERLAPPED: rest_s}
        return self._step_split(real_s, parts, compiled="compiled step", wait=wait, python=python)

    def _input_cpu_s(self) -> float:
        """CPU time of the input per call of the train function."""
        rows = self.rows * self.steps_per_execution
        return rows * sum(cost.cpu_s_per_sample for cost in self.costs)

    def _gap_wait(self) -> float | None:
        """W: 1 - the sum of tf.data's gaps between input elements / the total time, over all rounds.

        If the rounds have no gaps, those in `gaps` are used; None without any.
        """
        pairs = [(each.get("gap_s", 0.0), each.get("gap_of_s", 0.0)) for each in self.rounds]
        if sum(of_s for _, of_s in pairs) <= 0:
            pairs = list(self.gaps)
        gap_s, of_s = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
        return self._not_the_cores(1.0 - gap_s / of_s) if of_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class OwnLoop(Loop):
    """A loop in the user's own code."""

    no_busy: ClassVar[str]
    """Why its step was not run on a batch in memory, unless a more specific reason is known."""

    wait_s: float = 0.0
    sync_s: float = 0.0
    syncs: tuple[tuple[Place, int], ...] = ()
    """Lines where Python waited for a value of the device, and how often."""
    eager_gradients: tuple[tuple[Place, int], ...] = ()
    """Lines that computed gradients outside a tf.function, and how often."""
    step_calls: tuple[tuple[Place, int], ...] = ()
    """Where its gradients were computed: for each of the user's functions on the stack, innermost first, the
    current line and the number of the function's first line."""
    load: Mapping[str, float] = field(default_factory=dict)
    """Sums over some consecutive steps, in seconds. `wall_s`: wall time; `away_s`: its part that other programs took;
    `wait_s`: wait for a core; `python_s`, `python_run_s`: wall and CPU time outside the calls. Empty if unknown."""

    def _split(self) -> StepSplit:
        steps = self.measured_steps
        wait_s, call_s, sync_s = self.wait_s / steps, self.call_s / steps, self.sync_s / steps
        step_s = self.period_s / steps
        python_s = max(0.0, step_s - wait_s - call_s - sync_s)
        rest = "Python, eager operations" if self.eager_gradients else "Python"
        measured = {"waiting for input": wait_s, "tf.function": call_s, "reading values": sync_s}
        split = self._step_split(
            step_s,
            measured,
            compiled="tf.function",
            wait=None if self.no_wait else self._not_the_cores(wait_s / step_s),
            python=self._python(python_s / step_s),
            no_busy=self.no_ceiling or self.no_busy,
        )
        parts = {name: value for name, value in split.parts.items() if value > 0}
        return replace(split, parts=parts | {rest: python_s})

    def _python(self, share: float) -> float | None:
        """The share of a step that Python takes, without the time that other programs took.

        Python takes at least its CPU time. The rest of its time may be sleep, or a wait for a core.
        """
        load = self.load
        if not load:
            return share
        quiet_s = load["wall_s"] - load["away_s"]
        python_s = max(load["python_run_s"], load["python_s"] - load["wait_s"])
        python_s = max(0.0, min(python_s, load["python_s"]))
        return min(1.0, python_s / quiet_s) if quiet_s > 0 else share


class DatasetLoop(OwnLoop):
    """A loop over a dataset."""

    kind = "dataset"
    title = "loop over a dataset"
    no_busy = "the training was too short, or Python runs its operations one by one"


class CallLoop(OwnLoop):
    """Calls of a compiled step, in any kind of loop."""

    kind = "calls"
    title = "steps"
    no_busy = "a loop over arrays has no batch that could be used again"
    no_wait = "Python requested no batches from a tf.data iterator"


@dataclass(frozen=True, kw_only=True)
class InnerLoop(OwnLoop):
    """A loop inside a tf.function, whose single steps are invisible: a call is a whole pass."""

    kind = "inside"
    title = "loop inside a tf.function"
    no_busy = (
        "the loop is inside a tf.function, which was called too few times: its first two calls do not "
        "count"
    )
    no_wait = "one call contains many steps, and their waits cannot be measured from outside"
    min_steps = 1

    batches: int = 0
    """Steps per call; 0 if unknown."""

    @property
    def unit(self) -> str:
        """What a "step" is called on the page: a whole call, unless U was measured."""
        return "step" if self.rounds else "call"

    @property
    def batches_a_pass(self) -> int:
        """Batches per pass; 0 if unknown."""
        return self.batches or super().batches_a_pass

    def counted(self) -> str:
        """`5 calls of 50 steps`, or `5 calls`."""
        return f"{self.steps:,} calls{f' of {self.batches:,} steps' if self.batches else ''}"

    def _split(self) -> StepSplit:
        """Each round has calls with the script's own dataset, and calls with the same number of batches in memory."""
        if not self.rounds:
            return super()._split()
        step_s = self._per_call(_real_s)
        compute_s = min(self._per_call(_ceiling_s), step_s)
        parts = {"compiled step": compute_s, ITS_INPUT: step_s - compute_s}
        return self._step_split(step_s, parts, compiled="compiled step")

    def _python(self, share: float) -> None:
        del share


LOOPS = {each.kind: each for each in (FitLoop, DatasetLoop, CallLoop, InnerLoop)}
