"""Model FLOP utilization (MFU): what a model computes a second, by what this device reaches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from stoker.core.errors import UserError
from stoker.core.files import write_json
from stoker.measure.flops import ModelFlops, count_flops
from stoker.measure.operation_tally import Kind
from stoker.measure.peak_flops import DTYPES, measure_peak_flops, quick_peak

LEAST_SHARE = 0.02
"""Of a model's operations: a kind with less of them has no peak of its own measured."""

QUICK_S = 0.1
"""For the peak of one kind within a training, seconds; the kernel's first call comes on top."""

Rates = Mapping[Kind, float]
"""Kind of operation -> operations a second that the device reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRate:
    """What one sample costs, and what one device reaches; either may be unknown, and says why."""

    flops_per_sample: float | None = None
    """Operations of a training step, one sample: forward and backward."""

    peak_per_s: float | None = None
    """Operations a second that one device reaches, each kind at its own peak."""

    peak_of: str = ""
    """Kinds and type that were measured."""

    not_counted: tuple[str, ...] = ()
    """What is more or less than the count says."""

    why: str = ""
    """Why something is unknown."""

    def mfu(self, samples_per_s: float, *, devices: int = 1) -> float | None:
        """Achieved by peak.

        Args:
            samples_per_s: Of all devices together.
            devices: How many compute.
        """
        if self.flops_per_sample is None or not self.peak_per_s:
            return None
        return self.flops_per_sample * samples_per_s / (self.peak_per_s * devices)

    def to_json(self, *, devices: int = 1) -> dict[str, Any]:
        """JSON values; the peak is that of all devices together."""
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
    """Count what a model computes and measure what the device reaches in its compute type.

    Args:
        model: A built `keras.Model`.
        rates: Measures the peak of a type for some kinds: `full_rates`, or those of a `PeakFile`.
        inputs: As for `count_flops`.
    """
    try:
        flops = count_flops(model, inputs=inputs)
    except UserError as error:
        return ModelRate(why=error.line())
    except Exception as error:  # noqa: BLE001 - the user's own layers, traced once more
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ModelRate(why=f"the model could not be traced: {lines[0][:200]}")
    dtype = str(model.compute_dtype)
    work = _work(flops)
    known = ModelRate(flops_per_sample=flops.step_per_sample, not_counted=flops.not_counted)
    if not work:
        return ModelRate(why="the model has no products of matrices and no convolutions")
    if dtype not in DTYPES:
        return _without_peak(known, f"no peak is measured of {dtype}")
    try:
        measured = rates(dtype, tuple(work))
    except tf.errors.OpError as error:
        return _without_peak(known, f"the peak was not measured: {type(error).__name__}")
    least_s = sum(operations / measured[kind] for kind, operations in work.items())
    return ModelRate(
        flops_per_sample=flops.step_per_sample,
        not_counted=flops.not_counted,
        peak_per_s=sum(work.values()) / least_s,
        peak_of=f"{' and '.join(work)} in {dtype}",
    )


def _without_peak(known: ModelRate, why: str) -> ModelRate:
    return ModelRate(
        flops_per_sample=known.flops_per_sample, not_counted=known.not_counted, why=why
    )


def _work(flops: ModelFlops) -> dict[Kind, float]:
    """Operations by kind, without a kind that is next to nothing."""
    work: dict[Kind, float] = {
        "convolutions": flops.in_convolutions,
        "products of matrices": flops.in_products,
    }
    least = LEAST_SHARE * flops.forward_per_sample
    return {kind: operations for kind, operations in work.items() if operations > least}


def full_rates(seconds: float) -> Callable[[str, tuple[Kind, ...]], Rates]:
    """The best of several sizes, measured for so many seconds."""

    def rates(dtype: str, kinds: tuple[Kind, ...]) -> Rates:
        del kinds
        peak = measure_peak_flops(dtype, seconds=seconds)
        return {
            "convolutions": peak.convolutions_per_s,
            "products of matrices": peak.products_per_s,
        }

    return rates


class PeakFile:
    """Peaks that were measured quickly, kept by device and type, so that a resumed run has them."""

    def __init__(self, path: Path) -> None:
        """Know where they are; a file that is damaged or missing counts as empty."""
        self._path = path

    def rates(self, dtype: str, kinds: tuple[Kind, ...]) -> Rates:
        """The peaks of a type, measured where the file does not hold them; see `quick_peak`."""
        device = device_name()
        known = self._read()
        of_type = known.get(device, {}).get(dtype, {})
        missing = [kind for kind in kinds if not of_type.get(kind)]
        measured = {kind: quick_peak(dtype, kind, seconds=QUICK_S) for kind in missing}
        if measured:
            known.setdefault(device, {})[dtype] = {**of_type, **measured}
            # Without it the next process measures once more.
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
        except OSError:
            return


def device_name() -> str:
    """What computes: the GPU's product name, or `CPU`."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "CPU"
    details = tf.config.experimental.get_device_details(gpus[0])
    return str(details.get("device_name", "GPU"))
