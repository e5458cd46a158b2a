"""Observers of the training loop, which do not change its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from stoker.telemetry.catalogue import training as catalogue
from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.config import TensorBoardConfig
from stoker.train.model.keras_model import overrides
from stoker.train.watch.device_watch import DeviceWatch
from stoker.train.watch.model_watch import ModelWatch, WatchSchedule
from stoker.train.watch.profile import StepProfiler


class Watch:
    """Observer of the training loop. This base class does nothing; other workers than the chief use it."""

    def begin(
        self,
        model: keras.Model,
        step: int,
        *,
        per_epoch: int,
        loss_of: Callable[[], tf.Tensor],
        inputs: Callable[[], Any],
    ) -> None:
        """Called when training starts or resumes after this many steps.

        Args:
            model: The compiled and built model in its current state.
            step: Number of steps done.
            per_epoch: Number of steps per epoch.
            loss_of: Computes the loss of a batch as in training; always of the same batch.
            inputs: Returns the specs of the model's inputs in a step, nested; None if unknown.
        """

    def next_steps(self, step: int, steps: int) -> int:  # noqa: ARG002 - subclasses use it
        """Return how many of the planned `steps` the call after `step` should have."""
        return steps

    def step_changed(self, *, stays: bool) -> None:
        """Called before a call that runs another step; `stays`: whether later calls run it, too."""

    def graph(self, graph: tf.Graph) -> None:
        """Called when the graph of a step is known."""

    def after(self, step: int, *, steps: int) -> None:
        """Called when a call of `steps` steps has ended at `step`."""

    def scalars(self, samples_per_s: float) -> Mapping[str, float]:  # noqa: ARG002 - as above
        """Return additional metrics for a call with this speed."""
        return {}

    def close(self, step: int) -> None:
        """Called when training ends after this many steps."""


class RunWatch(Watch):
    """Writes TensorBoard data, and profiles on request."""

    def __init__(
        self,
        board: TensorBoard,
        *,
        config: TensorBoardConfig,
        terms: Mapping[str, Sequence[str] | None],
        folder: Path,
        alone: bool,
        device: DeviceWatch | None = None,
    ) -> None:
        """Store the arguments.

        Args:
            board: Receives the data for TensorBoard.
            config: The user's section `train.tensorboard`.
            terms: Embedding layer -> the terms of its ids; see `embeddings_of`.
            folder: Folder in which the file `profile` may appear.
            alone: Whether this is the only worker. With several workers, gradients are not shown, because
                all workers would have to compute them together; and a profile contains whole calls.
            device: Measures how the devices spend their time.
        """
        self._board, self._config, self._terms, self._alone = board, config, terms, alone
        self._device = device
        self._profiler = StepProfiler(
            folder,
            tensorboard=board.folder,
            steps=config.profile,
            cuts=alone,
            before_start=device.release if device is not None else None,
        )
        self._model: ModelWatch | None = None

    def begin(
        self,
        model: keras.Model,
        step: int,
        *,
        per_epoch: int,
        loss_of: Callable[[], tf.Tensor],
        inputs: Callable[[], Any],
    ) -> None:
        """Show the initial state; see `Watch`.

        Raises:
            ConfigError: An Embedding layer of the settings does not exist.
        """
        # The loss of a user-defined `train_step` is known only inside it, so its gradients are not shown.
        known = self._alone and "train_step" not in overrides(model)
        config = replace(self._config, gradients=self._config.gradients and known)
        self._model = ModelWatch(
            model,
            self._board,
            schedule=WatchSchedule(config=config, steps_per_epoch=per_epoch),
            loss_of=loss_of,
            terms=self._terms,
        )
        self._model.begin(step)
        if self._device is not None:
            self._device.begin(model, per_epoch=per_epoch, inputs=inputs)

    def next_steps(self, step: int, steps: int) -> int:
        """Shorten a call at the start or end of a profile."""
        if self._device is not None:
            self._device.before()
        return self._profiler.next_steps(step, steps)

    def step_changed(self, *, stays: bool) -> None:
        """Do not trace two different steps."""
        if self._device is not None:
            self._device.step_changed(stays=stays)

    def graph(self, graph: tf.Graph) -> None:
        """Show the graph of a step, if the settings request it."""
        if self._model is not None and self._config.graph:
            self._model.graph(graph)

    def after(self, step: int, *, steps: int) -> None:
        """End a profile, and show what is due."""
        self._profiler.after(step)
        if self._device is not None:
            self._device.after(step, steps=steps)
        if self._model is not None:
            self._model.after(step, steps=steps)

    def scalars(self, samples_per_s: float) -> Mapping[str, float]:
        """Return MFU if it is known, and the norm of the gradients if there is a new one."""
        found = {} if self._device is None else dict(self._device.scalars(samples_per_s))
        norm = None if self._model is None else self._model.new_gradient_norm()
        return found if norm is None else found | {catalogue.GRADIENT_NORM.tensorboard: norm}

    def close(self, step: int) -> None:
        """Write an incomplete profile."""
        self._profiler.close(step)
        if self._device is not None:
            self._device.finish()
