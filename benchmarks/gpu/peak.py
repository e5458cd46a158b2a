"""The device's measured peak, and the Transformer's size: `peak.py PRECISION SECONDS EXPERIMENT`; JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

MODULES = ("stoker.measure.peak_flops", "stoker.train." + "peak_flops")
"""Modules of the measurement, in this version and in earlier ones: figures of both are compared."""


def measure_peak(dtype: str, seconds: float) -> Any:
    """The peak, by Stoker's own measurement."""
    (name,) = [name for name in MODULES if find_spec(name.rpartition(".")[0]) and find_spec(name)]
    return importlib.import_module(name).measure_peak_flops(dtype, seconds=seconds)


def main() -> None:
    """Measure, and print."""
    precision, seconds, experiment = sys.argv[1:]
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, enable=True)
    dtype = precision.removeprefix("mixed_")
    peak = measure_peak(dtype, float(seconds))
    sys.path.insert(0, experiment)
    import model

    tokens = keras.Input((model.LENGTH,), dtype="int32")
    parameters = model.compiled(tokens, tokens).count_params()
    found = {"parameters": parameters, "step_flops": model.step_flops()}
    sys.stdout.write(json.dumps(asdict(peak) | found) + "\n")


if __name__ == "__main__":
    main()
