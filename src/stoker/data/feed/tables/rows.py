"""Batches of a split without images, as a `tf.data.Dataset` of raw columns.

TensorFlow uses a window's arrays without a copy and slices batches from them, so only one Python call per
window is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import DataError
from stoker.data.columns import PADDING, Column
from stoker.data.dataset import Dataset
from stoker.data.feed.calls import Calls, RowOrder, plain
from stoker.data.feed.options import as_written
from stoker.data.feed.stages import StageWork
from stoker.data.feed.tables.columns import Lists, Text, Values, empty_column
from stoker.data.feed.tables.windows import Block, TableStream


class TableRows:
    """Raw columns of a table."""

    whole_calls = True
    changes = False

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        columns: Sequence[Column],
        threads: int | None = None,
    ) -> None:
        """Check every shard's hash and read its footer.

        Args:
            dataset: The ingested dataset.
            split: Name of the split.
            columns: The columns to read.
            threads: Number of threads that decode and permute; None: the number of cores.

        Raises:
            DataError: a shard is missing or truncated, or differs from its manifest.
        """
        self._stream = TableStream(dataset, split, columns=columns, threads=threads)

    @property
    def rows(self) -> int:
        """Number of rows of the split."""
        return self._stream.rows

    def order(self, *, seed: int) -> RowOrder:
        """Return the order in which `shuffled` reads the rows."""

        def rows_at(epoch: int, first: int, last: int) -> NDArray[np.int64]:
            return self._stream.rows_at(epoch, first, last, seed=seed)

        return rows_at

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Open a dataset of shuffled rows; an element holds the rows of a call."""
        with table_batches(
            lambda: self._stream.shuffled(
                batch_size=calls.call_rows,
                seed=calls.seed,
                epochs=calls.epochs,
                first_step=calls.first - calls.first_epoch * calls.per_epoch,
            ),
            columns=self._stream.columns,
        ) as batches:
            yield calls.without_skipped(batches)

    def in_order(self, *, batch_size: int) -> AbstractContextManager[tf.data.Dataset[Any]]:
        """Open a dataset of batches in stored order."""
        return table_batches(
            lambda: self._stream.in_order(batch_size=batch_size), columns=self._stream.columns
        )

    def stages(
        self,
        *,
        batch_size: int,
        samples: int,  # noqa: ARG002 - a table is read window by window
        seed: int,
    ) -> Iterator[StageWork]:
        """Return the work to make a window's batches, stage by stage, for `measure_stages`."""
        made: list[Block] = []
        yield from self._stream.stages(batch_size=batch_size, seed=seed, made=made)
        with table_batches(lambda: iter(made), columns=self._stream.columns) as batches:

            def cut() -> None:
                for _ in as_written(batches):
                    pass

            yield StageWork(name="batch", samples=made[0].rows, parallelism=1, run=cut)


SEPARATOR = b"\xff"
"""Byte that separates the strings of a dictionary; it never occurs in UTF-8 text."""


@contextmanager
def table_batches(
    blocks: Callable[[], Iterator[Block]], *, columns: Sequence[Column]
) -> Iterator[tf.data.Dataset[Any]]:
    """Open batches of raw columns; the reader's threads end with the context.

    Args:
        blocks: Returns a new iterator over the blocks, e.g. of `TableStream.shuffled`.
        columns: The stream's columns.

    Yields:
        A dataset of {column: [batch, ...]}, in the form that `stoker.data.columns` defines; lists of varying
        length are padded to the longest list of the batch. Use one iterator at a time: a second iterator
        starts from the beginning and ends the first.

    Raises:
        DataError: a shard was changed, truncated or damaged; the error names it. It is raised instead of the
            `tf.errors.OpError` that TensorFlow raised.
    """
    server = _BlockServer(blocks, columns)
    try:
        yield _dataset(server, columns)
    except tf.errors.OpError as error:
        if server.fault is not None:
            raise server.fault from error
        raise
    finally:
        server.close()


def _dataset(server: _BlockServer, columns: Sequence[Column]) -> tf.data.Dataset[Any]:
    texts, lists = _texts(columns), _ragged(columns)
    dtypes = [*(tf.int64 if c.is_ragged else _dtype(c) for c in columns)]
    dtypes += [*(tf.string for _ in texts), *map(_dtype, lists)]
    shapes: list[list[int | None]] = [
        [None, None, *(() if c.is_ragged else c.shape)] for c in columns
    ]
    shapes += [[] for _ in texts]
    shapes += [[None] for _ in lists]

    @plain
    def window(turn: tf.Tensor) -> tuple[tf.Tensor, ...]:
        found = tf.numpy_function(server.window, [turn], dtypes)
        return tuple(map(tf.ensure_shape, found, shapes))

    # Not `from_generator`: it makes malloc return memory to the kernel at once (M_TRIM_THRESHOLD), and the
    # page faults that follow cost 200 ns per row.
    windows = tf.data.Dataset.range(np.iinfo(np.int64).max).map(window)
    windows = windows.take_while(plain(lambda first, *_: tf.size(first) > 0))
    return windows.flat_map(plain(lambda *parts: _batches(parts, columns)))


class _BlockServer:
    """Serves windows to TensorFlow's threads, in the order of their requests; a new iterator gets a new reader."""

    def __init__(self, blocks: Callable[[], Iterator[Block]], columns: Sequence[Column]) -> None:
        self.fault: DataError | None = None
        self._blocks, self._columns = blocks, columns
        self._windows = self._read(iter(()))
        self._is_open = True
        self._turn = Lock()
        self._end = self._arrays({c.name: empty_column(c) for c in columns}, batches=0, size=0)

    def window(self, turn: int) -> list[Any]:
        """Return the next window; `turn` 0 starts a new reader at the first window."""
        with self._turn:
            if turn == 0 and self._is_open:
                self._windows.close()
                self._windows = self._read(self._blocks())
            try:
                return next(self._windows, self._end)
            except DataError as error:
                # TensorFlow would pass on only the text of the error.
                self.fault = error
                raise

    def close(self) -> None:
        """End the reader; later requests get no more windows."""
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
        values = [columns[column.name][: batches * size] for column in self._columns]
        numbers = [_numbers(part) for part in values]
        cut = [part.reshape(batches, size, *part.shape[1:]) for part in numbers]
        dictionaries = [getattr(part, "dictionary", None) for part in values]
        texts = [_joined(each) for each in dictionaries if each is not None]
        return [*cut, *texts, *(part.flat() for part in values if isinstance(part, Lists))]


def _batches(parts: Sequence[tf.Tensor], columns: Sequence[Column]) -> tf.data.Dataset[Any]:
    numbers = {column.name: part for column, part in zip(columns, parts, strict=False)}
    texts, lists = _texts(columns), _ragged(columns)
    after = len(columns) + len(texts)
    words = {
        column.name: tf.strings.split(joined, sep=SEPARATOR)
        for column, joined in zip(texts, parts[len(columns) : after], strict=True)
    }
    if not texts and not lists:
        return tf.data.Dataset.from_tensor_slices(numbers)  # type: ignore[arg-type]  # the stubs know no dict
    flats = {column.name: flat for column, flat in zip(lists, parts[after:], strict=True)}
    starts = {
        name: tf.cumsum(tf.reduce_sum(numbers[name], axis=1), exclusive=True) for name in flats
    }
    batches = tf.data.Dataset.from_tensor_slices((numbers, starts))  # type: ignore[arg-type]  # the same

    def decode_codes(name: str, codes: Any) -> Any:
        # Not `gather`, which takes 35 ns per string; `gather_nd` takes 21 ns.
        return tf.gather_nd(words[name], codes[..., None]) if name in words else codes

    @plain
    def to_dense(batch: Any, starts: Any) -> Any:
        dense = {name: decode_codes(name, batch[name]) for name in batch if name not in flats}
        for column in lists:
            name, lengths = column.name, batch[column.name]
            own = flats[name][starts[name] : starts[name] + tf.reduce_sum(lengths)]
            dense[name] = _padded(column, decode_codes(name, own), lengths)
        return dense

    return batches.map(to_dense)


def _padded(column: Column, flat: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    ragged: Any = tf.RaggedTensor
    lists = ragged.from_row_lengths(flat, lengths, validate=False)
    return lists.to_tensor(tf.constant(PADDING[column.dtype], flat.dtype))


def _numbers(part: Values) -> NDArray[Any]:
    if isinstance(part, Lists):
        return part.lengths()
    return part.codes if isinstance(part, Text) else part


def _ragged(columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if column.is_ragged]


def _texts(columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if column.dtype == "string"]


def _dtype(column: Column) -> tf.DType:
    return tf.int32 if column.dtype == "string" else tf.as_dtype(column.tensor_dtype)


def _joined(dictionary: pa.StringArray) -> bytes:
    strings = dictionary.cast(pa.binary())
    ends = pa.array([0, len(strings)], pa.int32())
    return bytes(pc.binary_join(pa.ListArray.from_arrays(ends, strings), SEPARATOR)[0].as_buffer())
