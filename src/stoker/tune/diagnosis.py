"""What a training waits for, by name and in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.tune.compare import Gain, interval
from stoker.tune.profile import Measured, Profile, busy_fractions

Bottleneck = Literal["input", "python", "precision", "communication", "none"]
"""none: the device computes nearly all of the time, and in a precision that suits it."""

GOAL = 0.95
"""Busy fraction that is aimed at."""

HEALTHY = 0.90
"""From this busy fraction on nothing is called a bottleneck: what is left is within the noise of a
machine that others use too."""

UNSURE = 0.8
"""Down to this busy fraction an interval that reaches the goal is taken for noise; below it no machine
that can be measured on shows a busy device."""

PRECISION_GAIN = 1.3
"""How much faster the same step must be in another precision to be named: such a gap is no noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What is wrong, and what can be done."""

    bottleneck: Bottleneck
    text: str
    """Two sentences for a person: what was seen, what helps."""


def diagnose(
    profile: Profile,
    *,
    own_dataset: bool,
    other_precision: tuple[str, Gain] | None = None,
) -> Diagnosis:
    """Name the bottleneck.

    Args:
        profile: What was measured.
        own_dataset: The data is a `tf.data.Dataset` of the user's, which no data service of ours makes.
        other_precision: Another precision, and how much faster the step in memory is in it.
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
            f"the time; it waits for batches {shares['input_wait']:.0%} of it, and "
            f"{shares['rest']:.0%} is lost to the input's work beside the step. A batch costs "
            f"{1e3 * profile.input_cpu_s_per_sample * profile.rows_a_step:.3g} ms of CPU, a step "
            f"{1e3 * split.compute_s:.3g} ms: {cores:.2g} cores would have to work on the input "
            "alone. Make samples cheaper (cache, store them smaller, batch before mapping)"
            + ("." if own_dataset else ", or make them elsewhere (data.service)."),
        )
    if worst == "python":
        return Diagnosis(
            bottleneck="python",
            text=f"Python is the bottleneck: between two steps of "
            f"{1e3 * split.compute_s:.3g} ms it takes {1e3 * split.python_s:.3g} ms. "
            + _fewer_calls(profile),
        )
    return Diagnosis(
        bottleneck="communication",
        text=f"The exchange of gradients is the bottleneck: {1e3 * split.communication_s:.3g} ms of "
        f"a step of {1e3 * split.step_s:.3g} ms. Accumulate (train.accumulate), send less "
        "(train.reduction_dtype: bfloat16), send the first gradients while the others are computed "
        "(train.reduction_bytes_per_pack), or give each replica more samples.",
    )


def most_idle(profile: Profile) -> Bottleneck:
    """What the device waits for most, however little that is."""
    idle = _idle(profile)
    return max(idle, key=lambda name: idle[name])


def _idle(profile: Profile) -> dict[Bottleneck, float]:
    """Shares of the time in which the device does not compute, by what it waits for."""
    shares = profile.split.shares()
    return {
        # What the input does on the step's cores is the input's as much as what is waited for.
        "input": shares["input_wait"] + shares["rest"],
        "python": shares["python"] + shares["checkpoint"],
        "communication": shares["communication"],
    }


def _fewer_calls(profile: Profile) -> str:
    if profile.steps_per_call >= profile.per_epoch:
        return (
            f"A call is a whole epoch of {profile.per_epoch} steps already: what is left comes once an "
            "epoch, and weighs less where an epoch has more samples (.repeat() of a dataset of your own)."
        )
    return (
        f"Run more steps in one call (train.steps_per_call, now {profile.steps_per_call}); a callback "
        "that is told of each batch forbids that."
    )


def is_clear(turns: Sequence[Sequence[Measured]]) -> bool:
    """Whether pairs of windows tell on which side of `HEALTHY` the busy fraction lies."""
    low, high = interval(busy_fractions(turns))
    return not low < HEALTHY <= high


def _is_busy(profile: Profile) -> bool:
    """Whether no idleness is seen that is more than noise."""
    if profile.busy_fraction >= HEALTHY:
        return True
    # What is blocked in next(iterator) is seen at once; all else is a difference of two windows, and
    # says nothing where it is not outside of the interval.
    unsure = profile.busy_fraction >= UNSURE and profile.busy_high >= GOAL
    return unsure and profile.input_wait < 1 - HEALTHY


def _of_the_step(profile: Profile, other: tuple[str, Gain] | None) -> Diagnosis:
    busy = f"The device computes {min(1.0, profile.busy_fraction):.0%} of the time"
    if profile.busy_fraction < HEALTHY:
        low, high = profile.busy_low, min(1.0, profile.busy_high)
        busy += f", somewhere between {low:.0%} and {high:.0%}: this machine's noise tells no more"
    if other is not None and other[1].low > PRECISION_GAIN:
        precision, gain = other
        return Diagnosis(
            bottleneck="precision",
            text=f"The precision is the bottleneck: {busy[0].lower()}{busy[1:]}, but the same step "
            f"in {precision} is {gain.shown()} as fast here. Set train.precision: {precision}, and "
            "look at the loss.",
        )
    return Diagnosis(
        bottleneck="none",
        text=f"Healthy: {busy[0].lower()}{busy[1:]}. What makes the step itself faster is more "
        "computing power, or less to compute.",
    )
