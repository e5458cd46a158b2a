"""Equal rows: which split each copy goes to, counted exactly, in memory and on disk."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import ConfigError, DataError
from stoker.data.dataset import Dataset, load_dataset
from stoker.data.ingest import ImagesConfig, IngestConfig, ingest
from stoker.data.ingest import duplicates as copies_module
from stoker.data.ingest.assign import SplitRule
from stoker.data.ingest.duplicates import CopyCounter
from stoker.data.ingest.journal import JOURNAL
from stoker.data.sources.formats import csv_files
from stoker.data.sources.images import folder as image_folder

Rows = list[tuple[str, int]]

MODES: tuple[Literal["spread", "together", "drop"], ...] = ("spread", "together", "drop")


def write_rows(path: Path, rows: Iterable[tuple[object, ...]], names: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = zip(*rows, strict=True)
    table = pa.table({name: list(values) for name, values in zip(names, columns, strict=True)})
    pyarrow.csv.write_csv(table, path)
    return path


def clicks(count: int = 20_000) -> Rows:
    """24 kinds of rows; each kind has a probability of its own that the label is 1."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 24, count)
    labels = rng.random(count) < rng.uniform(0.1, 0.9, 24)[kinds]
    return [(f"kind {kind}", int(label)) for kind, label in zip(kinds, labels, strict=True)]


def dealt(dataset: Dataset) -> dict[str, Counter[tuple[Any, ...]]]:
    """Split -> its rows, however they are ordered."""
    return {
        split: Counter(tuple(row.values()) for row in dataset.table(split).to_pylist())
        for split in dataset.splits
    }


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != JOURNAL
    }


def auc_of_rates(found: dict[str, Counter[tuple[Any, ...]]]) -> float:
    """AUC on the eval split, where the training split's label rate of each kind is the score."""
    train, held_out = found["train"], found["eval"]
    kinds = {kind for kind, _ in [*train, *held_out]}
    seen = {kind: train[kind, 0] + train[kind, 1] for kind in kinds}
    score = {kind: train[kind, 1] / seen[kind] if seen[kind] else 0.5 for kind in kinds}
    pairs = [
        (one * none, score[kind], score[other])
        for (kind, label), one in held_out.items()
        if label == 1
        for (other, opposite), none in held_out.items()
        if opposite == 0
    ]
    won = sum(weight * ((high > low) + 0.5 * (high == low)) for weight, high, low in pairs)
    return won / sum(weight for weight, *_ in pairs)


def test_the_label_of_repeated_rows_does_not_decide_their_split(tmp_path: Path) -> None:
    rows = clicks()
    found = {}
    for mode in (None, "together"):
        source = write_rows(tmp_path / "clicks.csv", rows, ["kind", "click"])
        config = IngestConfig(source=str(source), duplicates=mode)
        found[mode] = dealt(ingest(config, tmp_path / str(mode)))
    numbered = write_rows(
        tmp_path / "numbered.csv", [(*row, place) for place, row in enumerate(rows)], "abc"
    )
    apart = ingest(IngestConfig(source=str(numbered)), tmp_path / "numbered")
    right = {split: Counter(row[:2] for row in rows) for split, rows in dealt(apart).items()}

    assert auc_of_rates(found[None]) == pytest.approx(auc_of_rates(right), abs=0.02)
    assert auc_of_rates(found["together"]) < 0.5 < 0.65 < auc_of_rates(right)
    assert found[None]["eval"].total() == pytest.approx(4000, abs=250)
    assert found[None]["train"] + found[None]["eval"] == Counter(rows)


def test_300_rows_of_6_kinds_give_no_empty_split(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.csv", [(place % 6, "x") for place in range(300)], "ab")
    empty = []
    for seed in range(8):
        dataset = ingest(IngestConfig(source=str(source), seed=seed), tmp_path / "out")
        assert dataset.rows("eval") == pytest.approx(60, abs=35)
        for mode in ("together", "drop"):
            try:
                ingest(
                    IngestConfig(source=str(source), seed=seed, duplicates=mode), tmp_path / mode
                )
            except DataError as error:
                empty.append(error.line())

    assert any("300 records with copies kept in one split" in line for line in empty)
    assert any("6 records without 294 copies" in line for line in empty)
    assert all("or set data.duplicates: spread, or" in line for line in empty)


@pytest.mark.parametrize("mode", MODES)
def test_rows_without_copies_keep_their_splits_and_shards_to_the_byte(
    mode: Literal["spread", "together", "drop"], tmp_path: Path
) -> None:
    rows = [(place, f"name {place % 7}") for place in range(2000)]
    source = write_rows(tmp_path / "rows.csv", rows, ["id", "name"])

    dataset = ingest(IngestConfig(source=str(source), duplicates=mode), tmp_path / mode)

    # Written by the commit before there was `data.duplicates`.
    assert dataset.fingerprint.startswith("d86b8ec4f3aa7e97")
    assert dataset.copies_dropped == 0


def test_together_deals_repeated_rows_out_as_before_there_was_a_choice(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.csv", [(place % 50,) for place in range(2000)], ["id"])

    dataset = ingest(IngestConfig(source=str(source), duplicates="together"), tmp_path / "out")

    assert dataset.fingerprint.startswith("54b94a467de5679")


def test_the_split_of_a_known_copy_never_changes() -> None:
    rule = SplitRule({"train": 0.5, "eval": 0.25, "test": 0.25}, seed=3, split_by=None)
    content = np.full(12, 77, np.uint64)

    found = "".join(str(split) for split in rule.deal(content, np.arange(12)))

    assert found == "001210222121"
    assert list(rule.deal(content[:1], np.zeros(1, np.int64))) == list(rule.deal(content[:1]))


rows_of_few_kinds = st.lists(st.integers(0, 5), min_size=80, max_size=120)


@given(rows_of_few_kinds, st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=6, deadline=None)
def test_order_and_names_of_files_change_nothing_in_what_a_split_holds(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[int], random: Any, parts: int
) -> None:
    folder = tmp_path_factory.mktemp("order")
    write_rows(folder / "one" / "all.csv", [(f"kind {kind}", 1) for kind in kinds], "ab")
    random.shuffle(kinds)
    for part in range(parts):
        rows = [(1, f"kind {kind}") for kind in kinds[part::parts]]
        write_rows(folder / "other" / f"{random.random()}-{part}.csv", rows, "ba")

    one, other = (
        dealt(ingest(IngestConfig(source=str(folder / name)), folder / f"{name}-out"))
        for name in ("one", "other")
    )

    for split, found in one.items():
        assert found == Counter({row[::-1]: count for row, count in other[split].items()})


@given(rows_of_few_kinds, rows_of_few_kinds, st.booleans())
@settings(max_examples=6, deadline=None)
def test_appended_rows_move_no_row_to_another_split(
    tmp_path_factory: pytest.TempPathFactory, old: list[int], more: list[int], is_first: bool
) -> None:
    folder = tmp_path_factory.mktemp("append")
    write_rows(folder / "in" / "m.csv", [(kind,) for kind in old], "a")
    before = dealt(ingest(IngestConfig(source=str(folder / "in")), folder / "out"))
    write_rows(folder / "in" / ("a.csv" if is_first else "z.csv"), [(kind,) for kind in more], "a")

    after = dealt(ingest(IngestConfig(source=str(folder / "in")), folder / "out"))

    assert all(before[split] <= after[split] for split in before)
    assert after["train"] + after["eval"] == Counter((kind,) for kind in [*old, *more])


def test_a_gap_elsewhere_moves_no_copy(tmp_path: Path) -> None:
    whole = write_rows(tmp_path / "whole.csv", [(place % 9,) for place in range(900)], "a")
    gapped = tmp_path / "gapped.csv"
    gapped.write_text(whole.read_text() + '""\n')

    one, other = (
        dealt(ingest(IngestConfig(source=str(path)), tmp_path / path.stem))
        for path in (whole, gapped)
    )

    assert [other[split] - one[split] for split in one].count(Counter()) == 1
    assert all(one[split] <= other[split] for split in one)


def test_dropped_copies_are_counted_and_the_first_of_each_stays(tmp_path: Path) -> None:
    rows = [(place % 100, "x") for place in range(1000)]
    source = write_rows(tmp_path / "rows.csv", rows, "ab")
    config = IngestConfig(source=str(source), duplicates="drop")

    dataset = ingest(config, tmp_path / "out")

    found = dealt(dataset)
    assert found["train"] + found["eval"] == Counter(set(rows))
    assert load_dataset(tmp_path / "out").copies_dropped == 900
    assert ingest(config, tmp_path / "out") == dataset


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_key_stays_in_one_split_whatever_becomes_of_copies(
    mode: Literal["spread", "together", "drop"] | None, tmp_path: Path
) -> None:
    rows = [(f"user {place % 50}", place % 3) for place in range(900)]
    source = write_rows(tmp_path / "rows.csv", rows, ["user", "item"])
    config = IngestConfig(source=str(source), split_by="user", duplicates=mode)

    found = dealt(ingest(config, tmp_path / "out"))

    users = [{user for user, _ in found[split]} for split in ("train", "eval")]
    assert users[0].isdisjoint(users[1])
    assert found["train"] + found["eval"] == Counter(set(rows) if mode == "drop" else rows)


def write_images(root: Path, kinds: int = 30) -> Path:
    """Three files of each picture: two of one class, one of another."""
    rng = np.random.default_rng(0)
    for kind in range(kinds):
        data = cv2.imencode(".png", rng.integers(0, 256, (24, 24, 3), np.uint8))[1].tobytes()
        for name in (f"cat/a{kind}.png", f"cat/b{kind}.png", f"dog/c{kind}.png"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
    return root


@pytest.mark.parametrize("mode", [None, *MODES])
def test_copies_of_images_stay_together_unless_they_are_spread(
    mode: Literal["spread", "together", "drop"] | None, tmp_path: Path
) -> None:
    source = write_images(tmp_path / "in")

    dataset = ingest(IngestConfig(source=str(source), duplicates=mode), tmp_path / "out")

    found = dealt(dataset)
    images = [{image for image, *_ in found[split]} for split in ("train", "eval")]
    assert images[0].isdisjoint(images[1]) == (mode != "spread")
    # The same picture in another class is not a copy: Stoker cannot know which of the two is right.
    classes = Counter(label for rows in found.values() for _, label, _ in rows)
    assert classes == ({"cat": 30, "dog": 30} if mode == "drop" else {"cat": 60, "dog": 30})
    assert dataset.copies_dropped == (30 if mode == "drop" else 0)


class Killed(BaseException):
    """Ends an ingest from inside, at an exact block."""


def killed_at(config: IngestConfig, out: Path, blocks: int) -> None:
    left = iter(range(blocks))

    def kill(done: int, total: int | None) -> None:
        if total is not None and next(left, None) is None:
            raise Killed

    with pytest.raises(Killed):
        ingest(config, out, progress=kill)


@pytest.mark.parametrize(("mode", "spilled"), [("spread", False), ("spread", True), ("drop", True)])
def test_a_killed_ingest_goes_on_with_the_copies_that_it_had_counted(
    mode: Literal["spread", "drop"],
    spilled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 600)
    if spilled:
        monkeypatch.setattr(copies_module, "MEMORY_BYTES", 600)
    rows = [(place * place % 1301, "$1.50") for place in range(2000)]
    source = write_rows(tmp_path / "rows.csv", rows, "ab")
    config = IngestConfig(source=str(source), duplicates=mode, shard_rows=60)
    undisturbed = ingest(config, tmp_path / "undisturbed")

    for blocks in (9, 20):
        killed_at(config, tmp_path / "killed", blocks)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/*.parquet")}
    dataset = ingest(config, tmp_path / "killed")

    assert dataset.copies_dropped == undisturbed.copies_dropped
    [warning] = dataset.warnings
    assert "column 'b' is read as text, but looks like numbers" in warning
    assert files(tmp_path / "killed") == files(tmp_path / "undisturbed")
    assert any(path.stat().st_mtime_ns == mtime_ns for path, mtime_ns in kept.items())


@pytest.mark.parametrize("mode", ["spread", "drop"])
def test_images_stored_smaller_are_counted_by_what_the_source_holds(
    mode: Literal["spread", "drop"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_folder, "BLOCK_FILES", 9)
    images = ImagesConfig(store="resized", store_size=16, size=(16, 16))
    config = IngestConfig(
        source=str(write_images(tmp_path / "in")), duplicates=mode, images=images, shard_rows=4
    )
    ingest(config, tmp_path / "undisturbed")

    killed_at(config, tmp_path / "killed", 5)
    ingest(config, tmp_path / "killed")

    assert files(tmp_path / "killed") == files(tmp_path / "undisturbed")


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=60), max_size=12),
    st.sampled_from([0, 200, 1 << 30]),
    st.integers(1, 30),
)
@settings(max_examples=30, deadline=None)
def test_copies_are_counted_exactly_in_memory_and_on_disk(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[int]], memory: int, chunk: int
) -> None:
    counted: Counter[int] = Counter()
    # Hashes lie anywhere in 64 bits, at both ends too.
    hashes = np.array([place * (2**64 - 1) // 40 for place in range(41)], np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies_module, "MEMORY_BYTES", memory)
        patch.setattr(copies_module, "CHUNK", chunk)
        counter = CopyCounter(tmp_path_factory.getbasetemp())
        for block in blocks:
            found = counter.number(hashes[np.array(block, int)])
            expected = []
            for kind in block:
                expected.append(counted[kind])
                counted[kind] += 1
            assert found.tolist() == expected
        counter.close()


def mapped_files(folder: Path) -> int:
    """Files without a name in a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line and line.endswith("(deleted)") for line in lines)


def test_a_million_distinct_rows_take_16_bytes_each_and_the_disk_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak_of: Callable[..., int]
) -> None:
    rows, block = 1_000_000, 1 << 16

    def count(counter: CopyCounter) -> None:
        rng = np.random.default_rng(0)
        for _ in range(rows // block):
            assert not counter.number(rng.integers(0, 2**64, block, np.uint64)).any()

    with contextlib.closing(CopyCounter(tmp_path)) as counter:
        # 32 MiB for what a block takes while it is sorted, and the allocator while a run grows;
        # a set of as many numbers takes 60 bytes each.
        assert peak_of(lambda: count(counter)) < 16 * rows + (32 << 20)
        assert mapped_files(tmp_path) == 0
    monkeypatch.setattr(copies_module, "MEMORY_BYTES", 2 << 20)
    with contextlib.closing(CopyCounter(tmp_path)) as counter:
        count(counter)
        assert mapped_files(tmp_path) >= 2
        assert list(tmp_path.iterdir()) == []
    assert mapped_files(tmp_path) == 0


def test_another_value_of_duplicates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be one of spread, together, drop"):
        IngestConfig(source="x.csv", duplicates="apart")  # type: ignore[arg-type]  # on purpose the wrong type
