"""Blocks of a table -> a `tf.data.Dataset` of raw columns: one Python call a window.

TensorFlow takes a window's arrays as they lie and cuts its batches out of them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from stoker.core.errors import DataError
from stoker.data.columns import Column
from stoker.data.feed.calls import plain
from stoker.data.feed.table_columns import Text, Values, no_rows
from stoker.data.feed.tables import Block

SEPARATOR = b"\xff"
"""Stands between the strings of a dictionary: no UTF-8 text holds it."""


@contextmanager
def table_batches(
    blocks: Callable[[], Iterator[Block]], *, columns: Sequence[Column]
) -> Iterator[tf.data.Dataset[Any]]:
    """Batches of raw columns, for as long as the context is open; then the reader's threads end.

    Args:
        blocks: Gives a fresh iterator over the blocks, e.g. of `TableStream.shuffled`.
        columns: The stream's columns.

    Yields:
        A dataset of {column: [batch, ...]} as `stoker.data.columns` says, strings as `tf.string`.
        One iterator at a time: a second one begins anew and ends the first.

    Raises:
        DataError: a shard was changed, cut or damaged; names it. It takes the place of the
            `tf.errors.OpError` that left the context.
    """
    served = _Served(blocks, columns)
    try:
        yield _dataset(served, columns)
    except tf.errors.OpError as error:
        if served.fault is not None:
            raise served.fault from error
        raise
    finally:
        served.close()


def _dataset(served: _Served, columns: Sequence[Column]) -> tf.data.Dataset[Any]:
    texts = [tf.string for _ in _texts(columns)]
    dtypes = [*map(_dtype, columns), *texts]
    shapes = [*([None, None, *column.shape] for column in columns), *([] for _ in texts)]

    @plain
    def window(turn: tf.Tensor) -> tuple[tf.Tensor, ...]:
        found = tf.numpy_function(served.window, [turn], dtypes)
        return tuple(map(tf.ensure_shape, found, shapes))

    # Not `from_generator`: it has malloc give memory back at once (M_TRIM_THRESHOLD), and the
    # page faults that follow cost 200 ns a row.
    windows = tf.data.Dataset.range(np.iinfo(np.int64).max).map(window)
    windows = windows.take_while(plain(lambda first, *_: tf.size(first) > 0))
    return windows.flat_map(plain(lambda *parts: _batches(parts, columns)))


class _Served:
    """The windows of one reader after another, as TensorFlow's threads ask for them."""

    def __init__(self, blocks: Callable[[], Iterator[Block]], columns: Sequence[Column]) -> None:
        self.fault: DataError | None = None
        self._blocks, self._columns = blocks, columns
        self._windows = self._read(iter(()))
        self._is_open = True
        self._turn = Lock()
        self._end = self._arrays({c.name: no_rows(c) for c in columns}, batches=0, size=0)

    def window(self, turn: int) -> list[Any]:
        """The next window; the first turn begins anew, and after the last there is none."""
        with self._turn:
            if turn == 0 and self._is_open:
                self._windows.close()
                self._windows = self._read(self._blocks())
            try:
                return next(self._windows, self._end)
            except DataError as error:
                # TensorFlow passes on only its text.
                self.fault = error
                raise

    def close(self) -> None:
        """End the reader; whoever still asks gets no more windows."""
        with self._turn:
            self._is_open = False
            self._windows.close()

    def _read(self, blocks: Iterator[Block]) -> Generator[list[Any], None, None]:
        for block in blocks:
            whole, rest = divmod(block.rows, block.batch_size)
            if whole:
                yield self._arrays(block.columns, batches=whole, size=block.batch_size)
            if rest:
                last = {name: values[-rest:] for name, values in block.columns.items()}
                yield self._arrays(last, batches=1, size=rest)

    def _arrays(self, columns: dict[str, Values], *, batches: int, size: int) -> list[Any]:
        values = [columns[column.name] for column in self._columns]
        numbers = [part.codes if isinstance(part, Text) else part for part in values]
        cut = [part[: batches * size].reshape(batches, size, *part.shape[1:]) for part in numbers]
        return [*cut, *(_joined(part.dictionary) for part in values if isinstance(part, Text))]


def _batches(parts: Sequence[tf.Tensor], columns: Sequence[Column]) -> tf.data.Dataset[Any]:
    numbers = {column.name: part for column, part in zip(columns, parts, strict=False)}
    texts = {
        column.name: tf.strings.split(joined, sep=SEPARATOR)
        for column, joined in zip(_texts(columns), parts[len(columns) :], strict=True)
    }
    batches = tf.data.Dataset.from_tensor_slices(numbers)  # type: ignore[arg-type]
    if not texts:
        return batches
    # `gather_nd`: on strings `gather` takes 35 ns for each, this 21 ns.

    @plain
    def with_texts(batch: Any) -> Any:
        return batch | {name: tf.gather_nd(texts[name], batch[name][..., None]) for name in texts}

    return batches.map(with_texts)


def _texts(columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if column.dtype == "string"]


def _dtype(column: Column) -> tf.DType:
    return tf.int32 if column.dtype == "string" else tf.as_dtype(column.tensor_dtype)


def _joined(dictionary: pa.StringArray) -> bytes:
    strings = dictionary.cast(pa.binary())
    ends = pa.array([0, len(strings)], pa.int32())
    return bytes(pc.binary_join(pa.ListArray.from_arrays(ends, strings), SEPARATOR)[0].as_buffer())
