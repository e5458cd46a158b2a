"""Shows the progress of training as a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stoker.measure.findings import shown_mfu
from stoker.telemetry.catalogue import training as catalogue

_SPEED: Final = {metric.tensorboard for metric in catalogue.SPEED}


class ProgressLine:
    """Creates the progress line; stores the newest value of each metric.

    The line does not contain the remaining time, which only the caller knows.
    """

    def __init__(self, *, steps: int, epochs: int, monitor: str) -> None:
        """Store the totals.

        Args:
            steps: Number of steps of the whole run.
            epochs: Number of epochs of the whole run.
            monitor: The metric that selects the best epoch; it is shown next to the loss.
        """
        self._steps = steps
        self._epochs = epochs
        self._shown = dict.fromkeys(("loss", "val_loss", monitor))
        self._newest: dict[str, float] = {}

    def __call__(self, *, step: int, epoch: int, scalars: Mapping[str, float]) -> str:
        """Return the line.

        Args:
            step: Number of steps done.
            epoch: Number of finished epochs.
            scalars: New metrics by their TensorBoard names in the catalog, including U (`busy_fraction`) and
                MFU (`mfu`) if they are known.

        Returns:
            E.g. `epoch 3/10, step 1,250/4,000, 12.3 ms/step, 10,412 samples/s, U 93%, MFU 4.2%,
            W 1.2%, loss 0.3123, val_loss 0.3344`. ASCII only, for logs that support nothing else.
        """
        self._newest |= scalars
        at = min(epoch + 1, self._epochs)
        parts = [f"epoch {at}/{self._epochs}", f"step {step:,}/{self._steps:,}"]
        return ", ".join(parts + self._speed() + self._metrics())

    def _speed(self) -> list[str]:
        newest = self._newest
        shown = []
        if (step_s := newest.get(catalogue.STEP_TIME_S.tensorboard)) is not None:
            shown.append(f"{_three_digits(1e3 * step_s)} ms/step")
        if (samples := newest.get(catalogue.SAMPLES_PER_S.tensorboard)) is not None:
            shown.append(f"{samples:,.0f} samples/s")
        if (busy := newest.get(catalogue.BUSY_FRACTION.tensorboard)) is not None:
            # A value above 1 is measurement noise.
            shown.append(f"U {min(1.0, busy):.0%}")
        if (mfu := newest.get(catalogue.MFU.tensorboard)) is not None:
            shown.append(f"MFU {shown_mfu(mfu)}")
        if (wait := newest.get(catalogue.INPUT_WAIT.tensorboard)) is not None:
            shown.append(f"W {wait:.1%}")
        return shown

    def _metrics(self) -> list[str]:
        known = [name for name in self._shown if name in self._newest and name not in _SPEED]
        return [f"{name} {self._newest[name]:.4g}" for name in known]


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
