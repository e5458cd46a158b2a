"""What the loop tells those who watch, call by call; they change nothing of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import keras
import tensorflow as tf

from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.model.keras_model import overrides
from stoker.train.watch.config import TensorBoardConfig
from stoker.train.watch.device_watch import DeviceWatch
from stoker.train.watch.model_watch import ModelWatch
from stoker.train.watch.profile import StepProfiler


class Watch(Protocol):
    """Whom the loop tells where it stands."""

    def begin(
        self,
        model: keras.Model,
        step: int,
        *,
        per_epoch: int,
        loss_of: Callable[[], tf.Tensor],
        inputs: Callable[[], Any],
    ) -> None:
        """Training begins, or goes on, after so many steps.

        Args:
            model: Compiled, built, and as it was left.
            step: Steps done.
            per_epoch: Steps of an epoch.
            loss_of: One batch's loss, forward pass as in training; the same batch each time.
            inputs: What the model is called with in a step, nested `tf.TensorSpec`s; None if unknown.
        """

    def next_steps(self, step: int, steps: int) -> int:
        """How many of the `steps` that a call after `step` would have it shall have."""

    def step_changed(self, *, stays: bool) -> None:
        """The next call is one of another step; `stays`: and so are those after it."""

    def graph(self, graph: tf.Graph) -> None:
        """The graph of a step is known."""

    def after(self, step: int, *, steps: int) -> None:
        """A call of so many steps has ended at this step."""

    def scalars(self, samples_per_s: float) -> Mapping[str, float]:
        """Metrics that are known for a call at this speed, in addition to the loop's own."""

    def close(self, step: int) -> None:
        """Training ends after so many steps."""


class NoWatch:
    """Nobody watches: a worker beside the first, or a run without TensorBoard."""

    def begin(
        self,
        model: keras.Model,
        step: int,
        *,
        per_epoch: int,
        loss_of: Callable[[], tf.Tensor],
        inputs: Callable[[], Any],
    ) -> None:
        """Show nothing."""

    def next_steps(self, step: int, steps: int) -> int:  # noqa: ARG002 - as Watch has it
        """All of them."""
        return steps

    def step_changed(self, *, stays: bool) -> None:
        """Nothing is traced."""

    def graph(self, graph: tf.Graph) -> None:
        """Show nothing."""

    def after(self, step: int, *, steps: int) -> None:
        """Show nothing."""

    def scalars(self, samples_per_s: float) -> Mapping[str, float]:  # noqa: ARG002 - as Watch has it
        """None."""
        return {}

    def close(self, step: int) -> None:
        """Close nothing."""


class RunWatch:
    """TensorBoard is shown the model, and profiles where they are asked for."""

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
        """Know what is wanted.

        Args:
            board: Takes everything.
            config: What is wanted.
            terms: Embedding layer -> the terms of its ids; see `embeddings_of`.
            folder: Where the file `profile` is looked for.
            alone: There is no other worker. With others there are no gradients, for which all would
                have to meet, and a profile holds whole calls.
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
        """Show what it begins with; see `Watch`.

        Raises:
            ConfigError: an Embedding layer of the settings is not there.
        """
        # The loss of a `train_step` of the user's is known to nobody else.
        known = self._alone and "train_step" not in overrides(model)
        config = replace(self._config, gradients=self._config.gradients and known)
        self._model = ModelWatch(
            model,
            self._board,
            config=config,
            steps_per_epoch=per_epoch,
            loss_of=loss_of,
            terms=self._terms,
        )
        self._model.begin(step)
        if self._device is not None:
            self._device.begin(model, per_epoch=per_epoch, inputs=inputs)

    def next_steps(self, step: int, steps: int) -> int:
        """Cut a call where a profile begins or ends."""
        if self._device is not None:
            self._device.before()
        return self._profiler.next_steps(step, steps)

    def step_changed(self, *, stays: bool) -> None:
        """Trace no two steps at once."""
        if self._device is not None:
            self._device.step_changed(stays=stays)

    def graph(self, graph: tf.Graph) -> None:
        """Show it, where it is wanted."""
        if self._model is not None and self._config.graph:
            self._model.graph(graph)

    def after(self, step: int, *, steps: int) -> None:
        """End a profile, show what has become due."""
        self._profiler.after(step)
        if self._device is not None:
            self._device.after(step, steps=steps)
        if self._model is not None:
            self._model.after(step, steps=steps)

    def scalars(self, samples_per_s: float) -> Mapping[str, float]:
        """MFU, if it is known."""
        return {} if self._device is None else self._device.scalars(samples_per_s)

    def close(self, step: int) -> None:
        """Keep what there is of a profile."""
        self._profiler.close(step)
        if self._device is not None:
            self._device.finish()
