"""The loops that train: what was measured of each, where a step's time goes, what its input costs."""

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

LEAST_STEPS = 5
"""Fewer measured steps give no split."""

MOST_BUSY = 1.5
"""A higher U is not a measurement: on one batch a step can only be quicker."""

UNPARTED = "input, Python, Keras"
"""The part of a step of `fit` that is not the compiled step, whose wait cannot be seen."""

OVER = 1.005
"""U from which on it is more than 100 % when it is written."""

OVERLAPPED = "Python, Keras, and the input's work during the step"
"""The part of a step of `fit` that is neither waited for nor the compiled step, where the input takes
much of the cores."""

LEAST_COST = 0.5
"""Ratio of a batch's CPU time to a step's time outside computation: from here on, the input is the
cause."""

MUCH_INPUT_CPU = 0.2
"""Share of the time of all cores that the script may use: from here on the input's CPU time matters."""

ITS_INPUT = "its input"
"""The part of a step whose wait cannot be seen; a step on a batch that is there already does without it."""

TRANSFER = "transfer to the GPU"
"""The part of the compiled step that copying a batch takes where nothing else runs: the most that it
can hold the step up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSplit:
    """One step of a loop, on the mean."""

    step_s: float
    """T_real, seconds a step."""

    parts: Mapping[str, float]
    """Part -> seconds a step; together they are the step."""

    input_wait: float | None
    """W, the share of the step that waits for input, in [0, 1]."""

    python: float | None
    """Share of the step that Python takes between the calls of the compiled step, in [0, 1]; of
    `model.fit` the least of all rounds."""

    busy: float | None
    """U = T_ceil / T_real; about 1 at most."""

    no_busy: str
    """Why U was not measured."""

    no_wait: str = ""
    """Why W was not measured."""

    def shown_busy(self) -> str:
        """`U 97%`, empty where it was not measured.

        The device cannot be busier than always, whatever the windows took.
        """
        if self.busy is None:
            return ""
        measured = f"{self.busy:.0%}"
        return f"U {measured}" if self.busy < OVER else f"U 100% ({measured} as measured)"

    def input_share(self) -> float | None:
        """What the input costs of a step at most, in [0, 1], where W is not known; None: not known too."""
        part_s = self.parts.get(ITS_INPUT, self.parts.get(UNPARTED))
        return None if part_s is None else part_s / self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class InputWait:
    """The share of a step that waits for input, and how it is known."""

    share: float
    """In [0, 1]."""

    text: str
    """A clause: `the step waits 40% of its time`."""

    measured: bool
    """Whether it is W; else it follows from U and from the cost of the input's stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStarts:
    """What `fit` waits for before the first step of an epoch, the first one's apart."""

    each_s: float
    """Seconds an epoch, a step's own time taken off: the median, of two the shorter."""

    share: float
    """Of the time of all measured steps, a pass that fills a cache, and these waits, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Loop(ABC):
    """One line that trains. Times are seconds."""

    kind: ClassVar[str]
    """Its name for programs."""

    title: ClassVar[str]
    """Its name for people."""

    no_wait: ClassVar[str] = ""
    """Why it is unknown how long a step waits for its input."""

    least_steps: ClassVar[int] = LEAST_STEPS

    place: Place
    passes: int
    steps: int
    measured_steps: int
    first_s: float
    """Time of the steps that are set apart: they traced, compiled, warmed up, filled a cache, or came
    right after a window of U."""
    period_s: float
    """Time of the measured steps, begin to begin; so are the following."""
    call_s: float
    rows: int
    """Samples of a step, 0 where unknown."""
    stages: tuple[Stage, ...]
    """Last one first."""
    nodes: tuple[Node, ...]
    """Last one first; empty where TensorFlow kept none."""
    timeline: tuple[tuple[float, float, float, float, float], ...]
    """Of the first steps: begin, wait, call, synchronize, period."""
    rounds: tuple[Mapping[str, float], ...] = ()
    """Pairs of windows with real data and on a resident batch."""
    no_ceiling: str = ""
    """Why there are none."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the model; of a loop of the user's own how many replicas share a batch."""
    pid: int = 0
    cores: int = 1
    """Cores that its process may use."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """Where the graph of its step was written, or why it was not."""
    reached: Reached | None = None
    """What its step computes, and what the device reaches; None if that was not requested."""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """Where a trace of its devices was written, or why there is none."""
    device: DeviceTime | None = None
    """Device time by kernel class, from that trace."""
    no_device: str = ""
    """Why there is none although there is a device to trace."""
    measuring_s: float = 0.0
    """Time that the measurement took, not part of the steps."""
    first_pass: FirstPass | None = None
    """None where no cache was filled, or no later pass read it."""

    @cached_property
    def split(self) -> StepSplit | None:
        """Where a step's time goes; None where too few steps were measured."""
        if self.measured_steps < self.least_steps or self.period_s <= 0:
            return None
        return self._split()

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """CPU time a sample of each stage of the input, last stage first."""
        return stage_costs(self.nodes, self.stages, rows=self.rows)

    @property
    def wait(self) -> float | None:
        """W; None where it was not measured."""
        return None if self.split is None else self.split.input_wait

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization; None where it is not known."""
        if self.split is None or self.reached is None:
            return None
        return self.reached.mfu(self.split.step_s)

    @property
    def epoch_starts(self) -> EpochStarts | None:
        """The waits at the begin of epochs; None where there are none, or nothing was measured."""
        return None

    @property
    def unit(self) -> str:
        """What one step is called."""
        return "step"

    @property
    def batches_a_pass(self) -> int:
        """Batches of one pass; 0 if unknown."""
        return -(-self.steps // self.passes) * self.steps_per_execution if self.passes else 0

    @property
    def steps_per_execution(self) -> int:
        """Steps of one call of the compiled function."""
        return int(self.model.get("steps_per_execution", 1))

    @property
    def made_at(self) -> Place:
        """The line that made the model; where it is not known, the loop's."""
        return to_place(self.model.get("made")) or self.place

    @property
    def compiled_at(self) -> Place:
        """The line that compiled the model; where it is not known, the loop's."""
        return to_place(self.model.get("compiled")) or self.place

    def user_stages(self) -> list[Stage]:
        """Stages that the user wrote, or had made by a call of their own: not those of `fit` for arrays."""
        near = (self.place, NOWHERE)
        return [each for each in self.stages if each.in_user_code or each.place not in near]

    def counted(self) -> str:
        """`1,000 steps`, or calls of several."""
        together = self.steps_per_execution
        return f"{self.steps:,} {'steps' if together == 1 else f'calls of {together} steps'}"

    def input_wait(self) -> InputWait | None:
        """The share of a step that waits for input; None if it is not known."""
        if self.wait is None:
            return None
        text = f"the step waits {self.wait:.0%} of its time"
        return InputWait(share=self.wait, text=text, measured=True)

    @abstractmethod
    def _split(self) -> StepSplit:
        """The split of a loop of which enough was measured."""

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
        """A split with U, and with the transfer taken out of the compiled part."""
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
            busy=ratio if self.rounds and ratio <= MOST_BUSY else None,
            no_busy=("" if ratio <= MOST_BUSY else slower) if self.rounds else no_busy,
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
        """W in [0, 1]; on a busy machine at most what U leaves, since waits for a core look like it."""
        if self.rounds and self._per_call(lambda each: each.get("real_away", 0.0)) >= BUSY:
            wait = min(wait, 1.0 - min(map(_ratio, self.rounds)))
        return min(1.0, max(0.0, wait))


def _real_s(each: Mapping[str, float]) -> float:
    """T_real of a round, seconds a step."""
    return each["real_s"] / each["calls"]


def _transfer_s(each: Mapping[str, float]) -> float:
    return each.get("transfer_s", 0.0) / each["calls"]


def _ceiling_s(each: Mapping[str, float]) -> float:
    """T_ceil of a round, seconds a step, as if other programs had taken as much of it as of T_real."""
    quiet_s = each["ceiling_s"] * (1.0 - each.get("ceiling_away", 0.0))
    return quiet_s / max(0.01, 1.0 - each.get("real_away", 0.0)) / each["calls"]


def _ratio(each: Mapping[str, float]) -> float:
    """T_ceil / T_real of a round."""
    return _ceiling_s(each) / _real_s(each)


@dataclass(frozen=True, kw_only=True)
class FitLoop(Loop):
    """`model.fit`."""

    kind = "fit"
    title = "model.fit"
    no_wait = "tf.data kept no times between the elements of this input"

    gaps: tuple[tuple[float, float], ...] = ()
    """For some steps in a row: time between two elements of the input, whole time."""
    feed: Feed | None = None
    """What makes the batches, if Python does."""
    hooks: tuple[BatchHook, ...] = ()
    """Of its callbacks."""
    starts: tuple[float, ...] = ()
    """From the begin of each epoch but the first to the end of its first step."""

    @property
    def epoch_starts(self) -> EpochStarts | None:
        """The waits at the begin of epochs; None where there was one epoch, or nothing was measured."""
        if self.split is None or not self.starts:
            return None
        each_s = max(0.0, statistics.median_low(self.starts) - self.split.step_s)
        waited_s = each_s * len(self.starts)
        # The steps of a pass that fills a cache are set apart.
        filled_s = 0.0 if self.first_pass is None else self.first_pass.wall_s
        return EpochStarts(each_s=each_s, share=waited_s / (waited_s + self.period_s + filled_s))

    def input_wait(self) -> InputWait | None:
        """The share of a step that waits for input: W, or without W an estimate from U and the stages.

        None if neither is known, or if the stages cost too little to be the cause.
        """
        split = self.split
        if split is None or split.input_wait is not None:
            return super().input_wait()
        share, cost_s = split.input_share(), self._input_cpu_s()
        if share is None or cost_s < LEAST_COST * share * split.step_s:
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
        # Noise slows the one or the other window: what all rounds agree on is Python's.
        python = None if wait is None else max(0.0, 1.0 - max(map(_ratio, self.rounds)) - wait)
        parts = {"waiting for input": wait_s, "compiled step": compute_s, "Python, Keras": rest_s}
        if wait is None:
            parts = {"compiled step": compute_s, UNPARTED: rest_s}
        elif self._input_cpu_s() > MUCH_INPUT_CPU * self.cores * real_s:
            # The resident batch has the cores for itself: what is left is the input's as much as Python's.
            python = None
            parts = {"waiting for input": wait_s, "compiled step": compute_s, OVERLAPPED: rest_s}
        return self._step_split(real_s, parts, compiled="compiled step", wait=wait, python=python)

    def _input_cpu_s(self) -> float:
        """CPU time of the input for a call of the train function."""
        rows = self.rows * self.steps_per_execution
        return rows * sum(cost.cpu_s_per_sample for cost in self.costs)

    def _gap_wait(self) -> float | None:
        """W from the gaps between two elements that tf.data measures, over all rounds."""
        pairs = [(each.get("gap_s", 0.0), each.get("gap_of_s", 0.0)) for each in self.rounds]
        if sum(of_s for _, of_s in pairs) <= 0:
            pairs = list(self.gaps)
        gap_s, of_s = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
        return self._not_the_cores(1.0 - gap_s / of_s) if of_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class OwnLoop(Loop):
    """A loop that the user's own code writes."""

    no_busy: ClassVar[str]
    """Why its step was not run on one batch, if nothing else is known."""

    wait_s: float = 0.0
    sync_s: float = 0.0
    syncs: tuple[tuple[Place, int], ...] = ()
    eager_gradients: tuple[tuple[Place, int], ...] = ()
    step_calls: tuple[tuple[Place, int], ...] = ()
    """Where these were computed: the line of each of the user's functions that ran and its first line,
    the innermost function first."""
    load: Mapping[str, float] = field(default_factory=dict)
    """Of some steps: wall time and what other programs took of it, and what lay outside of calls
    (`wall_s`, `away_s`, `wait_s`, `python_s`, `python_run_s`); empty where it is not known."""

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
        """The share of a step that Python takes, without what other programs took of the step.

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
    """Calls of a step, in a loop of any kind."""

    kind = "calls"
    title = "steps"
    no_busy = "a loop over arrays has no batch that could be given again"
    no_wait = "no iterator of tf.data was asked for batches by Python"


@dataclass(frozen=True, kw_only=True)
class InnerLoop(OwnLoop):
    """A loop inside a tf.function, whose steps cannot be seen: a call of it is a whole pass."""

    kind = "inside"
    title = "loop inside of a tf.function"
    no_busy = (
        "the loop lies inside of a tf.function, and was called too seldom: its first two calls are set "
        "apart"
    )
    no_wait = "one call holds many steps, and from outside their waits cannot be told apart"
    least_steps = 1

    batches: int = 0
    """Steps of one call; 0 where unknown."""

    @property
    def unit(self) -> str:
        """What one step is called: a whole call, unless it is known of how many."""
        return "step" if self.rounds else "call"

    @property
    def batches_a_pass(self) -> int:
        """Batches of one pass; 0 if unknown."""
        return self.batches or super().batches_a_pass

    def counted(self) -> str:
        """`5 calls of 50 steps`."""
        return f"{self.steps:,} calls{f' of {self.batches:,} steps' if self.batches else ''}"

    def _split(self) -> StepSplit:
        """By calls with the script's own dataset, and with one of as many batches that are there."""
        if not self.rounds:
            return super()._split()
        step_s = self._per_call(_real_s)
        compute_s = min(self._per_call(_ceiling_s), step_s)
        parts = {"compiled step": compute_s, ITS_INPUT: step_s - compute_s}
        return self._step_split(step_s, parts, compiled="compiled step")

    def _python(self, share: float) -> None:
        del share


LOOPS = {each.kind: each for each in (FitLoop, DatasetLoop, CallLoop, InnerLoop)}
