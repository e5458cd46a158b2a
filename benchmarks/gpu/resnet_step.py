"""Ours of ResNet-50 on batches in memory, one choice after another in one process.

`resnet_step.py EXPERIMENT CROP BATCH CHOICE...` prints a line of JSON for each choice as soon as it is known.
A choice is a precision, with a loss scale if one follows a colon, and `+xla`: `mixed_float16:128+xla`.
An environment variable of TensorFlow is tried by setting it for this process.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stoker.app.import_tensorflow import import_tensorflow

CALL, CALLS, WARM = 10, 7, 2
"""Steps of a call; timed calls of a choice; of them those that are left out: they trace and find kernels.

One more call is in a trace of the device.
"""

BATCHES, CLASSES = 4, 4


class EndError(Exception):
    """Ends the endless training."""


def batches(crop: int, rows: int) -> Any:
    """Noise around a brightness that tells the class, as photographs come: uint8."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, (BATCHES, rows))
    images = rng.integers(0, 64, (BATCHES, rows, crop, crop, 3), np.uint8)
    images += (48 * labels[..., None, None, None]).astype(np.uint8)
    return tf.data.Dataset.from_tensor_slices(({"image": images}, labels))


def measured(choice: str, data: Any, folder: Path, *, rows: int) -> dict[str, Any]:
    """Images per second of one choice, its loss after all calls, and the device's time in one of them."""
    import keras
    import ours
    from model import build

    from stoker.measure.device_trace import DeviceTrace, can_trace, time_in

    xla = choice.endswith("+xla")
    precision, _, scale = choice.removesuffix("+xla").partition(":")
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_dtype_policy(precision)
    loss_scale = float(scale) if scale.isdigit() else scale or "auto"
    settings = ours.Settings(steps_per_call=CALL, batch_size=rows, xla=xla, loss_scale=loss_scale)
    rates: list[float] = []
    losses: list[float] = []
    ends_s: list[float] = []
    begun_s = time.monotonic()
    traces: list[DeviceTrace] = []

    def note(progress: Any) -> None:
        if len(rates) == CALLS:
            raise EndError
        rates.append(progress.scalars.get("samples_per_s", 0.0))
        losses.append(progress.scalars["loss"])
        ends_s.append(time.monotonic() - begun_s)
        if len(rates) == CALLS and can_trace():
            traces.append(DeviceTrace())

    with contextlib.suppress(EndError):
        ours.train(
            ours.build(build, data, settings), data, settings, folder=folder, on_progress=note
        )
    warm = rates[WARM:]
    return {
        "choice": choice,
        "images_per_s": statistics.median(warm),
        "least": min(warm),
        "most": max(warm),
        "first_call_s": ends_s[0],
        "loss": losses[-1],
        "steps": CALL * CALLS,
        "device_time": [time_in(trace.stop()).to_json() for trace in traces],
    }


def main() -> None:
    """Measure each choice, and print."""
    experiment, crop, rows, *choices = sys.argv[1:]
    import_tensorflow()
    import tensorflow as tf

    sys.path[:0] = [experiment, str(Path(__file__).resolve().parents[1] / "train")]
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, enable=True)
    data = batches(int(crop), int(rows))
    with tempfile.TemporaryDirectory() as folder:
        for number, choice in enumerate(choices):
            found = measured(choice, data, Path(folder) / str(number), rows=int(rows))
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
