"""Reports the most expensive kernel class (in which layer, why, what to do), and useless biases."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.core.errors import Finding
from stoker.measure.device_time import IDLE, DeviceTime
from stoker.measure.kernel_class import CLASSES, LABELS, batch_norm_kernels

LOW_MFU = 0.20
"""If the MFU is below this, the largest class is reported, even if it is matrix products."""

MUCH = 0.25
"""A class other than matrix products is reported if it takes more than this share of the device time."""

MUCH_CASTS = 0.05
"""Casts are reported if they take at least this share of the device time."""

MUCH_WAIT = 0.10
"""If a step waits for input for at least this share of its time, the wait explains an idle device."""

MAX_GAIN = 20.0
"""Maximum speedup that is reported: the share is not known precisely enough for a larger one."""

PERSISTENT = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"

MEASURABLE = 1.05
"""Maximum busy fraction that is shown: a larger one means that other programs disturbed the measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What is known about a step in addition to its trace; all values but `of_script` may be unknown."""

    of_script: bool
    """Whether the step belongs to the user's script; if not, it belongs to an experiment with a `stoker.yaml`."""

    mfu: float | None = None
    """MFU: achieved rate divided by peak rate, in [0, 1]."""

    precision: str = ""
    """Keras's dtype policy, e.g. `mixed_bfloat16`."""

    xla: bool | None = None
    """Whether XLA compiles the step."""

    steps_per_call: int | None = None
    """Number of steps per call from Python."""

    input_wait: float | None = None
    """W: share of the step's time spent waiting for input, in [0, 1]."""

    nhwc_allowed: bool = False
    """Whether TensorFlow may use cuDNN's BatchNormalization kernels for NHWC; False if unknown."""

    def with_mfu(self, mfu: float | None) -> StepFacts:
        """A copy of these facts with this MFU."""
        return replace(self, mfu=mfu)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFinding:
    """The most expensive kernel class, and what to do about it."""

    kind: str
    """The class, or `idle`."""

    share: float
    """Share of the device time, in [0, 1]."""

    layer: str
    """The layer that spends the most time in this class; empty if unknown."""

    observation: str
    """A clause with figures: `38% of the step is layout transposes, most in norm_a (12%)`."""

    why: str
    """Why it is expensive: one or two sentences."""

    change: str
    """What to do: a sentence."""

    most_gain: float
    """Upper bound of the speedup in steps per second: the speedup if this class took no time at all."""

    @property
    def text(self) -> str:
        """One paragraph for the user."""
        return f"{self.observation} (at most {self.most_gain:.2g}x without it). {self.why} {self.change}"

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {name: getattr(self, name) for name in self.__slots__} | {"text": self.text}


def nhwc_is_allowed() -> bool:
    """Whether TensorFlow may compute BatchNormalization in NHWC layout with cuDNN in Stoker's processes.

    Stoker's processes set the environment variable of cuDNN's persistent kernel to 1 if it is unset.
    """
    return os.environ.get(PERSISTENT, "1").lower() in ("1", "true")


def shown_busy(fraction: float | None) -> str:
    """The busy fraction U as text for the user; None stands for a U that was not measured."""
    if fraction is None:
        return "not measured with parameter servers"
    if fraction > MEASURABLE:
        return f"not measurable ({fraction:.2f}: other programs disturbed it)"
    return f"{min(1.0, fraction):.0%} busy"


def shown_mfu(mfu: float) -> str:
    """The MFU as text for the user: `41%`, or `4.2%` if it is below 10 %."""
    return f"{mfu:.0%}" if mfu >= 0.0995 else f"{mfu:.1%}"


def device_finding(found: DeviceTime, facts: StepFacts) -> DeviceFinding | None:
    """The main finding about a device's time.

    None if the MFU is not low, and neither the idle time nor a class other than products is above `MUCH` of the step.
    """
    others = {name: found.shares[name] for name in (*CLASSES, IDLE) if name != "products"}
    kind = max(others, key=lambda name: others[name])
    low = facts.mfu is not None and facts.mfu < LOW_MFU
    if others[kind] <= MUCH:
        if not low:
            return None
        if found.shares["products"] > others[kind]:
            kind = "products"
    share = found.shares[kind]
    # Even at the device's peak rate, products would take a share of the step equal to the MFU; only the rest can be
    # removed.
    removable = share - (facts.mfu or 0.0) if kind == "products" else share
    layers = found.layers_of(kind)
    layer = layers[0].layer if layers else ""
    why, change = _ADVICE[kind](found, facts, layer)
    return DeviceFinding(
        kind=kind,
        share=share,
        layer=layer,
        observation=_seen(found, kind, facts),
        why=why,
        change=change,
        most_gain=min(MAX_GAIN, 1.0 / max(1.0 - removable, 1.0 / MAX_GAIN)),
    )


def _seen(found: DeviceTime, kind: str, facts: StepFacts) -> str:
    share = found.shares[kind]
    if kind == IDLE:
        text = f"the device is idle {share:.0%} of the step"
    else:
        text = f"{share:.0%} of the step is {LABELS[kind]}"
    layers, types = found.layers_of(kind), found.layer_types.get(kind, {})
    if types:
        name = max(types, key=lambda each: types[each])
        text += f", {types[name]:.0%} around layers of type {name}"
    if layers:
        largest = layers[0]
        text += f", most in {largest.layer} ({largest.kinds[kind]:.0%})"
    if facts.mfu is not None:
        text += f"; MFU {shown_mfu(facts.mfu)}"
    return text + (" (operations of the CPU, not kernels of a GPU)" if found.of_cpu else "")


Advice = tuple[str, str]
"""Why the class is expensive, and what to do."""


def _transposes(found: DeviceTime, facts: StepFacts, layer: str) -> Advice:
    del layer
    why = "Each of them reads and writes a whole tensor only to move its channels."
    if not _of_fused_batch_norm(found):
        return why, f"Keep images in channels_last, NHWC{_or_xla(facts)}."
    sixteen_bits = "16" in facts.precision
    if facts.nhwc_allowed and sixteen_bits:
        return why, f"cuDNN refuses NHWC for these BatchNormalizations{_or_xla(facts)}."
    ways = []
    if not facts.nhwc_allowed:
        ways.append(
            f'os.environ["{PERSISTENT}"] = "1" before TensorFlow is imported'
            if facts.of_script
            else f"{PERSISTENT}=1"
        )
    if not sixteen_bits:
        ways.append(_half(facts) if facts.of_script else f"{_half(facts)} or mixed_float16")
    only = "only then cuDNN normalizes channels_last without them"
    return why, f"Set {' and '.join(ways)}: {only}{_or_xla(facts)}."


def _of_fused_batch_norm(found: DeviceTime) -> bool:
    """Whether a transpose comes from TensorFlow's fused BatchNormalization, judged by the kernel's name."""
    return any(
        each.kind == "transposes" and "(FusedBatchNorm" in each.name for each in found.kernels
    )


def _normalization(found: DeviceTime, facts: StepFacts, layer: str) -> Advice:
    casts = f" {found.casts:.0%} of the step is casts." if found.casts >= MUCH_CASTS else ""
    fused = "model.compile(..., jit_compile=True)" if facts.of_script else "train.xla: true"
    fewer = "use fewer such layers, or a larger share of products"
    if batch_norm_kernels(each.name for each in found.kernels).way in ("nhwc", "nchw"):
        why = "Each BatchNormalization is one kernel already, and reads and writes whole tensors."
        return why + casts, (
            f"{fewer[0].upper()}{fewer[1:]}."
            if facts.xla
            else f"Fuse it with its neighbors: {fused}."
        )
    why = (
        "Keras computes a normalization with many small kernels that each read and write all of it."
    )
    if facts.xla:
        return why, f"XLA has fused it already: {fewer}."
    types = found.layer_types.get("normalization", {})
    kind = max(types, key=lambda each: types[each]) if types else layer
    # Stoker's own training step already uses tf.nn.fused_batch_norm where possible.
    alone = facts.of_script and re.search(r"BatchNorm|batch_?norm|(^|_)bn", kind)
    one = "; tf.nn.fused_batch_norm does it in one kernel" if alone else ""
    return why + casts, f"Fuse it: {fused}{one}."


def _elementwise(found: DeviceTime, facts: StepFacts, layer: str) -> Advice:
    del layer
    why = "Such kernels are memory-bound: each reads and writes whole tensors for one operation."
    if found.casts >= MUCH_CASTS:
        why += f" {found.casts:.0%} of the step only changes types."
    if not facts.xla:
        fused = "model.compile(..., jit_compile=True)" if facts.of_script else "train.xla: true"
        return why, f"Fuse them with XLA: {fused}."
    if facts.precision in ("", "float32"):
        return why, f"Halve the bytes that they move: {_half(facts)}."
    return why, "Leave out casts between types, and operations that change nothing."


def _copies(found: DeviceTime, facts: StepFacts, layer: str) -> Advice:
    del found, layer
    why = "Nothing computes while they run: copies in parallel with a kernel do not count."
    if facts.of_script:
        return why, (
            "Send uint8 and cast on the device, prefetch to it "
            "(tf.data.experimental.prefetch_to_device), and read losses every 100 steps only."
        )
    return (
        why,
        "Output uint8 images from preprocessing, and remove tf.py_function and CPU-only layers.",
    )


def _collectives(found: DeviceTime, facts: StepFacts, layer: str) -> Advice:
    del found, layer
    why = "The devices wait for each other's gradients while nothing else runs."
    if facts.of_script:
        return why, "Use a larger batch for each replica, or accumulate gradients."
    return (
        why,
        "Set train.accumulate, train.reduction_dtype: bfloat16 or train.reduction_bytes_per_pack.",
    )


def _idle(found: DeviceTime, facts: StepFacts, layer: str) -> Advice:
    del found, layer
    if facts.input_wait is not None and facts.input_wait >= MUCH_WAIT:
        return (
            f"The step waits {facts.input_wait:.0%} of its time for input.",
            "See the findings about the input." if facts.of_script else "Run `stoker tune`.",
        )
    why = "The host starts kernels more slowly than the device runs them: they are small."
    more = "steps_per_execution of model.compile" if facts.of_script else "train.steps_per_call"
    few = facts.steps_per_call is None or facts.steps_per_call < 10
    ways = [f"more steps in one call ({more})"] * few + ["a larger batch"]
    ways += ["fewer, larger kernels by XLA"] * (not facts.xla)
    return why, f"Try {', '.join(ways)}."


def _products(found: DeviceTime, facts: StepFacts, layer: str) -> Advice:
    del found, layer
    why = "The products run far below the rate that this device reaches with large ones."
    if facts.precision in ("", "float32", "float64"):
        return why, f"Use the 16-bit units: {_half(facts)}."
    return why, "Use channels and units that are multiples of 8 (better 64), and a larger batch."


def _other(found: DeviceTime, facts: StepFacts, layer: str) -> Advice:
    del layer
    largest = next((each for each in found.kernels if each.kind == "other"), None)
    named = f" The longest is {largest.name}." if largest is not None else ""
    return (
        f"These kernels neither multiply nor normalize.{named}",
        f"Look for a cheaper operation{_or_xla(facts)}.",
    )


def _half(facts: StepFacts) -> str:
    if facts.of_script:
        return 'keras.mixed_precision.set_global_policy("mixed_bfloat16")'
    return "train.precision: mixed_bfloat16"


def _or_xla(facts: StepFacts) -> str:
    if facts.xla:
        return ""
    return ", or jit_compile=True" if facts.of_script else ", or train.xla: true"


_ADVICE: Mapping[str, Callable[[DeviceTime, StepFacts, str], Advice]] = {
    "transposes": _transposes,
    "normalization": _normalization,
    "elementwise": _elementwise,
    "copies": _copies,
    "collectives": _collectives,
    "other": _other,
    "products": _products,
    IDLE: _idle,
}


NAMED = 3
"""Maximum number of layers that the message names; others are only counted."""


def useless_bias(
    names: Sequence[str], *, parameters: int, of_parameters: int, count: int | None = None
) -> Finding:
    """The finding about biases that have no effect.

    Args:
        names: Names of the layers with these biases, at least one.
        parameters: Number of parameters in these biases.
        of_parameters: Number of parameters in the whole model.
        count: Number of these layers, if `names` does not contain all of them.
    """
    count = len(names) if count is None else count
    rest = count - len(names[:NAMED])
    named = ", ".join(names[:NAMED]) + (f" and {rest} more" if rest else "")
    has = "layer has a bias" if count == 1 else "layers have a bias"
    return Finding.warning(
        "useless_bias",
        f"{count} {has} that the next layer, a BatchNormalization, cancels: {named} "
        f"({parameters:,} of {of_parameters:,} parameters, {parameters / max(1, of_parameters):.2%}; "
        "the time was not measured)",
        fix="Pass use_bias=False to these layers. A step then adds no bias to their output, and does not "
        "compute the bias's gradient, which is zero.",
    )
