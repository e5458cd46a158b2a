"""A loaded model whose requests are joined where they had to wait for it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from stoker.core.errors import UserError
from stoker.export.callpath import LoadedModel, Signature, checked_inputs, zeros
from stoker.serve.batching.config import BatchingConfig
from stoker.serve.batching.joined import Array, Outputs, can_be_joined, key_of, rejoined, rows_of
from stoker.serve.batching.queue import Queue, Request
from stoker.serve.errors import Code, ServeError
from stoker.serve.metrics import ServeMetrics
from stoker.serve.patience import Patience
from stoker.serve.runs import Runs

_log = logging.getLogger(__name__)


class Batcher:
    """Calls one model; may be used by many threads."""

    def __init__(
        self,
        model: LoadedModel,
        config: BatchingConfig,
        *,
        name: str = "",
        metrics: ServeMetrics | None = None,
        runs: Runs | None = None,
        may_not_end: bool = False,
    ) -> None:
        """Call a model for requests.

        Args:
            model: What is called.
            config: The limits.
            name: The model's.
            metrics: The counts.
            runs: Watches over runs; nobody does if None.
            may_not_end: Whether a run could last for ever, and is left to a thread of its own.
        """
        self._runs = runs
        self._apart = may_not_end
        self._model = model
        self._config = config
        self._queues = {
            key: Queue(
                functools.partial(self._run, key),
                config,
                name=f"{name or model.path} {key}",
                metrics=metrics,
                model_name=name,
                runs=runs,
                may_not_end=may_not_end,
            )
            for key, signature in model.signatures.items()
            if config.enabled and can_be_joined(signature)
        }
        self.signatures: Mapping[str, Signature] = model.signatures
        self.signature_defs = model.signature_defs

    def call(
        self, signature: str, inputs: Mapping[str, Array], *, patience: Patience | None = None
    ) -> Outputs:
        """Run one signature once; as `LoadedModel.call`, maybe together with other requests.

        Args:
            signature: One of `signatures`.
            inputs: Input name -> array.
            patience: How long the client waits; for ever if None.

        Raises:
            UserError: the inputs are not the signature's, or the model refused them.
            ServeError: too many requests wait, or the client does not any more.
        """
        patience = patience or Patience()
        patience.check()
        queue = self._queues.get(signature)
        patience.trail.rows += rows_of(list(inputs.values()))
        if queue is None or not queue.joins:
            return self._alone(signature, inputs, patience)
        arrays = checked_inputs(self.signatures[signature], inputs)
        rows = rows_of(arrays)
        if rows == 0:
            return self._alone(signature, inputs, patience)
        if rows > self._config.max_batch_size:
            return self._larger(queue, arrays, rows, patience)
        return queue.submit(self._request(arrays, rows, patience))

    def is_quick(self, signature: str) -> bool:
        """Whether `call_at_once` is worth trying; an unknown signature is not."""
        queue = self._queues.get(signature)
        return queue is not None and queue.is_quick

    @property
    def max_batch_size(self) -> int:
        """The most rows of one run."""
        return self._config.max_batch_size

    def call_at_once(
        self, signature: str, inputs: Mapping[str, Array], sizes: Sequence[int]
    ) -> Outputs | None:
        """Run one signature once for several requests, if its model is free.

        Args:
            signature: One for which `is_quick` is true.
            inputs: Input name -> the rows of all requests, one after the other.
            sizes: How many rows each has; all are one request's if empty.

        Returns:
            Output name -> array; None where the model is at work, the rows are too many, or
            requests must not be joined.

        Raises:
            UserError: the inputs are not the signature's, or the model refused them.
        """
        arrays = checked_inputs(self.signatures[signature], inputs)
        rows = rows_of(arrays)
        sizes = sizes or (rows,)
        if rows != sum(sizes) or not 0 < rows <= self._config.max_batch_size:
            return None
        return self._queues[signature].run_now(arrays, sizes)

    def warm_up(self) -> None:
        """Run every signature once with each size that batches are padded to, on zeros.

        A model that refuses zeros (no image decodes from an empty text) is warmed by its first
        requests instead.
        """
        for name in self._queues:
            spec = self.signatures[name].inputs
            for size in self._config.allowed_batch_sizes:
                empty = {key: zeros(found, size) for key, found in spec.items()}
                try:
                    self._model.call(name, empty)
                except (UserError, tf.errors.OpError) as error:
                    _log.info("%s is not warmed on zeros: %s", name, error)
                    break

    def close(self) -> None:
        """Give the memory back; no call may be running, none may follow."""
        self._queues = {}
        self._model.close()

    def _alone(self, signature: str, inputs: Mapping[str, Array], patience: Patience) -> Outputs:
        began_s = time.monotonic()
        try:
            return self._watched(lambda: self._model.call(signature, inputs), patience)
        finally:
            patience.trail.ran(began_s, time.monotonic(), came_s=began_s)

    def _watched(self, run: Callable[[], Outputs], patience: Patience) -> Outputs:
        """A run beside the queues."""
        if self._runs is None:
            return run()
        if self._apart:
            return self._runs.call(run, patience)
        with self._runs.watched(lambda: None):
            return run()

    def _run(self, name: str, arrays: Sequence[Array]) -> Outputs:
        return self._model.run(name, arrays)

    def _request(self, arrays: Sequence[Array], rows: int, patience: Patience) -> Request:
        key = key_of(arrays, variable=self._config.pad_variable_length_inputs)
        return Request(inputs=arrays, rows=rows, key=key, patience=patience)

    def _larger(
        self, queue: Queue, arrays: Sequence[Array], rows: int, patience: Patience
    ) -> Outputs:
        """A request of more rows than a batch may have."""
        most = self._config.max_batch_size
        if self._config.larger == "refuse":
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"Task size {rows} is larger than maximum input batch size {most}",
            )
        if self._config.larger == "alone":
            return self._watched(lambda: queue.run_alone(arrays), patience)
        pieces, lengths = [], []
        for start in range(0, rows, most):
            part = [array[start : start + most] for array in arrays]
            lengths.append(rows_of(part))
            pieces.append(queue.submit(self._request(part, lengths[-1], patience)))
        return rejoined(pieces, lengths)
