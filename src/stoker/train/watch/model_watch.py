"""When TensorBoard is shown what of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from stoker.core.user_code import first_line
from stoker.telemetry.writers.summaries import Histogram
from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.watch.config import TensorBoardConfig
from stoker.train.watch.summaries import (
    embeddings_of,
    gradient_histograms,
    graph_bytes,
    weight_histograms,
)

_LOG = logging.getLogger(__name__)


class ModelWatch:
    """Writes histograms and embeddings between calls of the step, when they are due."""

    def __init__(
        self,
        model: keras.Model,
        writer: TensorBoard,
        *,
        config: TensorBoardConfig,
        steps_per_epoch: int,
        loss_of: Callable[[], tf.Tensor],
        terms: Mapping[str, Sequence[str] | None],
    ) -> None:
        """Check what is asked for.

        Args:
            model: The compiled model, built.
            writer: Takes everything.
            config: What is wanted.
            steps_per_epoch: Steps of an epoch.
            loss_of: See `gradient_histograms`; of the same batch each time, so that what changes
                from one histogram to the next is the model.
            terms: See `embeddings_of`.

        Raises:
            ConfigError: a layer of `embeddings` is not there.
        """
        self._model = model
        self._writer = writer
        self._per_epoch = steps_per_epoch
        every = config.histograms_every_steps
        self._every = steps_per_epoch if every is None else every
        self._looks: dict[str, Callable[[], dict[str, Histogram]]] = {
            "weights": lambda: weight_histograms(model)
        }
        if config.gradients:
            self._looks["gradients"] = lambda: gradient_histograms(model, loss_of)
        self._terms = dict(terms)
        embeddings_of(model, self._terms)

    def begin(self, step: int) -> None:
        """Training begins, or goes on, after this many steps: show what it begins with."""
        if step == 0 and self._every:
            self._histograms(0)

    def graph(self, graph: tf.Graph) -> None:
        """Show the graph of a step."""
        self._writer.graph(graph_bytes(graph))

    def after(self, step: int, *, steps: int) -> None:
        """A call of so many steps has ended at this step: show what has become due in it."""
        done = step - steps
        if self._every and step // self._every > done // self._every:
            self._histograms(step)
        if self._terms and step // self._per_epoch > done // self._per_epoch:
            self._writer.embeddings(embeddings_of(self._model, self._terms))

    def _histograms(self, step: int) -> None:
        for what, look in list(self._looks.items()):
            try:
                self._writer.histograms(step, look())
            except tf.errors.OpError as error:
                # E.g. no memory for one pass beside the training step: training goes on without.
                _LOG.warning("no histograms of %s from here on: %s", what, first_line(error))
                del self._looks[what]
