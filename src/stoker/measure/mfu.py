"""Model FLOP utilization (MFU): the model's operations per second, divided by the device's peak.

Matrix products and convolutions are counted: a multiplication and an addition are two operations,
and padding counts as data. Everything else (activations, normalization, the optimizer's update) is
left out, as is usual in a comparison of achieved and peak rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import Plain, UserError
from stoker.core.files import write_json
from stoker.measure.operation_tally import Kind, Tally
from stoker.measure.peak_flops import DTYPES, measure_peak_flops, quick_peak
from stoker.measure.step_flops import count_graph

BACKWARD = 2
"""Products in the backward pass for each product in the forward pass: one for the gradient of the
input, one for the gradient of the weights. Source: Kaplan et al., arXiv:2001.08361, section 2.1."""

BATCH_SIZE = 32
"""Default batch size for tracing a model. Operations that do not depend on it are divided by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Floating-point operations of a model, per sample."""

    forward_per_sample: float
    """Operations of the forward pass."""

    step_per_sample: float
    """Operations of a training step, forward and backward pass, without the optimizer's update."""

    in_convolutions: float
    """Operations of convolutions, a part of `forward_per_sample`."""

    in_products: float
    """Operations of matrix products, the other part of `forward_per_sample`."""

    not_counted: tuple[str, ...]
    """How the count differs from the real operations, in words; empty if it is complete."""

    unknown: tuple[str, ...] = ()
    """The entries of `not_counted` that make the count useless, so that no MFU is reported."""


def count_flops(target: Any, *, inputs: Any = None, batch_size: int = BATCH_SIZE) -> ModelFlops:
    """Count the operations of one forward pass in inference mode, in which Dropout does nothing.

    Args:
        target: A built `keras.Model`, a function of tensors, or a concrete function whose inputs
            have known sizes.
        inputs: Nested `tf.TensorSpec`s with which the model or function is called; by default the
            inputs of a functional or sequential model. Pass them if a dimension other than the
            batch size is unknown.
        batch_size: Batch size for tracing if the first dimension of an input is unknown.

    Returns:
        The operations per sample.

    Raises:
        UserError: the inputs or the batch size are unknown.
    """
    traced = _traced(target, inputs, batch_size)
    specs = tf.nest.flatten(traced.structured_input_signature)
    samples = next((spec.shape[0] for spec in specs if _has_rows(spec)), None)
    if not samples:
        raise UserError(
            "the model or function must be traced with a known batch size",
            got=Plain(", ".join(str(spec) for spec in specs) or "no inputs"),
            fix="Trace it with a batch size: tf.TensorSpec([32, 10]).",
        )
    tally = count_graph(
        traced.graph.as_graph_def(add_shapes=True), [tensor.name for tensor in traced.outputs]
    )
    convolutions, products = _of(tally, "convolutions"), _of(tally, "products of matrices")
    forward = (convolutions + products) / samples
    return ModelFlops(
        forward_per_sample=forward,
        step_per_sample=(1 + BACKWARD) * forward,
        in_convolutions=convolutions / samples,
        in_products=products / samples,
        not_counted=(*tally.unknown, *tally.notes),
        unknown=tally.unknown,
    )


def _of(tally: Tally, kind: Kind) -> int:
    return sum(operations for (counted, _), operations in tally.work.items() if counted == kind)


def _has_rows(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank)


def _inputs_of(target: Any) -> Any:
    """The inputs that a model was built for; None if unknown."""
    inputs = getattr(target, "input", None)
    if inputs is None:
        # A Sequential model that was never called has a list that contains its only input.
        several = getattr(target, "inputs", None) or [None]
        inputs = several[0] if len(several) == 1 else several
    return inputs


def _traced(target: Any, inputs: Any, batch_size: int) -> Any:
    if hasattr(target, "structured_input_signature"):
        return target
    if inputs is None:
        inputs = _inputs_of(target)
    if inputs is None:
        raise UserError(
            "counting a function, or a model without declared inputs, needs `inputs`",
            got=Plain(type(target).__name__),
            fix="Pass the specs of its inputs: count_flops(model, inputs=tf.TensorSpec([None, 10])).",
        )

    def sized(spec: Any) -> tf.TensorSpec:
        first, *rest = spec.shape if len(spec.shape) else (None,)
        shape = [] if not len(spec.shape) else [batch_size if first is None else first, *rest]
        return tf.TensorSpec(shape, spec.dtype)

    specs = tf.nest.map_structure(sized, inputs)
    if isinstance(target, keras.Model):
        return tf.function(lambda given: target(given, training=False)).get_concrete_function(specs)
    return tf.function(target).get_concrete_function(specs)


MIN_SHARE = 0.02
"""The peak of a kind is measured only if it makes up more than this share of the model's operations."""

QUICK_S = 0.1
"""Time to measure the peak of one kind during training, without the first call, seconds."""

Rates = Mapping[Kind, float]
"""Kind of operation -> operations per second that the device reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRate:
    """Operations per sample and peak rate of a device; each is None if it is unknown, and `why` says why."""

    flops_per_sample: float | None = None
    """Operations of a training step per sample, forward and backward pass."""

    peak_per_s: float | None = None
    """Operations of this model per second that one device reaches if each kind runs at its own peak."""

    peak_of: str = ""
    """Kinds of operations and dtype whose peak was measured, in words."""

    not_counted: tuple[str, ...] = ()
    """How the count differs from the real operations."""

    why: str = ""
    """Why a value is unknown; empty if both are known."""

    def mfu(self, samples_per_s: float, *, devices: int = 1) -> float | None:
        """MFU: achieved rate divided by peak rate.

        Args:
            samples_per_s: Samples per second of all devices together.
            devices: Number of devices that compute.
        """
        if self.flops_per_sample is None or not self.peak_per_s:
            return None
        return self.flops_per_sample * samples_per_s / (self.peak_per_s * devices)

    def to_json(self, *, devices: int = 1) -> dict[str, Any]:
        """JSON values; their peak is the peak of all devices together."""
        return {
            "step_flops_per_sample": self.flops_per_sample,
            "peak_flops_per_s": None if self.peak_per_s is None else self.peak_per_s * devices,
            "peak_of": self.peak_of,
            "not_counted": list(self.not_counted),
            "why": self.why,
        }


def model_rate(
    model: Any, *, rates: Callable[[str, tuple[Kind, ...]], Rates], inputs: Any = None
) -> ModelRate:
    """Count a model's operations, and measure the device's peak in its compute dtype.

    Args:
        model: A built `keras.Model`.
        rates: Measures the peaks of some kinds in a dtype: the result of `full_rates`, or `PeakFile.rates`.
        inputs: As in `count_flops`.
    """
    try:
        flops = count_flops(model, inputs=inputs)
        dtype = str(model.compute_dtype)
    except UserError as error:
        return ModelRate(why=error.line())
    except Exception as error:  # noqa: BLE001 - the user's own layers, traced once more
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ModelRate(why=f"the model could not be traced: {lines[0][:200]}")
    if flops.unknown:
        return ModelRate(why=f"not all of the model could be counted: {flops.unknown[0]}")
    work = _work(flops)
    known = ModelRate(flops_per_sample=flops.step_per_sample, not_counted=flops.not_counted)
    if not work:
        return ModelRate(why="the model has no products of matrices and no convolutions")
    if dtype not in DTYPES:
        return replace(known, why=f"the peak for {dtype} cannot be measured")
    try:
        measured = rates(dtype, tuple(work))
        least_s = sum(operations / measured[kind] for kind, operations in work.items())
    except Exception as error:  # noqa: BLE001 - a figure is left out, whatever it was: training goes on
        return replace(known, why=f"the peak was not measured: {type(error).__name__}")
    of = f"{' and '.join(work)} in {dtype}"
    return replace(known, peak_per_s=sum(work.values()) / least_s, peak_of=of)


def _work(flops: ModelFlops) -> dict[Kind, float]:
    """Operations by kind, without negligible kinds."""
    work: dict[Kind, float] = {
        "convolutions": flops.in_convolutions,
        "products of matrices": flops.in_products,
    }
    least = MIN_SHARE * flops.forward_per_sample
    return {kind: operations for kind, operations in work.items() if operations > least}


def full_rates(seconds: float) -> Callable[[str, tuple[Kind, ...]], Rates]:
    """Return a function that measures the peak rate of each kind, in `seconds` for all kinds together."""

    def rates(dtype: str, kinds: tuple[Kind, ...]) -> Rates:
        del kinds
        peak = measure_peak_flops(dtype, seconds=seconds)
        return {
            "convolutions": peak.convolutions_per_s,
            "products of matrices": peak.products_per_s,
        }

    return rates


class PeakFile:
    """A file of quickly measured peaks by device and dtype, so that a resumed run can reuse them."""

    def __init__(self, path: Path) -> None:
        """Set the file's path; a damaged or missing file counts as empty."""
        self._path = path

    def rates(self, dtype: str, kinds: tuple[Kind, ...]) -> Rates:
        """The peaks in a dtype; `quick_peak` measures the ones that are not in the file."""
        device = device_name()
        known = self._read()
        of_type = known.get(device, {}).get(dtype, {})
        missing = [kind for kind in kinds if not of_type.get(kind)]
        measured = {kind: quick_peak(dtype, kind, seconds=QUICK_S) for kind in missing}
        if measured:
            known.setdefault(device, {})[dtype] = {**of_type, **measured}
            self._write(known)
        return {**of_type, **measured}

    def _read(self) -> dict[str, dict[str, dict[Kind, float]]]:
        try:
            found = json.loads(self._path.read_bytes())
            return {
                str(device): {
                    str(dtype): {kind: float(rate) for kind, rate in rates.items()}
                    for dtype, rates in types.items()
                }
                for device, types in found.items()
            }
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def _write(self, known: Mapping[str, Any]) -> None:
        try:
            write_json(self._path, known)
        except (OSError, UserError):
            # E.g. on a full disk: the next process measures the peak again.
            return


def device_name() -> str:
    """The device that computes: the GPU's product name, or `CPU`."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "CPU"
    details = tf.config.experimental.get_device_details(gpus[0])
    return str(details.get("device_name", "GPU"))
