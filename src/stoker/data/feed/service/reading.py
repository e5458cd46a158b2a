"""What training reads from a tf.data service: every record once an epoch, in no promised order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.ops import script_ops  # type: ignore[attr-defined]

from stoker.core.errors import ConfigError, DataError, Plain
from stoker.data.feed.calls import Calls
from stoker.data.feed.order import shuffled_indices
from stoker.data.feed.service.records import RecordCopy, parse
from stoker.data.feed.service.status import service_status, wait_until_ready
from stoker.data.sources.config import ServiceConfig, split_address

NO_PROMISE = (
    "the tf.data service promises no order and no resume: each record comes once an epoch, "
    "and those that a killed worker was reading are lost for that epoch"
)
"""Said once, when training begins to read from a service."""

PREFETCHED = 8
"""Batches that are kept ready beside the step."""

FILES_AT_ONCE = 4
"""Files that a worker mixes: more mix better, and more are lost with a killed worker."""

SHUFFLED_BYTES = 128 << 20
"""Encoded records that a worker holds to shuffle them."""

SHUFFLED_ROWS = 1 << 14
"""Most records that a worker holds to shuffle them, however small they are."""

SHUFFLED_SHARE = 32
"""A worker holds at most this part of the split: what it holds is lost if it is killed, and the
files are fair samples already."""

ORDERS = 32
"""Epochs with an order of their own; then they come again. Each is registered at the dispatcher,
with the transform's vocabularies in it."""

WATCHED_EVERY_S = 15.0
"""How often workers are asked whether they are there: a killed one is back sooner."""

_LOG = logging.getLogger(__name__)


def distributed(dataset: tf.data.Dataset[Any], service: ServiceConfig) -> tf.data.Dataset[Any]:
    """Any pipeline of TensorFlow's own operations, run by a service's workers.

    The first operation's elements (file names, say) are dealt out one by one to whichever worker
    is free; the elements come in no promised order, each once.

    Raises:
        ConfigError: the pipeline holds a Python function or a variable, or the service is not there.
    """
    require_sendable(dataset)
    _reached(service)
    identity = _register(dataset, service)
    return _from_identity(identity, dataset.element_spec, _url(service))


class ServiceFeed:
    """Batches of one split, parsed and transformed on the service's workers.

    It stands where a `Feed` does: an element is a batch already, and `load` gives it back.
    """

    keeps_features = False
    """As `Feed.keeps_features`: an element is a batch and no row numbers."""

    whole_calls = False
    """As `Feed.whole_calls`: an element holds the rows of a step."""

    shares_rows = False
    """As `Feed.shares_rows`."""

    def __init__(
        self,
        copy: RecordCopy,
        transform: Callable[[dict[str, tf.Tensor]], Any],
        *,
        service: ServiceConfig,
    ) -> None:
        """Check that the pipeline can be sent, and that the service is there.

        Args:
            copy: The split as TFRecord files, at a path that the workers can open too.
            transform: Maps raw columns, each [batch], to what the step takes: tensors, nested.
            service: Where the dispatcher is.

        Raises:
            ConfigError: the transform calls Python or reads a variable, or the service is not there.
        """
        self.rows = copy.rows
        self._copy, self._transform, self._service = copy, transform, service
        require_sendable(self._pipeline(batch_size=1, seed=0, epoch=0))
        _reached(service)
        _LOG.warning(NO_PROMISE)

    def rows_at(
        self,
        epoch: int,  # noqa: ARG002 - as Feed has it
        first: int,  # noqa: ARG002 - as Feed has it
        last: int,  # noqa: ARG002 - as Feed has it
        *,
        seed: int,  # noqa: ARG002 - as Feed has it
    ) -> Sequence[int]:
        """None: nobody knows which rows a service gave."""
        return ()

    def epochs(self, first: int, last: int, *, batch_size: int, seed: int) -> tf.data.Dataset[Any]:
        """The epochs [first, last), one after the other.

        Args:
            first: The first epoch, from 0.
            last: The epoch after the last one.
            batch_size: Samples a batch; an epoch's last batch holds what is left.
            seed: Seed of the files' order and of each worker's shuffling.

        Returns:
            A prefetched dataset of batches. An epoch has ceil(rows / batch_size) of them, fewer
            only where a worker was killed.

        Raises:
            DataError: a file of the copy is no longer what it was.
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
            # A worker's last batch is short: only here they are brought to one size.
            return _from_identity(identity, spec, url).rebatch(batch_size)

        listed = tf.data.Dataset.from_tensor_slices([identities[order] for order in orders])
        return listed.flat_map(one_epoch).prefetch(PREFETCHED)

    def steps(self, batch_size: int) -> int:
        """Steps of an epoch."""
        return -(-self.rows // batch_size)

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """As many batches as the calls have steps: those of a killed worker are made up for.

        Where a worker was killed the next epoch begins earlier, and at the very end one more is
        begun.
        """
        epochs = calls.epochs
        steps = len(epochs) * self.steps(calls.batch_size)
        batches = self.epochs(
            epochs.start, epochs.stop + 1, batch_size=calls.batch_size, seed=calls.seed
        )
        with _watched(self._service):
            yield batches.take(steps)

    def load(self, element: Any) -> Any:
        """An element is a batch already."""
        return element

    def _pipeline(self, *, batch_size: int, seed: int, epoch: int) -> tf.data.Dataset[Any]:
        """What each worker runs over the files that it is dealt."""
        paths = np.array(self._copy.paths)
        count, columns = len(paths), self._copy.columns
        order = shuffled_indices(
            np.arange(count, dtype=np.int64), size=count, seed=seed, epoch=epoch
        )
        held = min(
            self.rows // SHUFFLED_SHARE, SHUFFLED_ROWS, SHUFFLED_BYTES // self._copy.record_bytes
        )
        return (
            tf.data.Dataset.from_tensor_slices(paths[order])
            .interleave(
                tf.data.TFRecordDataset,
                cycle_length=FILES_AT_ONCE,
                # Not AUTOTUNE, which reads ahead: what is read ahead is lost with the worker.
                num_parallel_calls=FILES_AT_ONCE,
                deterministic=False,
            )
            .shuffle(max(1, held), seed=(seed * ORDERS + epoch) % 2**62)
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
                    f"{path} must stay as it was while it is read",
                    got=Plain("another length" if path.is_file() else "no such file"),
                    fix="Delete its folder and train again: the copy is made anew.",
                )


def _reached(service: ServiceConfig) -> None:
    wait_until_ready(service.address, workers=service.workers, timeout_s=service.timeout_s)


@contextmanager
def _watched(service: ServiceConfig) -> Iterator[None]:
    """Say which worker is being waited for: TensorFlow waits without end, and says nothing."""
    ended = Event()

    def watch() -> None:
        while not ended.wait(WATCHED_EVERY_S):
            try:
                status = service_status(service.address, timeout_s=service.timeout_s)
            except ConfigError as error:
                _LOG.warning("%s", error)
                continue
            if status.silent and not ended.is_set():
                _LOG.warning(
                    "training waits for tf.data workers that do not answer: %s; it goes on when "
                    "they are back at these addresses",
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
        # Uncompressed: packing pixels and unpacking them here took a quarter of all CPU time.
        return tf.data.experimental.service.register_dataset(
            _url(service), dataset, compression=None
        )
    except tf.errors.OpError as error:
        raise ConfigError(
            f"the tf.data service at {service.address} must take the pipeline",
            got=Plain(error.message.splitlines()[0]),
            fix="See its log; `stoker data-service status` says whether it answers.",
        ) from error


def _from_identity(identity: tf.Tensor, spec: Any, url: str) -> tf.data.Dataset[Any]:
    source = tf.data.experimental.service
    return source.from_dataset_id(source.ShardingPolicy.DYNAMIC, url, identity, element_spec=spec)


def _url(service: ServiceConfig) -> str:
    host, port = split_address(service.address)
    return f"grpc://{host}:{port}"


PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""What `tf.numpy_function`, `tf.py_function` and `Dataset.from_generator` become in a graph."""

VARIABLE_OPERATIONS = ("ReadVariableOp", "ResourceGather", "VarHandleOp")
"""What a variable's use becomes."""

_GENERATOR = ("DatasetV2._GeneratorState", "_from_generator")
"""How TensorFlow names its own functions around a user's generator."""

_IGNORE_STATE = 1
"""`tf.data.experimental.ExternalStatePolicy.IGNORE`, as the operation takes it. Vocabularies count
as state, though their contents are sent along."""


def require_sendable(dataset: tf.data.Dataset[Any]) -> None:
    """Refuse a pipeline that a worker in another process could not run.

    Raises:
        ConfigError: it calls Python (operation and function are named), or reads a variable.
    """
    found = list(dict.fromkeys(python_functions(dataset)))
    if found:
        raise ConfigError(
            "a pipeline for the tf.data service must hold no Python function: it cannot leave its "
            "process",
            got=Plain("; ".join(found)),
            fix="Write it in TensorFlow's own operations, or leave data.service out and read here.",
        )
    variables = sorted({node.op for node in _nodes(dataset) if node.op in VARIABLE_OPERATIONS})
    if variables:
        raise ConfigError(
            "a pipeline for the tf.data service must read no variable: its value stays in this "
            "process",
            got=Plain(", ".join(variables)),
            fix="Use constants in their place.",
        )


def python_functions(dataset: tf.data.Dataset[Any]) -> Iterator[str]:
    """Each Python function in a pipeline: its operation, and its name where it is still known."""
    for node in _nodes(dataset):
        if node.op in PYTHON_OPERATIONS:
            token = node.attr["token"].s.decode()
            yield f"{node.op} ({_function_name(token)})"


def _nodes(dataset: tf.data.Dataset[Any]) -> list[Any]:
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
    )
    graph = graph_pb2.GraphDef.FromString(serialized.numpy())
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]


def _function_name(token: str) -> str:
    # TensorFlow keeps no public way from the token in the graph to the function.
    function = script_ops._py_funcs._funcs.get(token)  # noqa: SLF001
    name = getattr(getattr(function, "_func", function), "__qualname__", None)
    if name is None:
        return "its function is not known"
    return "Dataset.from_generator" if name.startswith(_GENERATOR) else str(name)
