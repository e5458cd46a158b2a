"""Checks a run while it trains, and decides what to do if numbers are not finite or memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import Finding
from stoker.internals.tensorflow_internals import collected_nodes
from stoker.train.config import ResolvedTraining
from stoker.train.context.monitor import check_unweighted_monitor
from stoker.train.context.run_context import RunSetup
from stoker.train.health.bad_steps import BadStep, NanConfig, Rollbacks, bad_step_error
from stoker.train.health.degradation import (
    check_host_sync,
    check_idle_devices,
    check_keras_distribution,
    check_retraces,
    check_scope,
    check_xla,
)
from stoker.train.health.divergence import Divergence, LossScaleWatch
from stoker.train.health.layers import BadValues, first_bad_values
from stoker.train.health.precision import check_outputs, check_tensor_cores
from stoker.train.health.step_operations import check_placement
from stoker.train.step.custom_train_step import FirstPass, has_custom_train_step
from stoker.train.step.oom import Reduction, Split, does_not_fit, is_out_of_memory, reduce_batch

_LOG = logging.getLogger(__name__)


class RunHealth:
    """Watches divergence, loss scale, non-finite steps and memory; its state is JSON."""

    def __init__(self, setup: RunSetup) -> None:
        """Start without findings."""
        self._built, self._resolved = setup.built, setup.resolved
        self._config = config = setup.config
        self._distribution = setup.distribution
        self._divergence = Divergence(config.divergence)
        self._loss_scale = LossScaleWatch()
        self.loss_scale: float | None = None
        """Newest value of a dynamic loss scale; None without such a scale."""
        self._rollbacks = Rollbacks(NanConfig(on_nan=config.on_nan, nan_budget=config.nan_budget))
        self.reductions: list[Reduction] = []
        self.findings: list[Finding] = []
        self._placed = False

    def update(self, step: int, loss: float) -> None:
        """Check the loss of a call for divergence, and the loss scale for a collapse."""
        self._report(self._divergence.update(step, loss))
        optimizer = self._built.model.optimizer
        if isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
            self.loss_scale = _number(optimizer.dynamic_scale)
            self._report(self._loss_scale.update(step, self.loss_scale))

    def check_model(self, first: FirstPass) -> None:
        """Check the model's placement, its lookups and the dtype of its outputs, before the first step.

        Args:
            first: The result of the first batch through the model.

        Raises:
            CheckFailed: The model was built outside the strategy's scope.
        """
        variables = self._built.model.variables
        gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
        if self._distribution.name in ("mirrored", "multi_worker", "tpu"):
            self._report(check_scope(variables, self._distribution.strategy))
        else:
            self._report(check_idle_devices(variables, gpus))
        self._report(check_outputs(self._built.model, first.outputs))
        self._report(check_unweighted_monitor(self._built.model, self._config))
        self._report(check_keras_distribution())
        for warning in first.warnings:
            self._report(warning)

    def update_settings(self, resolved: ResolvedTraining) -> None:
        """Set the settings with which the step is compiled from now on.

        Args:
            resolved: The settings, possibly changed by a trial of XLA.
        """
        self._resolved = resolved

    def placements(self) -> AbstractContextManager[list[Any]]:
        """Return a context for the first call of the step that records where its operations run."""
        first, self._placed = not self._placed, True
        if first and tf.config.list_logical_devices("GPU"):
            return collected_nodes()
        return nullcontext([])

    def check_step(self, step: Any, placements: Sequence[Any]) -> None:
        """Check the compiled step after its first call.

        Args:
            step: A traced concrete function.
            placements: The nodes that the context of `placements` recorded.
        """
        self._report(check_placement(placements))
        self._report(check_host_sync(step))
        if self._resolved.xla:
            self._report(check_xla(step))
        if self._resolved.precision != "float32":
            self._report(check_tensor_cores(step, batch_size=self._resolved.batch_size))

    def check_traces(self, function: Any) -> None:
        """Check, at the end of an epoch, how often the step was traced."""
        self._report(check_retraces(function))

    def bad_step(
        self, batch: Any, *, step: int, positions: range, rows: Sequence[int], loss: float
    ) -> None:
        """Decide to roll back if `train.on_nan` allows it; else raise an error that names the layer.

        Args:
            batch: The step's batch; the model is in the state before the step.
            step: Number of the step, from 1.
            positions: Positions of the step's samples in the order of the whole run.
            rows: Rows of the data with these samples.
            loss: Loss of the step.

        Raises:
            UserError: The run cannot continue.
        """
        model = self._built.model
        bad = BadStep(
            step=step,
            loss=loss,
            positions=tuple(positions),
            learning_rate=_number(model.optimizer.learning_rate),
            precision=self._resolved.precision,
            xla=self._resolved.xla,
            already_applied=has_custom_train_step(model),
        )
        found = self._first_bad_values(batch)
        error = bad_step_error(bad, found)
        of_batch = () if found is None else found.rows
        bad_rows = tuple(int(rows[row]) for row in of_batch if row < len(rows))
        self._rollbacks.decide(bad, error, bad_rows=bad_rows)
        _LOG.warning(
            "%s Training returns to the last checkpoint, and continues without these samples.",
            error.line(),
        )

    def _first_bad_values(self, batch: Any) -> BadValues | None:
        try:
            return first_bad_values(self._built.model, batch, adapt=self._built.adapt)
        except (tf.errors.OpError, MemoryError) as error:
            # This keeps the activations of the whole global batch in memory, so memory may run out.
            if not is_out_of_memory(error):
                raise
            return None

    def out_of_memory(self, error: Exception, split: Split) -> Split:
        """Return a smaller batch after a step that did not fit in memory.

        Raises:
            ConfigError: `train.on_oom` is `stop`, there are several workers, or the batch cannot be
                smaller. The error shows the size that did not fit.
            Exception: The same error, if lack of memory was not its cause.
        """
        if not is_out_of_memory(error):
            raise error
        if self._config.on_oom == "stop":
            raise does_not_fit(split, error) from error
        if self._distribution.workers > 1:
            several = "all workers would have to agree on a smaller one, and only one ran out"
            raise does_not_fit(split, error, uncut=several) from error
        if self._resolved.virtual_workers:
            elastic = "train.elastic has cut it into virtual workers of that many rows"
            raise does_not_fit(split, error, uncut=elastic, accumulates=False) from error
        if has_custom_train_step(self._built.model):
            name = type(self._built.model).__name__
            own = f"{name}.train_step takes a whole batch, which cannot be split"
            raise does_not_fit(split, error, uncut=own, accumulates=False) from error
        reduction = reduce_batch(split, error)
        self.reductions.append(reduction)
        _LOG.warning("%s", reduction.message)
        return reduction.after

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "divergence": self._divergence.state(),
            "loss_scale": self._loss_scale.state(),
            "rollbacks": self._rollbacks.state(),
        }

    def restore(self, state: Mapping[str, Any], *, decided: bool = True) -> None:
        """Restore the result of `state`.

        Args:
            state: From a checkpoint.
            decided: Whether to restore decisions about rollbacks, too; False during a rollback.
        """
        self._divergence.restore(state["divergence"])
        self._loss_scale.restore(state["loss_scale"])
        if decided:
            self._rollbacks.restore(state["rollbacks"])

    def record(self) -> dict[str, Any]:
        """Return findings and actions as JSON values."""
        return {
            **self._rollbacks.state(),
            "reductions": [reduction.message for reduction in self.reductions],
            "findings": [finding.line() for finding in self.findings],
        }

    def _report(self, finding: Finding | None) -> None:
        if finding is None:
            return
        if finding.severity == "error":
            raise finding.as_error()
        if all(finding.line() != earlier.line() for earlier in self.findings):
            self.findings.append(finding)
            _LOG.warning("%s", finding.line())


def _number(scalar: Any) -> float:
    """Convert a Keras variable, on one device or with copies on replicas, or a tensor to a number."""
    return float(tf.convert_to_tensor(getattr(scalar, "value", scalar)).numpy())
