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
"""With fewer measured steps, no split is computed."""

MAX_BUSY = 1.5
"""A higher U is a measurement error: on one batch, a step can only be faster."""

UNPARTED = "input, Python, Keras"
"""The part of a step of `fit` outside the compiled step, whose wait is unknown."""

OVER = 1.005
"""Values of U from this on are printed as more than 100 %."""

OVERLAPPED = "Python, Keras, and the input's work during the step"
"""The part of a step of `fit` that is neither waiting nor the compiled step, if the input uses
many cores."""

MIN_COST = 0.5
"""Ratio of a batch's CPU time to a step's time outside computation, from which on the input is the
cause."""

MUCH_INPUT_CPU = 0.2
"""Share of the time of all cores that the script may use, from which on the input's CPU time matters."""

ITS_INPUT = "its input"
"""The part of a step whose wait is unknown; a step on a batch in memory does not have it."""

TRANSFER = "transfer to the GPU"
"""The part of the compiled step that copying a batch takes when nothing else runs: its largest possible
can effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSplit:
    """The mean step of a loop."""

    step_s: float
    """T_real, seconds per step."""

    parts: Mapping[str, float]
    """Part -> seconds per step; their sum is the step."""

    input_wait: float | None
    """W, the share of the step spent waiting for input, in [0, 1]."""

    python: float | None
    """Share of the step that Python takes between the calls of the compiled step, in [0, 1]; for
    `model.fit`, the smallest of all rounds."""

    busy: float | None
    """U = T_ceil / T_real; at most about 1."""

    no_busy: str
    """Why U was not measured."""

    no_wait: str = ""
    """Why W was not measured."""

    def shown_busy(self) -> str:
        """`U 97%`, empty if it was not measured.

        The device cannot be busier than always, whatever the windows took.
        """
        if self.busy is None:
            return ""
        measured = f"{self.busy:.0%}"
        return f"U {measured}" if self.busy < OVER else f"U 100% ({measured} as measured)"

    def input_share(self) -> float | None:
        """Largest possible share of the input in a step, in [0, 1], if W is unknown; None if this is unknown too."""
        part_s = self.parts.get(ITS_INPUT, self.parts.get(UNPARTED))
        return None if part_s is None else part_s / self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class InputWait:
    """The share of a step spent waiting for input, and its origin."""

    share: float
    """The share, in [0, 1]."""

    text: str
    """A clause: `the step waits 40% of its time`."""

    measured: bool
    """Whether it is W; else it is derived from U and the cost of the input's stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStarts:
    """The wait of `fit` before the first step of each epoch except the first."""

    each_s: float
    """Seconds per epoch, without a step's own time: the median, or the shorter of two."""

    share: float
    """Their share in the time of all measured steps, a pass that fills a cache, and these waits, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Loop(ABC):
    """One line that trains. Times are in seconds."""

    kind: ClassVar[str]
    """Its name for programs."""

    title: ClassVar[str]
    """Its name for users."""

    no_wait: ClassVar[str] = ""
    """Why the wait of a step for its input is unknown."""

    least_steps: ClassVar[int] = MIN_STEPS

    place: Place
    passes: int
    steps: int
    measured_steps: int
    first_s: float
    """Time of the excluded steps: they traced, compiled, warmed up, filled a cache, or came
    right after a window of U."""
    period_s: float
    """Time of the measured steps, from start to start; also for the following fields."""
    call_s: float
    rows: int
    """Samples per step, 0 if unknown."""
    stages: tuple[Stage, ...]
    """Stages in the script, last one first."""
    nodes: tuple[Node, ...]
    """Stages that TensorFlow ran, last one first; empty if it recorded none."""
    timeline: tuple[tuple[float, float, float, float, float], ...]
    """For the first steps: start, wait, call, synchronization, period."""
    rounds: tuple[Mapping[str, float], ...] = ()
    """Pairs of windows with real data and on a resident batch."""
    no_ceiling: str = ""
    """Why they are missing."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the model; for a loop in the user's own code, how many replicas share a batch."""
    pid: int = 0
    cores: int = 1
    """Number of cores that its process may use."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """File of its step's graph, or why it was not written."""
    reached: Reached | None = None
    """The operations of its step and the device's peak; None if they were not requested."""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """File of a trace of its devices, or why there is none."""
    device: DeviceTime | None = None
    """Device time by kernel class, from that trace."""
    no_device: str = ""
    """Why it is missing although there is a device to trace."""
    measuring_s: float = 0.0
    """Time that the measurement itself took; not part of the steps."""
    first_pass: FirstPass | None = None
    """The pass that filled a cache; None without one, or if no later pass read it."""

    @cached_property
    def split(self) -> StepSplit | None:
        """The split of a step; None if too few steps were measured."""
        if self.measured_steps < self.least_steps or self.period_s <= 0:
            return None
        return self._split()

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """CPU time per sample of each stage of the input, last stage first."""
        return stage_costs(self.nodes, self.stages, rows=self.rows)

    @property
    def wait(self) -> float | None:
        """W; None if it was not measured."""
        return None if self.split is None else self.split.input_wait

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization; None if it is unknown."""
        if self.split is None or self.reached is None:
            return None
        return self.reached.mfu(self.split.step_s)

    @property
    def epoch_starts(self) -> EpochStarts | None:
        """The waits at the start of epochs; None without any, or if nothing was measured."""
        return None

    @property
    def unit(self) -> str:
        """The name of one step."""
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
        """The line that created the model; if unknown, the loop's."""
        return to_place(self.model.get("made")) or self.place

    @property
    def compiled_at(self) -> Place:
        """The line that compiled the model; if unknown, the loop's."""
        return to_place(self.model.get("compiled")) or self.place

    def user_stages(self) -> list[Stage]:
        """Stages that the user's code created; not those that `fit` creates for arrays."""
        near = (self.place, NOWHERE)
        return [each for each in self.stages if each.in_user_code or each.place not in near]

    def counted(self) -> str:
        """`1,000 steps`, or the number of calls with several steps."""
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
        """The split of a loop with enough measurements."""

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
        """A split with U, and with the transfer separated from the compiled part."""
        ratio = self._per_call(_ratio)
        slower = (
            f"a step on one batch took {ratio:.2g} times as long as a real one: something else was at "
            "work on this machine"
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
        """W in [0, 1]; on a busy machine at most 1 - U, since waiting for cores looks the same."""
        if self.rounds and self._per_call(lambda each: each.get("real_away", 0.0)) >= BUSY:
            wait = min(wait, 1.0 - min(map(_ratio, self.rounds)))
        return min(1.0, max(0.0, wait))


def _real_s(each: Mapping[str, float]) -> float:
    """T_real of a round, seconds per step."""
    return each["real_s"] / each["calls"]


def _transfer_s(each: Mapping[str, float]) -> float:
    return each.get("transfer_s", 0.0) / each["calls"]


def _ceiling_s(each: Mapping[str, float]) -> float:
    """T_ceil of a round, seconds per step, corrected to the same load by other programs as T_real."""
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
    no_wait = "tf.data kept no times between the elements of this input"

    gaps: tuple[tuple[float, float], ...] = ()
    """For some consecutive steps: time between two elements of the input, total time."""
    feed: Feed | None = None
    """The Python object that makes the batches, if any."""
    hooks: tuple[BatchHook, ...] = ()
    """Its callbacks."""
    starts: tuple[float, ...] = ()
    """From the start of each epoch except the first to the end of its first step."""

    @property
    def epoch_starts(self) -> EpochStarts | None:
        """The waits at the start of epochs; None with a single epoch, or if nothing was measured."""
        if self.split is None or not self.starts:
            return None
        each_s = max(0.0, statistics.median_low(self.starts) - self.split.step_s)
        waited_s = each_s * len(self.starts)
        # The steps of a pass that fills a cache are excluded.
        filled_s = 0.0 if self.first_pass is None else self.first_pass.wall_s
        return EpochStarts(each_s=each_s, share=waited_s / (waited_s + self.period_s + filled_s))

    def input_wait(self) -> InputWait | None:
        """The share of a step spent waiting for input: W, or without W an estimate from U and the stages.

        None if neither is known, or if the stages cost too little to be the cause.
        """
        split = self.split
        if split is None or split.input_wait is not None:
            return super().input_wait()
        share, cost_s = split.input_share(), self._input_cpu_s()
        if share is None or cost_s < MIN_COST * share * split.step_s:
            return None
        text = (
            f"{share:.0%} of the step is not computation, and a batch costs {1e3 * cost_s:.3g} ms of "
            f"CPU where a step takes {1e3 * split.step_s:.3g} ms (W was not measured)"
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
        # Noise makes the windows slower: Python's share is what all rounds agree on.
        python = None if wait is None else max(0.0, 1.0 - max(map(_ratio, self.rounds)) - wait)
        parts = {"waiting for input": wait_s, "compiled step": compute_s, "Python, Keras": rest_s}
        if wait is None:
            parts = {"compiled step": compute_s, UNPARTED: rest_s}
        elif self._input_cpu_s() > MUCH_INPUT_CPU * self.cores * real_s:
            # With a resident batch, the step has all cores: the rest may be due to the input or to Python.
            python = None
            parts = {"waiting for input": wait_s, "compiled step": compute_s, OVERLAPPED: rest_s}
        return self._step_split(real_s, parts, compiled="compiled step", wait=wait, python=python)

    def _input_cpu_s(self) -> float:
        """CPU time of the input per call of the train function."""
        rows = self.rows * self.steps_per_execution
        return rows * sum(cost.cpu_s_per_sample for cost in self.costs)

    def _gap_wait(self) -> float | None:
        """W from tf.data's measured gaps between two elements, over all rounds."""
        pairs = [(each.get("gap_s", 0.0), each.get("gap_of_s", 0.0)) for each in self.rounds]
        if sum(of_s for _, of_s in pairs) <= 0:
            pairs = list(self.gaps)
        gap_s, of_s = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
        return self._not_the_cores(1.0 - gap_s / of_s) if of_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class OwnLoop(Loop):
    """A loop in the user's own code."""

    no_busy: ClassVar[str]
    """Why its step was not run on one batch, if the reason is not more specific."""

    wait_s: float = 0.0
    sync_s: float = 0.0
    syncs: tuple[tuple[Place, int], ...] = ()
    eager_gradients: tuple[tuple[Place, int], ...] = ()
    step_calls: tuple[tuple[Place, int], ...] = ()
    """Where its gradients were computed: the current line and the first line of each of the user's functions,
    innermost first."""
    load: Mapping[str, float] = field(default_factory=dict)
    """For some steps: wall time and the part that other programs took, and the parts outside calls
    (`wall_s`, `away_s`, `wait_s`, `python_s`, `python_run_s`); empty if unknown."""

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
        """The share of a step that Python takes, without the part that other programs took.

        Python takes at least its CPU time; the rest, such as sleep, may be a wait for a core.
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
    """Calls of a step, in any kind of loop."""

    kind = "calls"
    title = "steps"
    no_busy = "a loop over arrays has no batch that could be given again"
    no_wait = "Python requested no batches from an iterator of tf.data"


@dataclass(frozen=True, kw_only=True)
class InnerLoop(OwnLoop):
    """A loop inside a tf.function, whose steps are invisible: a call is a whole pass."""

    kind = "inside"
    title = "loop inside a tf.function"
    no_busy = (
        "the loop is inside a tf.function, and was called too seldom: its first two calls are left "
        "out"
    )
    no_wait = "one call holds many steps, and from outside their waits cannot be distinguished"
    least_steps = 1

    batches: int = 0
    """Steps per call; 0 if unknown."""

    @property
    def unit(self) -> str:
        """The name of one step: a whole call, unless its number of steps is known."""
        return "step" if self.rounds else "call"

    @property
    def batches_a_pass(self) -> int:
        """Batches per pass; 0 if unknown."""
        return self.batches or super().batches_a_pass

    def counted(self) -> str:
        """`5 calls of 50 steps`."""
        return f"{self.steps:,} calls{f' of {self.batches:,} steps' if self.batches else ''}"

    def _split(self) -> StepSplit:
        """Rounds of calls with the script's own dataset, and with as many batches in memory."""
        if not self.rounds:
            return super()._split()
        step_s = self._per_call(_real_s)
        compute_s = min(self._per_call(_ceiling_s), step_s)
        parts = {"compiled step": compute_s, ITS_INPUT: step_s - compute_s}
        return self._step_split(step_s, parts, compiled="compiled step")

    def _python(self, share: float) -> None:
        del share


LOOPS = {each.kind: each for each in (FitLoop, DatasetLoop, CallLoop, InnerLoop)}
