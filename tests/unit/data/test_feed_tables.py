from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.data.columns import VARYING, Column, to_numpy
from stoker.data.dataset import Dataset
from stoker.data.feed.tables.columns import Text
from stoker.data.feed.tables.row_groups import shuffled_windows
from stoker.data.feed.tables.rows import table_batches
from stoker.data.feed.tables.windows import Block, TableStream

CutTable = Callable[[pa.Table, Sequence[Column], Sequence[Sequence[int]]], Dataset]

COLUMNS = (
    Column(name="row", dtype="int64"),
    Column(name="small number", dtype="float32"),
    Column(name="wide", dtype="float64"),
    Column(name="word", dtype="string"),
    Column(name="own", dtype="string"),
    Column(name="numbers", dtype="float32", length=3),
    Column(name="words", dtype="string", length=2),
)


def rows_of_every_kind(rows: int, *, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    gaps = rng.random(rows) < 0.2
    words = ["", "a", "ä\x00b", "x" * 40, *(f"word {n}" for n in range(30))]
    flat = rng.normal(size=rows * 3).astype(np.float32)
    return pa.table(
        [
            pa.array(np.arange(rows)),
            pa.array(rng.normal(size=rows).astype(np.float32), mask=gaps),
            pa.array(rng.normal(size=rows), mask=~gaps),
            pa.array(rng.choice(words, rows).tolist(), pa.string()),
            pa.array([f"own {n}" for n in range(rows)], pa.string()),
            pa.FixedSizeListArray.from_arrays(pa.array(flat, mask=np.repeat(gaps, 3)), 3),
            pa.FixedSizeListArray.from_arrays(
                pa.array(rng.choice(words, 2 * rows).tolist(), pa.string()), 2
            ),
        ],
        schema=pa.schema([(column.name, column.arrow_type) for column in COLUMNS]),
    )


def plain(values: Any) -> Any:
    """Numbers as they are, strings as Python's."""
    if isinstance(values, Text):
        return values.dictionary.to_numpy(zero_copy_only=False)[values.codes]
    return values


def batches_of(blocks: Iterator[Block]) -> list[dict[str, Any]]:
    return [
        {name: plain(values) for name, values in batch.items()}
        for block in blocks
        for batch in block.batches()
    ]


def expected(table: pa.Table, order: Any) -> dict[str, Any]:
    found = {c.name: to_numpy(c, table.column(c.name))[order] for c in COLUMNS}
    return {
        name: np.vectorize(bytes.decode, otypes=[object])(values)
        if values.dtype == object
        else values
        for name, values in found.items()
    }


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype == values.dtype


@given(
    cuts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=5),
    batch_size=st.integers(1, 70),
    start=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_are_the_stored_rows_in_the_order_of_the_windows(
    cut_table: CutTable, cuts: list[list[int]], batch_size: int, start: float
) -> None:
    group_rows = np.array([rows for cut in cuts for rows in cut])
    table = rows_of_every_kind(int(group_rows.sum()))
    stream = TableStream(cut_table(table, COLUMNS, cuts), "train", columns=COLUMNS, window_bytes=1)
    starts = np.cumsum([0, *group_rows])
    windows = shuffled_windows(group_rows, window_groups=1, seed=5, epoch=1)
    order = np.concatenate(
        [
            np.concatenate([np.arange(starts[g], starts[g + 1]) for g in window.groups])[
                window.order(0, window.rows)
            ]
            for window in windows
        ]
    )
    first_step = int(start * len(order)) // batch_size

    found = batches_of(
        stream.shuffled(batch_size=batch_size, seed=5, epochs=range(1, 2), first_step=first_step)
    )

    cut = [order[at : at + batch_size] for at in range(0, len(order), batch_size)][first_step:]
    assert len(found) == len(cut)
    for batch, rows in zip(found, cut, strict=True):
        assert_equal(batch, expected(table, rows))


def test_a_run_that_goes_on_reads_what_the_first_would_have_read(cut_table: CutTable) -> None:
    dataset = cut_table(rows_of_every_kind(640), COLUMNS, [[10] * 40, [8] * 30])
    stream = TableStream(dataset, "train", columns=COLUMNS, window_bytes=1)
    whole = batches_of(stream.shuffled(batch_size=9, seed=2, epochs=range(3)))
    per_epoch = -(-640 // 9)
    assert len(whole) == 3 * per_epoch

    for step in (0, 1, 31, 32, 33, per_epoch - 1, per_epoch, 2 * per_epoch + 40):
        epoch, within = divmod(step, per_epoch)
        again = TableStream(dataset, "train", columns=COLUMNS, window_bytes=1)
        rest = batches_of(
            again.shuffled(batch_size=9, seed=2, epochs=range(epoch, 3), first_step=within)
        )
        assert len(rest) == len(whole) - step
        for found, wanted in zip(rest, whole[step:], strict=True):
            assert_equal(found, wanted)


def test_any_part_of_the_order_is_known_without_reading(cut_table: CutTable) -> None:
    dataset = cut_table(rows_of_every_kind(640), COLUMNS, [[10] * 40, [8] * 30])
    stream = TableStream(dataset, "train", columns=COLUMNS, window_bytes=1)
    read = [
        row
        for batch in batches_of(stream.shuffled(batch_size=9, seed=2, epochs=range(4, 5)))
        for row in batch["row"]
    ]
    for first, last in [(0, 640), (0, 1), (150, 170), (300, 640), (639, 640), (5, 5)]:
        assert stream.rows_at(4, first, last, seed=2).tolist() == read[first:last]


def test_rows_in_order_are_those_of_the_split(cut_table: CutTable) -> None:
    table = rows_of_every_kind(500)
    stream = TableStream(cut_table(table, COLUMNS, [[13] * 30, [110]]), "train", columns=COLUMNS)

    found = batches_of(stream.in_order(batch_size=64))

    assert [len(batch["row"]) for batch in found] == [64] * 7 + [52]
    for number, batch in enumerate(found):
        rows = np.arange(500)[number * 64 : (number + 1) * 64]
        assert_equal(batch, expected(table, rows))


def test_a_dictionary_holds_only_the_strings_of_its_window(cut_table: CutTable) -> None:
    columns = [Column(name="own", dtype="string")]
    table = rows_of_every_kind(4000).select(["own"])
    stream = TableStream(
        cut_table(table, columns, [[20] * 200]), "train", columns=columns, window_bytes=1
    )
    for block in stream.shuffled(batch_size=7, seed=0, epochs=range(2)):
        text = block.columns["own"]
        assert isinstance(text, Text)
        # The rows that are left for the next block are fewer than a batch.
        assert len(text.dictionary) < block.rows + 14


def test_tensors_are_the_batches_of_the_stream(cut_table: CutTable) -> None:
    dataset = cut_table(rows_of_every_kind(700), COLUMNS, [[10] * 40, [6] * 50])
    stream = TableStream(dataset, "train", columns=COLUMNS, window_bytes=1)

    def blocks() -> Iterator[Block]:
        return stream.shuffled(batch_size=32, seed=1, epochs=range(2))

    wanted = batches_of(blocks())
    with table_batches(blocks, columns=COLUMNS) as tensors:
        found = [list(tensors), list(tensors.prefetch(3))]

    for batches in found:
        assert len(batches) == len(wanted)
        for batch, values in zip(batches, wanted, strict=True):
            for column in COLUMNS:
                tensor, array = batch[column.name], values[column.name]
                assert tensor.dtype == tf.as_dtype(column.tensor_dtype)
                if column.dtype == "string":
                    array = np.vectorize(str.encode, otypes=[object])(array)
                np.testing.assert_array_equal(tensor.numpy(), array)
    spec: Any = tensors.element_spec
    for column in COLUMNS:
        assert spec[column.name].shape.as_list() == [None, *column.shape]


LISTS = (
    Column(name="row", dtype="int64"),
    Column(name="whole", dtype="int64", length=VARYING),
    Column(name="word", dtype="string"),
    Column(name="ratios", dtype="float32", length=VARYING),
    Column(name="tags", dtype="string", length=VARYING),
)


@given(
    cuts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=5),
    batch_size=st.integers(1, 70),
    most=st.integers(0, 4),
)
@settings(
    max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_lists_of_varying_length_are_padded_to_the_longest_of_their_batch(
    cut_table: CutTable, cuts: list[list[int]], batch_size: int, most: int
) -> None:
    rng = np.random.default_rng(most)
    rows = sum(map(sum, cuts))
    sizes = rng.integers(0, most + 1, (3, rows)).tolist()
    table = pa.table(
        [
            pa.array(np.arange(rows)),
            pa.array([list(range(size)) for size in sizes[0]], LISTS[1].arrow_type),
            pa.array([f"word {row % 3}" for row in range(rows)]),
            pa.array([[None, 1.5, 2.5, 3.5][:size] for size in sizes[1]], LISTS[3].arrow_type),
            pa.array([["ä\0b", "", "c", "d"][:size] for size in sizes[2]], LISTS[4].arrow_type),
        ],
        schema=pa.schema([(column.name, column.arrow_type) for column in LISTS]),
    )
    stream = TableStream(cut_table(table, LISTS, cuts), "train", columns=LISTS, window_bytes=1)

    def check(blocks: Callable[[], Iterator[Block]]) -> list[int]:
        seen: list[int] = []
        with table_batches(blocks, columns=LISTS) as tensors:
            for batch in tensors:
                order = batch["row"].numpy()
                for column in LISTS:
                    found, stored = batch[column.name].numpy(), table.column(column.name)
                    np.testing.assert_array_equal(found, to_numpy(column, stored.take(order)))
                seen += order.tolist()
        return seen

    shuffled = check(lambda: stream.shuffled(batch_size=batch_size, seed=3, epochs=range(2)))
    assert sorted(shuffled) == sorted([*range(rows)] * 2)
    assert check(lambda: stream.in_order(batch_size=batch_size)) == [*range(rows)]


def table_threads() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("stoker-table", "stoker-window"))
    ]


@pytest.fixture
def stream(cut_table: CutTable) -> TableStream:
    dataset = cut_table(rows_of_every_kind(2000), COLUMNS, [[10] * 200])
    return TableStream(dataset, "train", columns=COLUMNS, window_bytes=1)


def test_an_iterator_that_is_dropped_ends_its_threads(stream: TableStream) -> None:
    blocks = stream.shuffled(batch_size=10, seed=0, epochs=range(100))
    next(blocks)
    assert table_threads()

    del blocks

    assert not table_threads()


def test_a_context_that_is_left_ends_its_threads(stream: TableStream) -> None:
    with table_batches(
        lambda: stream.shuffled(batch_size=10, seed=0, epochs=range(100)), columns=COLUMNS
    ) as tensors:
        iterator = iter(tensors.prefetch(4))
        next(iterator)
        assert table_threads()

    assert not table_threads()


def test_a_process_ends_while_windows_are_being_read(stream: TableStream) -> None:
    # The process is left in the middle of an epoch.
    script = f"""
from pathlib import Path
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard
from stoker.core.files import sha256_file
from stoker.data.feed.tables.windows import TableStream
path = next(Path({str(stream._shards._shards[0].path.parent)!r}).iterdir())
shard = Shard(
    file=path.name, rows=2000, size_bytes=path.stat().st_size, sha256=sha256_file(path)
)
columns = (Column(name="word", dtype="string"),)
dataset = Dataset(root=path.parent, columns=columns, splits={{"train": (shard,)}}, column_hashes={{}})
stream = TableStream(dataset, "train", columns=columns, window_bytes=1)
blocks = stream.shuffled(batch_size=10, seed=0, epochs=range(10**6))
print(next(blocks).rows)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=300, capture_output=True, text=True
    )

    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr
    assert int(done.stdout) > 0
