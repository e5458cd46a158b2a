"""A loaded model that joins waiting requests into one run."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from stoker.core.errors import UserError
from stoker.registry.exported_model import (
    LoadedModel,
    Signature,
    checked_inputs,
    first_line,
    typed_inputs,
    wrong_shapes,
    zeros,
)
from stoker.serve.batching.config import BatchingConfig
from stoker.serve.batching.joined import (
    Array,
    Outputs,
    can_be_joined,
    have_all_axes,
    key_of,
    rejoined,
    rows_of,
)
from stoker.serve.batching.queue import Queue, Request
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.runtime.stuck_call_watchdog import Runs

_log = logging.getLogger(__name__)


class Batcher:
    """Calls a loaded model for requests, joined where possible; thread-safe."""

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
        """Prepare to call a model for requests.

        Args:
            model: The model to call.
            config: How requests are joined.
            name: The model's name.
            metrics: The metrics to update; None: no metrics.
            runs: Detects runs that do not end; None: runs are not watched.
            may_not_end: Whether a run could last forever; each run then gets a thread of its own.
        """
        self._runs = runs
        self._apart = may_not_end
        self._model = model
        self._config = config
        self._name = name
        self._metrics = metrics
        self._queues = {
            key: self._queue(key, config)
            for key, signature in model.signatures.items()
            if config.enabled and can_be_joined(signature)
        }
        self.signatures: Mapping[str, Signature] = model.signatures
        self.signature_defs = model.signature_defs

    def call(
        self, signature: str, inputs: Mapping[str, Array], *, deadline: Deadline | None = None
    ) -> Outputs:
        """Answer a request like `LoadedModel.call`, but maybe in one run with other requests.

        Args:
            signature: One of `signatures`.
            inputs: Input name -> array.
            deadline: How long the client waits; None: without limit.

        Raises:
            UserError: the inputs do not match the signature, or the model refused them.
            ServeError: too many requests wait, or the client no longer waits.
        """
        deadline = deadline or Deadline()
        deadline.check()
        known = self.signatures.get(signature)
        if known is None:
            return self._model.call(signature, inputs)  # raises an error that lists the signatures
        deadline.record.rows += rows_of(list(inputs.values()))
        arrays = typed_inputs(known, inputs)
        if wrong := wrong_shapes(known, arrays):
            return self._undeclared(signature, arrays, deadline, wrong=wrong)
        queue, rows = self._queues.get(signature), rows_of(arrays)
        if queue is None or not queue.joins or rows == 0 or not have_all_axes(known, arrays):
            return self._alone(signature, arrays, deadline)
        if rows > queue.max_batch_size:
            return self._larger(queue, arrays, rows, deadline)
        return queue.submit(self._request(arrays, rows, deadline))

    def is_quick(self, signature: str, *, min_runs: int = 0) -> bool:
        """Whether `call_at_once` is worth trying: False for slow and for unknown signatures.

        Args:
            signature: The signature's name.
            min_runs: Minimum number of quick runs that the signature must have had.
        """
        queue = self._queues.get(signature)
        return queue is not None and queue.is_quick and queue.quick_runs >= min_runs

    @property
    def max_batch_size(self) -> int:
        """Maximum number of rows that a run of any signature may have."""
        return min(
            (q.max_batch_size for q in self._queues.values()), default=self._config.max_batch_size
        )

    def call_at_once(
        self, signature: str, inputs: Mapping[str, Array], sizes: Sequence[int]
    ) -> Outputs | None:
        """Answer several requests to a signature with one run, if the model is idle.

        Args:
            signature: Name of a signature for which `is_quick` returns True.
            inputs: Input name -> the rows of all requests, one after the other.
            sizes: Number of rows of each request; empty: all rows belong to one request.

        Returns:
            Output name -> array; None if the model is busy, there are too many rows, or requests must not be joined.

        Raises:
            UserError: the inputs do not match the signature, or the model refused them.
        """
        known = self.signatures[signature]
        arrays = checked_inputs(known, inputs)
        rows = rows_of(arrays)
        sizes = sizes or (rows,)
        queue = self._queues[signature]
        if rows != sum(sizes) or not 0 < rows <= queue.max_batch_size:
            return None
        if len(sizes) > 1 and not have_all_axes(known, arrays):
            return None
        return queue.run_now(arrays, sizes)

    def warm_up(
        self,
        samples: Mapping[str, Mapping[str, Array]] | None = None,
        *,
        budget_s: float = math.inf,
    ) -> int:
        """Run every signature once with each size that batches are padded to, smallest first.

        A signature without a sample runs on zeros. If the model refuses zeros (an empty string is not an image, for
        example), the first requests warm the signature up instead. If a size does not fit in memory, the previous size
        becomes the largest.

        Args:
            samples: Signature -> inputs of one request; their first row is repeated.
            budget_s: Seconds for all runs. Sizes that did not start by then are warmed up by the first requests.

        Returns:
            The number of runs.

        Raises:
            tf.errors.ResourceExhaustedError: not even the smallest size fits in memory.
        """
        until_s, done = time.monotonic() + budget_s, 0
        for name in self._queues:
            sample = (samples or {}).get(name)
            if self._apart and sample is None:
                _log.info(
                    "%s %s is not warmed up on zeros: it has a loop that might not end",
                    self._name,
                    name,
                )
                continue
            done += self._warm_signature(name, sample, until_s)
        return done

    def _warm_signature(self, name: str, sample: Mapping[str, Array] | None, until_s: float) -> int:
        """Run a signature with each size; return the number of sizes that ran."""
        spec, done = self.signatures[name].inputs, 0
        for size in self._config.allowed_batch_sizes:
            if time.monotonic() > until_s:
                _log.warning(
                    "%s %s: the time for warm-up ended before batches of %d rows ran",
                    self._name,
                    name,
                    size,
                )
                break
            given = sample or {key: zeros(found, 1) for key, found in spec.items()}
            try:
                self._model.call(
                    name, {k: np.repeat(v[:1], size, axis=0) for k, v in given.items()}
                )
            except tf.errors.ResourceExhaustedError as error:
                if not done:
                    raise
                self._keep_to(name, self._config.allowed_batch_sizes[done - 1], first_line(error))
                break
            except (UserError, tf.errors.OpError) as error:
                if isinstance(error.__cause__ or error, tf.errors.FailedPreconditionError):
                    raise  # the model is incomplete, so it would fail on every input
                what = "its own request" if sample else "zeros"
                _log.info("%s cannot be warmed up on %s: %s", name, what, error)
                break
            done += 1
        return done

    def _keep_to(self, name: str, rows: int, reason: str) -> None:
        """Limit the rows of a signature's batches. Must be called before the first request."""
        _log.warning(
            "%s %s: batches are limited to %d rows, because more do not fit in memory: %s",
            self._name,
            name,
            rows,
            reason,
        )
        self._queues[name] = self._queue(name, self._config.up_to(rows))

    def close(self) -> None:
        """Free the memory. No call may be running, and no call may follow."""
        self._queues = {}
        self._model.close()

    def _undeclared(
        self,
        signature: str,
        arrays: Sequence[Array],
        deadline: Deadline,
        *,
        wrong: Sequence[UserError],
    ) -> Outputs:
        """Run inputs whose shapes differ from the declared ones. The graph accepts or refuses them.

        TensorFlow Serving does not check shapes either.

        Raises:
            ServeError: the graph refused the inputs. The message has TensorFlow's reason and the inputs' shapes.
        """
        try:
            return self._alone(signature, arrays, deadline)
        except UserError as error:
            cause = error.__cause__
            if not isinstance(cause, tf.errors.OpError):
                raise
            shapes = " ".join(each.line() for each in wrong)
            raise ServeError(Code(cause.error_code), f"{first_line(cause)}; {shapes}") from error

    def _alone(self, signature: str, arrays: Sequence[Array], deadline: Deadline) -> Outputs:
        began_s = time.monotonic()
        try:
            return self._watched(lambda: self._model.run(signature, arrays), deadline)
        finally:
            deadline.record.ran(began_s, time.monotonic(), came_s=began_s)

    def _watched(self, run: Callable[[], Outputs], deadline: Deadline) -> Outputs:
        """Run the model outside of the queues, and detect a run that does not end."""
        if self._runs is None:
            return run()
        if self._apart:
            return self._runs.call(run, deadline)
        with self._runs.watched(lambda: None):
            return run()

    def _queue(self, key: str, config: BatchingConfig) -> Queue:
        return Queue(
            functools.partial(self._run, key),
            config,
            name=f"{self._name or self._model.path} {key}",
            metrics=self._metrics,
            model_name=self._name,
            runs=self._runs,
            may_not_end=self._apart,
        )

    def _run(self, name: str, arrays: Sequence[Array]) -> Outputs:
        return self._model.run(name, arrays)

    def _request(self, arrays: Sequence[Array], rows: int, deadline: Deadline) -> Request:
        key = key_of(arrays, variable=self._config.pad_variable_length_inputs)
        return Request(inputs=arrays, rows=rows, key=key, deadline=deadline)

    def _larger(
        self, queue: Queue, arrays: Sequence[Array], rows: int, deadline: Deadline
    ) -> Outputs:
        """Answer a request that has more rows than a batch may have."""
        max_rows = queue.max_batch_size
        if self._config.larger == "refuse":
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"Task size {rows} is larger than maximum input batch size {max_rows}",
            )
        if self._config.larger == "alone":
            return self._watched(lambda: queue.run_alone(arrays), deadline)
        pieces, lengths = [], []
        for start in range(0, rows, max_rows):
            part = [array[start : start + max_rows] for array in arrays]
            lengths.append(rows_of(part))
            pieces.append(queue.submit(self._request(part, lengths[-1], deadline)))
        return rejoined(pieces, lengths)
