"""Decides when histograms, embeddings and the graph are written for TensorBoard."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import keras
import tensorflow as tf

from stoker.core.user_code import first_line
from stoker.telemetry.writers.summaries import Histogram
from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.config import TensorBoardConfig
from stoker.train.watch.summaries import (
    embeddings_of,
    global_norm,
    gradient_histograms,
    gradients_of,
    graph_bytes,
    weight_histograms,
)

_LOG = logging.getLogger(__name__)

MAX_SHARE = 0.01
"""Maximum share of the wall time since the start of training that histograms may take, if the settings contain
no interval for them; they may always take `FREE_S`."""

FREE_S = 0.5
"""Time that histograms may always take, seconds, so that a short training shows all of them."""

SMALL_WEIGHTS = 1_000_000
"""Maximum number of parameters of a model whose gradients are shown before the first step: for a larger model,
the pass that computes them would delay this step."""

GRADIENTS_S = 4.0
"""Assumed time of the first pass for the gradients of a larger model, seconds: measured with ResNet-50 on an
H200. The gradients are shown as soon as this time is within `MAX_SHARE` of the wall time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchSchedule:
    """The parts of a model that are shown, and how often."""

    config: TensorBoardConfig
    """The user's section."""

    steps_per_epoch: int


class ModelWatch:
    """Writes histograms and embeddings for TensorBoard between calls of the step, when they are due."""

    def __init__(
        self,
        model: keras.Model,
        writer: TensorBoard,
        *,
        schedule: WatchSchedule,
        loss_of: Callable[[], tf.Tensor],
        terms: Mapping[str, Sequence[str] | None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check the settings.

        Args:
            model: The compiled and built model.
            writer: Receives the data for TensorBoard.
            schedule: What is shown, and how often.
            loss_of: See `gradients_of`. It always uses the same batch, so that all differences come from
                the model.
            terms: The argument `chosen` of `embeddings_of`.
            now_s: A monotonic clock, seconds.

        Raises:
            ConfigError: A layer of `embeddings` does not exist.
        """
        self._model = model
        self._writer = writer
        self._per_epoch = schedule.steps_per_epoch
        every = schedule.config.histograms_every_steps
        self._every = self._per_epoch if every is None else every
        self._looks: dict[str, Callable[[], dict[str, Histogram]]] = {
            "weights": lambda: weight_histograms(model)
        }
        if schedule.config.gradients:
            self._looks["gradients"] = lambda: self._gradients(loss_of)
        self._norm: float | None = None
        self._terms = dict(terms)
        embeddings_of(model, self._terms)
        self._is_small = model.count_params() <= SMALL_WEIGHTS
        self._began_s, self._spent_s = now_s(), 0.0
        self._now_s, self._usual_s = now_s, 0.0
        self._may_thin, self._shown, self._thinned = every is None, False, False
        self._knows_gradients = self._is_small or every is not None

    def begin(self, step: int) -> None:
        """Show the initial state when training starts or resumes after this many steps."""
        if step == 0 and self._every:
            self._within_budget(lambda: self._histograms(0, gradients=self._is_small))

    def graph(self, graph: tf.Graph) -> None:
        """Show the graph of a step."""
        self._writer.graph(partial(graph_bytes, graph))

    def after(self, step: int, *, steps: int) -> None:
        """Show what has become due during a call of `steps` steps that ended at `step`."""
        done = step - steps
        if self._every and step // self._every > done // self._every:
            self._within_budget(
                lambda: self._histograms(step, gradients=self._may_show_gradients())
            )
        if self._terms and step // self._per_epoch > done // self._per_epoch:
            self._writer.embeddings(embeddings_of(self._model, self._terms))

    def new_gradient_norm(self) -> float | None:
        """Return the norm of the gradients of the newest histograms; None if it was returned before."""
        norm, self._norm = self._norm, None
        return norm

    def _gradients(self, loss_of: Callable[[], tf.Tensor]) -> dict[str, Histogram]:
        gradients = gradients_of(self._model, loss_of)
        self._norm = global_norm(gradients)
        return gradient_histograms(gradients)

    def _may_show_gradients(self) -> bool:
        if not self._knows_gradients:
            most_s = MAX_SHARE * (self._now_s() - self._began_s)
            self._knows_gradients = self._spent_s + GRADIENTS_S <= most_s
        return self._knows_gradients

    def _within_budget(self, show: Callable[[], None]) -> None:
        """Show histograms, unless that would exceed their share of the time."""
        begun_s = self._now_s()
        most_s = max(FREE_S, MAX_SHARE * (begun_s - self._began_s))
        if self._may_thin and self._usual_s and self._spent_s + self._usual_s > most_s:
            if not self._thinned:
                _LOG.warning(
                    "TensorBoard: histograms take %.2f s each time, so they are not shown after every "
                    "epoch, to use at most %.0f %% of the training's time. Set an interval with "
                    "train.tensorboard.histograms_every_steps",
                    self._usual_s,
                    100 * MAX_SHARE,
                )
            self._thinned = True
            return
        show()
        took_s = self._now_s() - begun_s
        self._spent_s += took_s
        # The first time also traces; later ones only run.
        self._usual_s = took_s if self._shown else 0.0
        self._shown = True

    def _histograms(self, step: int, *, gradients: bool) -> None:
        for what, look in list(self._looks.items()):
            if what == "gradients" and not gradients:
                continue
            try:
                self._writer.histograms(step, look())
            except tf.errors.OpError as error:
                # E.g. memory is too small for a pass in addition to the step: training continues without histograms.
                _LOG.warning("no more histograms of %s: %s", what, first_line(error))
                del self._looks[what]
