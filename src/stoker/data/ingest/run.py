"""The stage `ingest`: read the source, assign its records to splits, write shards, and the manifest last."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, DataError, Plain
from stoker.core.files import full_disk_is_named, remove, sweep
from stoker.core.multi_output import by_output
from stoker.data.columns import Column
from stoker.data.dataset import (
    MANIFEST,
    SAMPLE,
    Dataset,
    ImageShape,
    load_dataset,
    verify_shard,
    write_manifest,
)
from stoker.data.ingest.assign import SplitRule
from stoker.data.ingest.duplicates import Dealer
from stoker.data.ingest.faults import Faults
from stoker.data.ingest.image_store import (
    ChosenStore,
    choose_store,
    free_space,
    image_facts,
    stored_table,
)
from stoker.data.ingest.journal import JOURNAL, Checkpoint, Journal, Mark, identity_of
from stoker.data.ingest.shards import ShardOutput, SplitWriter, write_table
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.listing import Listing, no_record
from stoker.data.sources.images.folder import PATH
from stoker.data.sources.records import WORKERS, Block, Progress, Scan, silent
from stoker.data.sources.source import (
    Source,
    list_source,
    listing_warnings,
    open_source,
    workers_for,
)
from stoker.data.sources.workers import Workers

_LOG = logging.getLogger(__name__)

TRAIN = "train"
"""The split whose images may be stored smaller or as raw pixels."""


def any_columns(columns: Sequence[Column]) -> None:
    """Do nothing: the default for `Consumer.check_columns`, which accepts every source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumer:
    """Requirements of the training that follows."""

    epochs: int = 1
    """Number of times that training reads each image, for `data.images.store: auto`."""

    check_columns: Callable[[Sequence[Column]], None] = any_columns
    """Called with the source's columns before anything is written; raises an error if they do not fit."""


def ingest(
    config: IngestConfig,
    out_dir: Path,
    *,
    label: str | Mapping[str, str] | None = None,
    consumer: Consumer = Consumer(),
    listing: Listing | None = None,
    progress: Progress = silent,
) -> Dataset:
    """Convert a source to shards with checksums; records are assigned to splits by their content.

    If an earlier ingest of the same source into the same folder was killed, or failed on a full disk, this
    ingest continues after the last complete shard. If the earlier ingest was complete, nothing is done.

    Args:
        config: The source, and how to split it.
        out_dir: The dataset's folder, created if necessary; a dataset of a different source in it is
            replaced.
        label: The column that every record must have, or such a column for each output; ignored if the
            data does not have it.
        consumer: Requirements of the training that follows.
        listing: The files that `fingerprint_of` hashed, so that the same content is read; None: the
            source is listed now.
        progress: Called with the number of records done and the total number, which is None until it is
            known.

    Returns:
        The dataset, with its manifest written. The records of a split are in the source's order.

    Raises:
        DataError: a file cannot be read, more than `data.max_bad_rows` records are bad, a split is empty,
            or the source changes while it is read; all shards are deleted.
        ConfigError: the configuration does not fit the data.
        UserError: the disk is full, and the error names the needed and the free space; or an error of
            `consumer`.
    """
    labels = () if label is None else tuple(by_output(label).values())
    listing = listing or list_source(config)
    out_dir.mkdir(parents=True, exist_ok=True)
    for folder in (out_dir, *(out_dir / name for name in config.splits)):
        sweep(folder, "*")
    identity = identity_of(config, listing, label=label)
    try:
        with workers_for(config, listing) as workers:
            return _Ingest(
                config=config,
                out_dir=out_dir,
                source=open_source(config, labels=labels, listing=listing, workers=workers),
                journal=Journal(out_dir, identity=identity, splits=sorted(config.splits)),
                consumer=consumer,
                progress=progress,
                workers=workers,
            ).run()
    except (DataError, ConfigError):
        # The next ingest must not continue: it could not fix a bad source or configuration.
        for name in (*config.splits, SAMPLE, MANIFEST, JOURNAL):
            remove(out_dir / name)
        raise


@dataclass(kw_only=True)
class _Ingest:
    """The conversion of one source to shards."""

    config: IngestConfig
    out_dir: Path
    source: Source
    journal: Journal
    consumer: Consumer
    progress: Progress
    workers: Workers

    share_done: float = 0.0
    """Share of the records that are assigned to splits."""

    dropped: int = 0
    """Number of copies that were left out."""

    warnings: tuple[str, ...] = ()
    """Warnings that were shown to the user, and are written to the manifest."""

    rule: SplitRule = field(init=False)
    faults: Faults = field(init=False)

    def __post_init__(self) -> None:
        self.rule = SplitRule(
            self.config.splits, seed=self.config.seed, split_by=self.config.split_by
        )
        self.faults = Faults(self.config)

    def run(self) -> Dataset:
        """Continue an earlier ingest, or start from the beginning; return the dataset."""
        with full_disk_is_named(self.out_dir, need_bytes=self._need_bytes):
            state = self.journal.load()
            if state is not None:
                self.consumer.check_columns(state.scan.columns)
            if state is None or not self._is_whole(state):
                state = self._start()
            elif (self.out_dir / MANIFEST).is_file():
                return self._with_whole_sample(load_dataset(self.out_dir))
            else:
                self._warn(state.scan)
            with ThreadPoolExecutor(WORKERS) as pool:
                output = ShardOutput(
                    root=self.out_dir,
                    columns=state.scan.columns,
                    shard_rows=self.config.shard_rows,
                    pool=pool,
                    finished=self.journal.finished,
                    workers=self.workers,
                )
                writers = {name: SplitWriter(name, output) for name in self.rule.names}
                try:
                    for name, writer in writers.items():
                        writer.resume(state.shards[name], rows=state.mark.rows[name])
                    self._write_shards(state, writers, pool)
                    return self._publish(state, writers)
                except BaseException:
                    for writer in writers.values():
                        writer.abandon()
                    raise

    def _need_bytes(self) -> int:
        """Estimate the number of bytes still to write; before the first shard it is the source's size."""
        written = self.journal.size_bytes
        if not written or not self.share_done:
            return sum(file.size_bytes for file in self.source.listing.files)
        return round(written / self.share_done * (1 - self.share_done))

    def _is_whole(self, state: Checkpoint) -> bool:
        try:
            for shard in itertools.chain(*state.shards.values()):
                verify_shard(self.out_dir, shard)
        except DataError as damage:
            _LOG.warning("ingest starts from the beginning: %s", damage)
            return False
        return True

    def _start(self) -> Checkpoint:
        for name in (*self.rule.names, SAMPLE, MANIFEST):
            remove(self.out_dir / name)
        scan = self.source.scan(self.progress)
        self._warn(scan)
        names = [column.name for column in scan.columns]
        if self.config.split_by is not None and self.config.split_by not in names:
            raise ConfigError(
                "data.split_by must name a column of the data",
                got=self.config.split_by,
                fix=nearest(self.config.split_by, names),
            )
        self.consumer.check_columns(scan.columns)
        return self.journal.start(scan, self._choose_store(scan))

    def _warn(self, scan: Scan) -> None:
        """Show the warnings, and keep them for the manifest."""
        assumed = (each.text for each in scan.assumptions)
        self.warnings = (*listing_warnings(self.source.listing, self.config), *assumed)
        for line in self.warnings:
            _LOG.warning("%s", line)

    def _choose_store(self, scan: Scan) -> ChosenStore | None:
        """Choose the store of training images by the sizes in the first block; None for tables.

        The choice is kept in the journal: when ingest resumes, the disk may have less free space.
        """
        first = None if scan.image is None else next(self.source.blocks(scan), None)
        images = round(scan.rows * self.config.splits[TRAIN])
        facts = first and image_facts(first.table, scan.columns, images=images)
        if scan.image is None or not facts:
            return None
        chosen = choose_store(
            self.config.images,
            facts,
            shorter=min(scan.image[:2]),
            epochs=self.consumer.epochs,
            space=free_space(self.out_dir),
        )
        _LOG.info("training images are stored as %s", chosen.why)
        return chosen

    def _write_shards(
        self, state: Checkpoint, writers: dict[str, SplitWriter], pool: ThreadPoolExecutor
    ) -> None:
        """Read the remaining blocks and write their records to shards; then check the whole dataset."""
        scan, done = state.scan, state.mark.done
        self.journal.resume(state)
        self.faults.resume(state.mark.faults, bad=state.mark.bad)
        for number, (block, split) in enumerate(self._dealt(scan), 1):
            if number <= state.mark.blocks:
                # These records are already in the shards; they are read again only to count copies.
                continue
            self.faults.add(block)
            if not self.faults.too_many:
                for name, part in self._by_split(block.table, split, state, pool):
                    writers[name].add(part)
            done += block.table.num_rows + block.bad
            self.share_done = done / max(done, scan.rows, 1)
            self.progress(done, max(done, scan.rows))
            self.journal.dealt(
                Mark(
                    blocks=number,
                    done=done,
                    rows={name: writer.rows for name, writer in writers.items()},
                    bad=self.faults.count,
                    faults=tuple(self.faults.listed),
                )
            )
        self.source.listing.check_unchanged()
        self.faults.check()
        _check_splits(self.config, scan, writers, dropped=self.dropped)

    def _dealt(self, scan: Scan) -> Iterator[tuple[Block, NDArray[np.intp]]]:
        """Yield each block of the source with the index of each record's split."""
        ignored = (PATH,) if self.source.listing.format == "images" else ()
        dealer = Dealer(self.config, self.rule, scan.columns, folder=self.out_dir, ignored=ignored)
        with contextlib.closing(dealer):
            for block in self.source.blocks(scan, self.rule.content):
                yield block, dealer.deal(block)
            self.dropped = dealer.dropped

    def _by_split(
        self, table: pa.Table, split: NDArray[np.intp], state: Checkpoint, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[str, pa.Table]]:
        """Yield each split's name and its records of the table, in their stored form."""
        for index, name in enumerate(self.rule.names):
            rows = np.flatnonzero(split == index)
            if not len(rows):
                continue
            part = table.take(pa.array(rows))
            if name == TRAIN and state.store is not None and state.scan.image is not None:
                channels = state.scan.image[2]
                part = stored_table(
                    part, state.scan.columns, state.store, channels=channels, pool=pool
                )
            yield name, part

    def _publish(self, state: Checkpoint, writers: dict[str, SplitWriter]) -> Dataset:
        image = None
        if state.scan.image is not None:
            height, width, channels = state.scan.image
            fit, crop = self.config.images.fit, self.config.images.crop
            image = ImageShape(height=height, width=width, channels=channels, fit=fit, crop=crop)
        dataset = Dataset(
            root=self.out_dir,
            columns=state.scan.columns,
            splits={name: writers[name].close() for name in self.config.splits},
            column_hashes={name: writers[name].hashes() for name in self.config.splits},
            image=image,
            image_store=None if state.store is None else state.store.why,
            bad_rows=self.faults.bad_rows(),
            copies_dropped=self.dropped,
            warnings=self.warnings,
        )
        return _with_sample(dataset)

    def _with_whole_sample(self, dataset: Dataset) -> Dataset:
        """Write the sample of a finished dataset again if it is missing or damaged."""
        try:
            if dataset.sample is not None:
                verify_shard(self.out_dir, dataset.sample)
        except DataError as damage:
            _LOG.warning("the sample is written again: %s", damage)
            return _with_sample(replace(dataset, sample=None))
        return dataset


def _with_sample(dataset: Dataset) -> Dataset:
    """Write the sample (a file with the first records), and then the manifest."""
    names = [column.name for column in dataset.columns]
    table = pa.Table.from_batches([dataset.first_rows(names)])
    sample = write_table(dataset.root, SAMPLE, table, columns=dataset.columns)
    dataset = replace(dataset, sample=sample)
    write_manifest(dataset)
    return dataset


def _check_splits(
    config: IngestConfig, scan: Scan, writers: Mapping[str, SplitWriter], *, dropped: int
) -> None:
    total = sum(writer.rows for writer in writers.values())
    if not total:
        raise no_record(config.source)
    duplicates = config.duplicates_for(column.dtype for column in scan.columns)
    how, spread = f" without {dropped:,} copies" if dropped else "", ""
    if config.split_by:
        how += f" with equal {config.split_by!r} kept in one split"
    elif duplicates == "together":
        how += " with copies kept in one split"
    if dropped or (duplicates == "together" and not config.split_by):
        spread = " or set data.duplicates: spread,"
    for name, share in config.splits.items():
        if not writers[name].rows:
            raise DataError(
                f"split {name!r} must hold at least one record",
                got=Plain(f"no record, for a share of {share:g} of {total:,} records{how}"),
                fix=f"Add records, or raise data.splits.{name},{spread} or set a different data.seed.",
            )
