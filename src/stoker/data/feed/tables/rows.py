"""A split without images, as a feed reads it: window by window, or by row where it is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.feed.calls import Calls, RowOrder
from stoker.data.feed.options import as_written
from stoker.data.feed.stages import StageWork
from stoker.data.feed.tables.tensors import table_batches
from stoker.data.feed.tables.windows import Block, TableStream


class TableRows:
    """Raw columns of a table; see `pipeline.RawRows`."""

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
        """Read the shards' footers.

        Args:
            dataset: What ingest wrote.
            split: Its name.
            columns: The columns to read.
            threads: That decode and permute; None: as many as cores.

        Raises:
            DataError: a shard is missing, cut or not what its manifest says.
        """
        self._stream = TableStream(dataset, split, columns=columns, threads=threads)

    @property
    def rows(self) -> int:
        """Rows of the split."""
        return self._stream.rows

    def order(self, *, seed: int) -> RowOrder:
        """Which row stands where: the same as where windows are streamed."""

        def rows_at(epoch: int, first: int, last: int) -> NDArray[np.int64]:
            return self._stream.rows_at(epoch, first, last, seed=seed)

        return rows_at

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Elements hold the rows of a call."""
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
        """Elements are batches, as they are stored."""
        return table_batches(
            lambda: self._stream.in_order(batch_size=batch_size), columns=self._stream.columns
        )

    def stages(
        self,
        *,
        batch_size: int,
        samples: int,  # noqa: ARG002 - a table is read by windows
        seed: int,
    ) -> Iterator[StageWork]:
        """How batches are made; see `measure_stages`."""
        made: list[Block] = []
        yield from self._stream.stages(batch_size=batch_size, seed=seed, made=made)
        with table_batches(lambda: iter(made), columns=self._stream.columns) as batches:

            def cut() -> None:
                for _ in as_written(batches):
                    pass

            yield StageWork(name="batch", samples=made[0].rows, parallelism=1, run=cut)
