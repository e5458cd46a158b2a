"""Read training batches from a tf.data service: every record once per epoch, in no fixed order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from stoker.core.errors import ConfigError, DataError, Plain
from stoker.data.feed.calls import Calls
from stoker.data.feed.order import shuffled_indices
from stoker.data.feed.service.records import RecordCopy, parse
from stoker.data.feed.service.status import service_status, wait_until_ready
from stoker.data.sources.config import ServiceConfig, split_address
from stoker.internals.tensorflow_internals import python_function

NO_PROMISE = (
    "with the tf.data service, the order of records is not fixed, and an epoch cannot be resumed. Each "
    "record is read once per epoch, but records that a killed worker was reading are lost for that epoch "
    "(if the dispatcher is killed: at most one file of the copy per worker)"
)
"""Warning that is logged when training begins to read from a service."""

PREFETCHED = 8
"""Number of batches that are prefetched for the step."""

FILES_AT_ONCE = 4
"""Number of files that a worker reads at the same time. With more files, records are mixed better, but more
records are lost if the worker is killed."""

SHUFFLED_BYTES = 128 << 20
"""Maximum size of the encoded records in a worker's shuffle buffer."""

SHUFFLED_ROWS = 1 << 14
"""Maximum number of records in a worker's shuffle buffer."""

SHUFFLED_SHARE = 32
"""A worker's shuffle buffer holds at most the split's records divided by this number, because the buffer is
lost if the worker is killed. A small buffer is enough: each file is already a random sample of the split."""

ORDERS = 32
"""Number of different orders; after this many epochs they repeat. Each order is registered at the dispatcher,
together with the transform's vocabularies."""

CHECK_WORKERS_S = 15.0
"""Seconds between checks for workers that do not answer; a killed worker is restarted sooner than that."""

_LOG = logging.getLogger(__name__)


def distributed(dataset: tf.data.Dataset[Any], service: ServiceConfig) -> tf.data.Dataset[Any]:
    """Run a pipeline of TensorFlow's own operations on a service's workers.

    Each element of the pipeline's first operation (for example a file name) goes to the next free worker.
    Every result is returned once, in no fixed order.

    Raises:
        ConfigError: the pipeline has a Python function or a variable, or the service does not answer.
    """
    require_sendable(dataset)
    _wait_for_service(service)
    identity = _register(dataset, service)
    return _from_identity(identity, dataset.element_spec, _url(service))


class ServiceFeed:
    """Batches of one split, parsed and transformed on the service's workers.

    It has the interface of a `Feed`; an element is already a batch.
    """

    keeps_features = False
    """See `Feed.keeps_features`; here, an element is a batch, not row numbers."""

    whole_calls = False
    """See `Feed.whole_calls`; here, an element holds the rows of a step."""

    shares_rows = False
    """See `Feed.shares_rows`."""

    def __init__(
        self,
        copy: RecordCopy,
        transform: Callable[[dict[str, tf.Tensor]], Any],
        *,
        service: ServiceConfig,
    ) -> None:
        """Check that the pipeline can be sent, and that the service answers.

        Args:
            copy: The split as TFRecord files, in a folder that the workers can open, too.
            transform: Maps raw columns, each [batch], to the step's input, a structure of tensors.
            service: Address of the dispatcher.

        Raises:
            ConfigError: the transform calls Python or reads a variable, or the service does not answer.
        """
        self.rows = copy.rows
        self._copy, self._transform, self._service = copy, transform, service
        require_sendable(self._pipeline(batch_size=1, seed=0, epoch=0))
        _wait_for_service(service)
        _LOG.warning(NO_PROMISE)

    def rows_at(
        self,
        epoch: int,  # noqa: ARG002 - as Feed has it
        first: int,  # noqa: ARG002 - as Feed has it
        last: int,  # noqa: ARG002 - as Feed has it
        *,
        seed: int,  # noqa: ARG002 - as Feed has it
    ) -> Sequence[int]:
        """Return (): it is not known which rows a batch of the service holds."""
        return ()

    def epochs(self, first: int, last: int, *, batch_size: int, seed: int) -> tf.data.Dataset[Any]:
        """Return the batches of the epochs [first, last), one epoch after the other.

        Args:
            first: The first epoch, from 0.
            last: The epoch after the last epoch.
            batch_size: Samples per batch; an epoch's last batch may have fewer.
            seed: Seed of the files' order and of each worker's shuffle.

        Returns:
            A prefetched dataset of batches. An epoch has ceil(rows / batch_size) batches; it has fewer
            only if a worker was killed.

        Raises:
            DataError: a file of the copy has changed.
        """
        self._require_unchanged()
        orders = [epoch % ORDERS for epoch in range(first, last)]
        identities = {
            order: _register(
                self._pipeline(batch_size=batch_size, seed=seed, epoch=order), self._service
            )
            for order in sorted(set(orders))
        }
        spec = self._pipeline(batch_size=batch_size, seed=seed, epoch=0).element_spec

        url = _url(self._service)

        def one_epoch(identity: tf.Tensor) -> tf.data.Dataset[Any]:
            # The last batch of each worker may be short, so batches get their final size here.
            return _from_identity(identity, spec, url).rebatch(batch_size)

        listed = tf.data.Dataset.from_tensor_slices([identities[order] for order in orders])
        return listed.flat_map(one_epoch).prefetch(PREFETCHED)

    def steps(self, batch_size: int) -> int:
        """Return the number of steps of an epoch."""
        return -(-self.rows // batch_size)

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Open a dataset with one batch for each step of the calls, even if a worker is killed.

        If records are lost with a worker, the next epoch begins earlier. After the last epoch, the missing batches
        are taken from one more epoch.
        """
        epochs = calls.epochs
        steps = len(epochs) * self.steps(calls.batch_size)
        batches = self.epochs(
            epochs.start, epochs.stop + 1, batch_size=calls.batch_size, seed=calls.seed
        )
        with _warns_of_silent_workers(self._service):
            yield batches.take(steps)

    def load(self, element: Any) -> Any:
        """Return the element, which is already a batch."""
        return element

    def _pipeline(self, *, batch_size: int, seed: int, epoch: int) -> tf.data.Dataset[Any]:
        """Return the pipeline that each worker runs over its files."""
        paths = np.array(self._copy.paths)
        count, columns = len(paths), self._copy.columns
        order = shuffled_indices(
            np.arange(count, dtype=np.int64), size=count, seed=seed, epoch=epoch
        )
        shuffle_rows = min(
            self.rows // SHUFFLED_SHARE, SHUFFLED_ROWS, SHUFFLED_BYTES // self._copy.record_bytes
        )
        return (
            tf.data.Dataset.from_tensor_slices(paths[order])
            .interleave(
                tf.data.TFRecordDataset,
                cycle_length=FILES_AT_ONCE,
                # Not AUTOTUNE, which prefetches: prefetched records are lost if the worker is killed.
                num_parallel_calls=FILES_AT_ONCE,
                deterministic=False,
            )
            .shuffle(max(1, shuffle_rows), seed=(seed * ORDERS + epoch) % 2**62)
            .batch(batch_size)
            .map(
                lambda serialized: self._transform(parse(serialized, columns)),
                num_parallel_calls=tf.data.AUTOTUNE,
                deterministic=False,
            )
            .prefetch(tf.data.AUTOTUNE)
        )

    def _require_unchanged(self) -> None:
        for file in self._copy.files:
            path = self._copy.root / file.file
            if not path.is_file() or path.stat().st_size != file.size_bytes:
                raise DataError(
                    f"{path} must not change while it is read",
                    got=Plain("a different length" if path.is_file() else "no such file"),
                    fix="Delete the file's folder and train again; training makes a new copy.",
                )


def _wait_for_service(service: ServiceConfig) -> None:
    wait_until_ready(service.address, workers=service.workers, timeout_s=service.timeout_s)


@contextmanager
def _warns_of_silent_workers(service: ServiceConfig) -> Iterator[None]:
    """Log workers that do not answer; TensorFlow would wait for them forever without a message."""
    ended = Event()

    def watch() -> None:
        while not ended.wait(CHECK_WORKERS_S):
            try:
                status = service_status(service.address, timeout_s=service.timeout_s)
            except ConfigError as error:
                _LOG.warning("%s", error)
                continue
            if status.silent and not ended.is_set():
                _LOG.warning(
                    "training waits for tf.data workers that do not answer: %s; it continues when "
                    "they answer again at these addresses",
                    ", ".join(status.silent),
                )

    watcher = Thread(target=watch, name="stoker-data-service", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(timeout=service.timeout_s)


def _register(dataset: tf.data.Dataset[Any], service: ServiceConfig) -> tf.Tensor:
    try:
        # No compression: to compress pixels took a quarter of all CPU time.
        return tf.data.experimental.service.register_dataset(
            _url(service), dataset, compression=None
        )
    except tf.errors.OpError as error:
        raise ConfigError(
            f"the tf.data service at {service.address} must accept the pipeline",
            got=Plain(error.message.splitlines()[0]),
            fix="Read the service's log; `stoker data-service status` shows whether it answers.",
        ) from error


def _from_identity(identity: tf.Tensor, spec: Any, url: str) -> tf.data.Dataset[Any]:
    source = tf.data.experimental.service
    return source.from_dataset_id(source.ShardingPolicy.DYNAMIC, url, identity, element_spec=spec)


def _url(service: ServiceConfig) -> str:
    host, port = split_address(service.address)
    return f"grpc://{host}:{port}"


PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""Graph operations of `tf.numpy_function`, `tf.py_function` and `Dataset.from_generator`."""

VARIABLE_OPERATIONS = ("ReadVariableOp", "ResourceGather", "VarHandleOp")
"""Graph operations that use a variable."""

_GENERATOR = ("DatasetV2._GeneratorState", "_from_generator")
"""Prefixes of the names of TensorFlow's functions that call a user's generator."""

_IGNORE_STATE = 1
"""`tf.data.experimental.ExternalStatePolicy.IGNORE` as an argument of the operation. Vocabularies count as
external state, although their contents are part of the graph."""


def require_sendable(dataset: tf.data.Dataset[Any]) -> None:
    """Refuse a pipeline that a worker in another process cannot run.

    Raises:
        ConfigError: the pipeline calls a Python function, which the error names, or reads a variable.
    """
    nodes = _nodes(dataset)
    found = dict.fromkeys(
        f"{node.op} ({_function_name(node.attr['token'].s.decode())})"
        for node in nodes
        if node.op in PYTHON_OPERATIONS
    )
    if found:
        raise ConfigError(
            "a pipeline for the tf.data service must not have a Python function, which can run only in its "
            "own process",
            got=Plain("; ".join(found)),
            fix="Write it with TensorFlow's own operations, or leave out data.service, so that this process "
            "reads the data.",
        )
    variables = sorted({node.op for node in nodes if node.op in VARIABLE_OPERATIONS})
    if variables:
        raise ConfigError(
            "a pipeline for the tf.data service must not read a variable, whose value stays in this "
            "process",
            got=Plain(", ".join(variables)),
            fix="Use constants instead of variables.",
        )


def _nodes(dataset: tf.data.Dataset[Any]) -> list[Any]:
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
    )
    graph = graph_pb2.GraphDef.FromString(serialized.numpy())
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]


def _function_name(token: str) -> str:
    function = python_function(token)
    name = getattr(getattr(function, "_func", function), "__qualname__", None)
    if name is None:
        return "an unknown function"
    return "Dataset.from_generator" if name.startswith(_GENERATOR) else str(name)
