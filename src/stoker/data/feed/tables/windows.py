"""Read a table that may be larger than memory as shuffled batches of columns.

A window of row groups is decoded and permuted in threads while the previous window is in use; a batch
is a slice of a window. The rows of a batch are a pure function of (seed, epoch, step), so a run can
resume at any step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.feed.stages import StageWork
from stoker.data.feed.tables.columns import Values, empty_column, window_column
from stoker.data.feed.tables.row_groups import (
    MIN_WINDOW_GROUPS,
    Window,
    rows_at,
    shuffled_windows,
    stored_windows,
)
from stoker.data.feed.tables.shards import THREADS, TableShards

WINDOW_BYTES = 128 << 20
"""Memory of a window, bytes. A run starts or resumes when its first window is decoded, in under 1 s. Up to three
windows are in memory: the current window, the next, and the previous one, which earlier batches still use."""

ORDER_ROWS = 1 << 16
"""Number of rows whose order is computed at a time, so that intermediate results fit into the CPU cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Rows of one epoch in their final order: full batches; an epoch's last batch may be smaller."""

    epoch: int
    """The epoch, from 0."""

    rows: int
    """Number of rows."""

    batch_size: int
    """Rows per batch."""

    columns: dict[str, Values]
    """Column -> [rows, ...]."""

    def batches(self) -> Iterator[dict[str, Values]]:
        """Yield the batches of the block; they are views of its arrays."""
        for start in range(0, self.rows, self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield {name: values[rows] for name, values in self.columns.items()}


class TableStream:
    """One split of a dataset, read window by window."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        columns: Sequence[Column],
        window_bytes: int = WINDOW_BYTES,
        threads: int | None = None,
    ) -> None:
        """Check every shard's hash and read its footer.

        Args:
            dataset: The ingested dataset.
            split: Name of the split.
            columns: The columns to read; no images.
            window_bytes: Memory of a window; a window has at least `MIN_WINDOW_GROUPS` row groups, even if
                they need more. The order depends on this value, so a resumed run must use the same value.
            threads: Number of threads that decode and permute; None: the number of cores.

        Raises:
            DataError: a shard is missing or truncated, or differs from its manifest; the error names it.
        """
        self.columns = tuple(columns)
        self._threads = threads or THREADS
        self._shards = TableShards(dataset, split, columns=columns)
        self.rows = int(self._shards.group_rows.sum())
        group_bytes = self._shards.row_bytes() * int(self._shards.group_rows.max())
        self.window_groups = max(MIN_WINDOW_GROUPS, window_bytes // group_bytes)

    def shuffled(
        self,
        *,
        batch_size: int,
        seed: int,
        epochs: range,
        first_step: int = 0,
    ) -> Iterator[Block]:
        """Return shuffled rows, epoch after epoch.

        Args:
            batch_size: Rows per batch; an epoch's last batch may be smaller.
            seed: Seed of the order.
            epochs: The epochs to read.
            first_step: Number of the first batch in the first epoch; windows before it are not read.

        Returns:
            An iterator that decodes the next block in advance; close or delete it to end its threads.

        Raises:
            DataError: raised by the iterator: a shard was changed, truncated or damaged; the error names it.
        """
        windows = (
            window
            for epoch in epochs
            for window in _from_row(
                self._windows(epoch, seed),
                first_step * batch_size if epoch == epochs.start else 0,
            )
        )
        return self._blocks(windows, batch_size)

    def rows_at(self, epoch: int, first: int, last: int, *, seed: int) -> NDArray[np.int64]:
        """Return the row numbers that `shuffled` yields at positions [first, last) of an epoch."""
        windows = self._windows(epoch, seed)
        return rows_at(windows, self._shards.group_rows, first=first, last=last)

    def in_order(self, *, batch_size: int) -> Iterator[Block]:
        """Return the rows of one pass in stored order; see `shuffled`."""
        windows = stored_windows(self._shards.group_rows, window_groups=self.window_groups)
        return self._blocks(_from_row(windows, 0), batch_size)

    def stages(self, *, batch_size: int, seed: int, made: list[Block]) -> Iterator[StageWork]:
        """Return the work to make the first window of epoch 0, stage by stage, for `measure_stages`.

        Args:
            batch_size: Rows per batch.
            seed: Seed of the order.
            made: List to which the finished block is written.
        """
        window = self._windows(0, seed)[0]
        decoded: dict[int, pa.Table] = {}
        with ThreadPoolExecutor(self._threads, thread_name_prefix="stoker-table") as pool:
            yield StageWork(
                name="read",
                samples=window.rows,
                parallelism=self._threads,
                run=lambda: self._shards.read(window.groups, decoded.__setitem__, pool=pool),
            )
            part = _WindowPart(window=window, skipped=0, is_last=True)

            def take_decoded(_: object, take: Callable[[int, pa.Table], None]) -> None:
                list(pool.map(take, decoded.keys(), decoded.values()))

            def shuffle() -> None:
                maker = _BlockMaker(self._shards, take_decoded, batch_size=batch_size, pool=pool)
                made[:] = [maker.block(part)]

            yield StageWork(
                name="shuffle", samples=window.rows, parallelism=self._threads, run=shuffle
            )

    def _windows(self, epoch: int, seed: int) -> list[Window]:
        rows = self._shards.group_rows
        return shuffled_windows(rows, window_groups=self.window_groups, seed=seed, epoch=epoch)

    def _blocks(self, windows: Iterator[_WindowPart], batch_size: int) -> Iterator[Block]:
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="stoker-table")
        ahead = ThreadPoolExecutor(1, thread_name_prefix="stoker-window")
        read = partial(self._shards.read, pool=pool)
        maker = _BlockMaker(self._shards, read, batch_size=batch_size, pool=pool)
        try:
            # One window at a time: rows that are left from a window are the first rows of the next.
            pending = [ahead.submit(maker.block, window) for window in islice(windows, 1)]
            while pending:
                block = pending.pop().result()
                pending = [ahead.submit(maker.block, window) for window in islice(windows, 1)]
                if block.rows:
                    yield block
                del block
        finally:
            # Close `pool` first, so that a window in progress fails at its next step; then wait for both.
            pool.shutdown(wait=False, cancel_futures=True)
            ahead.shutdown(cancel_futures=True)
            pool.shutdown()


@dataclass(frozen=True, kw_only=True, slots=True)
class _WindowPart:
    """A window of which the first rows may be skipped."""

    window: Window
    skipped: int
    """Number of rows that are skipped at the start of the window, in its order."""

    is_last: bool
    """Whether the window is the last of its epoch."""


def _from_row(windows: list[Window], first_row: int) -> Iterator[_WindowPart]:
    for number, window in enumerate(windows):
        skipped = min(first_row, window.rows)
        first_row -= skipped
        if skipped < window.rows:
            yield _WindowPart(window=window, skipped=skipped, is_last=number == len(windows) - 1)


Read = Callable[[NDArray[np.int64], Callable[[int, pa.Table], None]], object]
"""Function that reads row groups and calls a function with each; see `TableShards.read`."""


class _BlockMaker:
    """Converts windows, one after the other, to blocks of full batches."""

    def __init__(self, shards: TableShards, read: Read, *, batch_size: int, pool: Executor) -> None:
        self._shards, self._read = shards, read
        self._batch_size, self._pool = batch_size, pool
        self._leftover = {column.name: empty_column(column) for column in shards.columns}
        self._leftover_rows = 0

    def block(self, part: _WindowPart) -> Block:
        """Return full batches: first rows that are left from the previous window, then this window's rows."""
        columns, leftover = self._fill(part.window), self._leftover_rows
        rows = leftover + part.window.rows - part.skipped
        full = rows if part.is_last else rows - rows % self._batch_size
        first, last = part.skipped, part.skipped + full
        self._leftover = {name: values[last:] for name, values in columns.items()}
        self._leftover_rows = rows - full
        return Block(
            epoch=part.window.epoch,
            rows=full,
            batch_size=self._batch_size,
            columns={name: values[first:last] for name, values in columns.items()},
        )

    def _fill(self, window: Window) -> dict[str, Values]:
        filling = {
            column.name: window_column(column, self._leftover[column.name], rows=window.rows)
            for column in self._shards.columns
        }
        destinations = self._destinations(window)
        starts = [0, *np.cumsum(self._shards.group_rows[window.groups]).tolist()]

        def take(position: int, table: pa.Table) -> None:
            start, end = starts[position], starts[position + 1]
            for name, column in filling.items():
                column.put(
                    destinations[start:end], table.column(name), first=self._leftover_rows + start
                )

        self._read(window.groups, take)
        finished = self._pool.map(lambda column: column.finished(), filling.values())
        return dict(zip(filling, finished, strict=True))

    def _destinations(self, window: Window) -> NDArray[np.int64]:
        """Return the place in the block of each row of the window, in stored order: [rows]."""
        destinations = np.empty(window.rows, np.int64)

        def fill(first: int) -> None:
            last = min(first + ORDER_ROWS, window.rows)
            at = np.arange(self._leftover_rows + first, self._leftover_rows + last)
            destinations[window.order(first, last)] = at

        list(self._pool.map(fill, range(0, window.rows, ORDER_ROWS)))
        return destinations
