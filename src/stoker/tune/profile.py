"""The profile of a training: computes from windows where the time of a step goes, and finds the bottleneck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from stoker.tune.compare import Gain, interval

PARTS = {
    "input_wait": "waiting for input",
    "transfer": "transfer to the device",
    "compute": "compute",
    "communication": "exchange of gradients",
    "python": "Python between calls",
    "checkpoint": "checkpoints",
    "rest": "rest: the input's work on the step's cores",
}
"""Part of a step -> its name for the user."""

Measured = Mapping[str, Any]
"""A `stoker.train.measurement.measured_run.Window` as JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Wall time of a step, seconds, in parts that add up to it."""

    input_wait_s: float
    """Time that training is blocked in `next(iterator)`."""

    transfer_s: float
    """Time of copies of batches to the device, if it is measured separately; 0 on a CPU."""

    compute_s: float
    """Time of the compiled step on a batch in memory, without the exchange between replicas."""

    communication_s: float
    """Time of the exchange of gradients between replicas."""

    python_s: float
    """Time between the steps of a call, measured on a batch in memory: mainly Python."""

    checkpoint_s: float
    """Time that checkpoints at the default rate add to a step."""

    rest_s: float
    """The rest of the time: mainly the input's work on the cores that also compute the step."""

    @property
    def step_s(self) -> float:
        """Time of the whole step."""
        return sum(asdict(self).values())

    def shares(self) -> dict[str, float]:
        """Return name -> share of the step's time for each part."""
        return {name.removesuffix("_s"): part / self.step_s for name, part in asdict(self).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measurements of a training, and figures that are computed from them."""

    busy_fraction: float
    """U: time per row on a resident batch divided by time per row on real input; the median over pairs of
    windows."""

    busy_low: float
    busy_high: float
    """Interval of this median; see `stoker.tune.compare.interval`."""

    input_wait: float
    """W: the share of wall time blocked in `next(iterator)`."""

    samples_per_s: float
    split: Split
    input_cpu_s_per_sample: float
    """CPU time to prepare a sample, the sum over all threads."""

    process_cpu_s_per_sample: float
    """CPU time of the whole training process per sample."""

    rows_a_step: float
    per_epoch: int
    steps_per_call: int
    pace: float | None = None
    """Speed of the machine's own matrix products during the measurement, floating-point operations per
    second; None if not measured."""

    turns: list[list[Measured]] = field(default_factory=list)
    """Pairs of windows, in order: the first one of a pair on a resident batch, the second on real input."""

    called: list[Measured] = field(default_factory=list)
    """Windows of calls on a batch in memory."""

    taken: list[Measured] = field(default_factory=list)
    """Windows of the input alone."""

    paces: list[float | None] = field(default_factory=list)
    """The measurements whose median is `pace`."""

    @property
    def epoch_s(self) -> float:
        """Wall time of an epoch's steps, without validation."""
        return self.per_epoch * self.split.step_s

    @property
    def cores_used(self) -> float:
        """Mean number of cores that training uses."""
        return self.process_cpu_s_per_sample * self.samples_per_s

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        return asdict(self) | {
            "step_s": self.split.step_s,
            "shares": self.split.shares(),
            "epoch_s": self.epoch_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFacts:
    """What a trial knows about its training before it measures windows."""

    rows_a_step: float
    per_epoch: int
    steps_per_call: int
    checkpoint_s: float = 0.0
    """Part of a step's time that checkpoints take, seconds."""

    transfer_s: float = 0.0
    """Part of a step's time that copies of batches to the device take, seconds."""

    communication_s: float = 0.0
    """Part of a step's time on a batch in memory that the exchange between replicas takes, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Measured windows of a training."""

    turns: Sequence[Sequence[Measured]]
    """[pairs][2] windows: on a resident batch, and on real input."""

    called: Sequence[Measured]
    """Windows of calls on a batch in memory."""

    taken: Sequence[Measured]
    """Windows of the input alone."""

    paces: Sequence[float | None] = ()
    """Speed of the machine's own matrix products after each pair, floating-point operations per second."""


def profile_of(facts: TrialFacts, windows: Windows) -> Profile:
    """Return the profile that follows from windows.

    The parts of a step add up to its measured time. A part that noise would make negative is set
    to 0, and `rest_s` becomes smaller instead.
    """
    real = [window for _, window in windows.turns]
    rows, wall_s = (sum(window[name] for window in real) for name in ("rows", "wall_s"))
    wait = sum(window["wait_s"] for window in real) / wall_s
    fractions = busy_fractions(windows.turns)
    low, high = interval(fractions)
    paces = [pace for pace in windows.paces if pace is not None]
    return Profile(
        busy_fraction=median(fractions),
        busy_low=low,
        busy_high=high,
        input_wait=min(1.0, wait),
        samples_per_s=rows / wall_s,
        split=_split(facts, windows, busy_fraction=median(fractions), wait=wait),
        input_cpu_s_per_sample=_cpu_s_per_sample(windows.taken),
        process_cpu_s_per_sample=_cpu_s_per_sample(real),
        rows_a_step=facts.rows_a_step,
        per_epoch=facts.per_epoch,
        steps_per_call=facts.steps_per_call,
        pace=median(paces) if paces else None,
        turns=[list(turn) for turn in windows.turns],
        called=list(windows.called),
        taken=list(windows.taken),
        paces=list(windows.paces),
    )


def _split(facts: TrialFacts, windows: Windows, *, busy_fraction: float, wait: float) -> Split:
    ceiling_s = median(_step_s(ceiling) for ceiling, _ in windows.turns)
    # The time of a full step, as in the windows with a resident batch: the last step of an epoch may be shorter.
    full_s = ceiling_s / busy_fraction
    idle_s = max(0.0, full_s - ceiling_s)
    call_s = median(_step_s(window) / _rows(window) for window in windows.called)
    # Time blocked in next(iterator) is measured directly, so it is exact; Python's time is a difference.
    wait_s = min(wait * full_s, idle_s)
    python_s = min(
        max(0.0, call_s * facts.rows_a_step - ceiling_s), max(0.0, full_s - ceiling_s - wait_s)
    )
    communication_s = min(facts.communication_s, ceiling_s)
    known_s = ceiling_s + python_s + wait_s + facts.transfer_s + facts.checkpoint_s
    return Split(
        input_wait_s=wait_s,
        transfer_s=facts.transfer_s,
        compute_s=min(ceiling_s, full_s) - communication_s,
        communication_s=communication_s,
        python_s=python_s,
        checkpoint_s=facts.checkpoint_s,
        rest_s=max(0.0, full_s - known_s),
    )


def _cpu_s_per_sample(windows: Sequence[Measured]) -> float:
    return float(median(window["cpu_s"] / window["rows"] for window in windows))


def busy_fractions(turns: Sequence[Sequence[Measured]]) -> list[float]:
    """Return U of each pair of windows."""
    return [
        (_step_s(ceiling) / _rows(ceiling)) / (_step_s(real) / _rows(real))
        for ceiling, real in turns
    ]


def _step_s(window: Measured) -> float:
    return float(window["wall_s"] / window["steps"])


def _rows(window: Measured) -> float:
    return float(window["rows"] / window["steps"])


Bottleneck = Literal["input", "python", "precision", "communication", "none"]
"""What limits the speed. none: the device computes nearly all of the time, and in a suitable precision."""

GOAL = 0.95
"""Busy fraction that a tuning tries to reach."""

HEALTHY = 0.90
"""If the busy fraction is at least this, nothing counts as a bottleneck: the idle time is within the noise
of a shared machine."""

UNSURE = 0.8
"""If the busy fraction is at least this, and its interval reaches `GOAL`, the device counts as busy. Below
this, it counts as idle, even if the interval reaches `GOAL`."""

PRECISION_GAIN = 1.3
"""Another precision is reported only if the step is more than this many times as fast with it: less may be
noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The bottleneck of a training, and what to do about it."""

    bottleneck: Bottleneck
    text: str
    """Sentences for the user: the measurement, and what helps."""


def diagnose(
    profile: Profile,
    *,
    own_dataset: bool,
    other_precision: tuple[str, Gain] | None = None,
) -> Diagnosis:
    """Find the bottleneck.

    Args:
        profile: The measurements.
        own_dataset: Whether the dataset is user-defined; a data service cannot prepare it then.
        other_precision: Another precision, and the speedup that it gives to a step on a resident batch.
    """
    shares, split = profile.split.shares(), profile.split
    idle, worst = _idle(profile), most_idle(profile)
    if _is_busy(profile) and idle["communication"] < 1 - HEALTHY:
        return _of_the_step(profile, other_precision)
    if worst == "input":
        cores = profile.input_cpu_s_per_sample * profile.rows_a_step / split.compute_s
        return Diagnosis(
            bottleneck="input",
            text=f"The input is the bottleneck: the device computes {profile.busy_fraction:.0%} of "
            f"the time; it waits for batches {shares['input_wait']:.0%} of the time, and the input's work "
            f"on the step's cores takes {shares['rest']:.0%}. A batch takes "
            f"{1e3 * profile.input_cpu_s_per_sample * profile.rows_a_step:.3g} ms of CPU time, a step "
            f"{1e3 * split.compute_s:.3g} ms, so the input needs {cores:.2g} cores for "
            "itself. Make samples cheaper (cache, store them smaller, batch before mapping)"
            + ("." if own_dataset else ", or prepare them on other machines (data.service)."),
        )
    if worst == "python":
        return Diagnosis(
            bottleneck="python",
            text=f"Python is the bottleneck: it takes {1e3 * split.python_s:.3g} ms between two steps of "
            f"{1e3 * split.compute_s:.3g} ms. " + _fewer_calls(profile),
        )
    return Diagnosis(
        bottleneck="communication",
        text=f"The exchange of gradients is the bottleneck: {1e3 * split.communication_s:.3g} ms of "
        f"a step of {1e3 * split.step_s:.3g} ms. Accumulate (train.accumulate), send less "
        "(train.reduction_dtype: bfloat16), send the first gradients while the others are computed "
        "(train.reduction_bytes_per_pack), or give each replica more samples.",
    )


def most_idle(profile: Profile) -> Bottleneck:
    """Return the cause of the largest part of the device's idle time, even if that part is small."""
    idle = _idle(profile)
    return max(idle, key=lambda name: idle[name])


def _idle(profile: Profile) -> dict[Bottleneck, float]:
    """Return bottleneck -> share of the time in which the device waits for it."""
    shares = profile.split.shares()
    return {
        # The input's work on the step's cores counts as waiting for the input.
        "input": shares["input_wait"] + shares["rest"],
        "python": shares["python"] + shares["checkpoint"],
        "communication": shares["communication"],
    }


def _fewer_calls(profile: Profile) -> str:
    if profile.steps_per_call >= profile.per_epoch:
        return (
            f"A call already runs a whole epoch of {profile.per_epoch} steps: the rest of Python runs once "
            "per epoch, and matters less if an epoch has more samples (.repeat() of your own dataset)."
        )
    return (
        f"Run more steps in one call (train.steps_per_call, now {profile.steps_per_call}); a callback "
        "that runs on each batch prevents that."
    )


def is_clear(turns: Sequence[Sequence[Measured]]) -> bool:
    """Return whether pairs of windows show that the busy fraction is above, or below, `HEALTHY`."""
    low, high = interval(busy_fractions(turns))
    return not low < HEALTHY <= high


def _is_busy(profile: Profile) -> bool:
    """Return whether the device counts as busy: U is at least `HEALTHY`, or the idle time may be only noise."""
    if profile.busy_fraction >= HEALTHY:
        return True
    # Time blocked in next(iterator) is measured directly. All other idle time is a difference of two
    # windows; it may be only noise if the upper end of U's interval reaches `GOAL`.
    unsure = profile.busy_fraction >= UNSURE and profile.busy_high >= GOAL
    return unsure and profile.input_wait < 1 - HEALTHY


def _of_the_step(profile: Profile, other: tuple[str, Gain] | None) -> Diagnosis:
    busy = f"The device computes {min(1.0, profile.busy_fraction):.0%} of the time"
    if profile.busy_fraction < HEALTHY:
        low, high = profile.busy_low, min(1.0, profile.busy_high)
        busy += f", between {low:.0%} and {high:.0%}: the noise of this machine allows no more precise figure"
    if other is not None and other[1].low > PRECISION_GAIN:
        precision, gain = other
        return Diagnosis(
            bottleneck="precision",
            text=f"The precision is the bottleneck: {busy[0].lower()}{busy[1:]}, but the same step "
            f"in {precision} is {gain.shown()} as fast on this machine. Set train.precision: "
            f"{precision}, and check the loss.",
        )
    return Diagnosis(
        bottleneck="none",
        text=f"Healthy: {busy[0].lower()}{busy[1:]}. Only more computing power, or less computation, "
        "would make the step faster.",
    )
