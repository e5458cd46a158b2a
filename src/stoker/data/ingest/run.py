"""The stage: read the source, deal the records out, write shards, and the manifest last."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
    Shard,
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
    image_facts,
    room_at,
    stored_table,
)
from stoker.data.ingest.journal import JOURNAL, Journal, Kept, Mark, identity_of
from stoker.data.ingest.shards import SplitWriter, write_table
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.listing import Listing, no_record
from stoker.data.sources.images.folder import PATH
from stoker.data.sources.records import WORKERS, Block, Progress, Scan, Source, silent
from stoker.data.sources.source import list_source, listing_warnings, open_source, workers_for
from stoker.data.sources.workers import Workers

_LOG = logging.getLogger(__name__)

TRAIN = "train"
"""The split whose images may be stored smaller."""

Accept = Callable[[Sequence[Column]], None]
"""Told the columns of a source before anything is written; raises where they will not do."""


def any_columns(columns: Sequence[Column]) -> None:
    """The `Accept` that takes what comes."""


def ingest(
    config: IngestConfig,
    out_dir: Path,
    *,
    label: str | Mapping[str, str] | None = None,
    epochs: int = 1,
    listing: Listing | None = None,
    accept: Accept = any_columns,
    progress: Progress = silent,
) -> Dataset:
    """Read a source into checked shards, split by the content of the records.

    Where an earlier ingest of the same source into the same folder was killed, or found the disk
    full, it goes on from the shards that were whole; where it was done there is nothing to do.

    Args:
        config: What to read and how to split it.
        out_dir: The dataset's folder; made if need be; a dataset of another source in it is replaced.
        label: The column that no record may miss, or each output's; ignored where the data has no such
            column.
        epochs: How often training will read each image, for `data.images.store: auto`.
        listing: The files as `fingerprint_of` saw them, so that what is read is what it named; None:
            as they are now.
        accept: Asked whether these columns will do, as soon as they are known.
        progress: Called with the records done, and the records in all once they are counted.

    Returns:
        The dataset, its manifest written. The records of a split stand in the source's order.

    Raises:
        DataError: a file cannot be read, more than `data.max_bad_rows` records are bad, a split is
            empty, or the source changes meanwhile; no shard is left behind.
        ConfigError: the configuration does not fit the data.
        UserError: the disk is full; names the need and what is free. Or what `accept` raises.
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
                config,
                out_dir,
                open_source(config, labels=labels, listing=listing, workers=workers),
                identity=identity,
                epochs=epochs,
                accept=accept,
                progress=progress,
                workers=workers,
            ).run()
    except (DataError, ConfigError):
        # Resuming does not fix a bad source or configuration.
        for name in (*config.splits, SAMPLE, MANIFEST, JOURNAL):
            remove(out_dir / name)
        raise


class _Ingest:
    """The conversion of one source to shards."""

    def __init__(
        self,
        config: IngestConfig,
        out_dir: Path,
        source: Source,
        *,
        identity: str,
        epochs: int,
        accept: Accept,
        progress: Progress,
        workers: Workers,
    ) -> None:
        self._config = config
        self._out_dir = out_dir
        self._source = source
        self._epochs = epochs
        self._accept = accept
        self._progress = progress
        self._workers = workers
        self._rule = SplitRule(config.splits, seed=config.seed, split_by=config.split_by)
        self._journal = Journal(out_dir, identity=identity, splits=self._rule.names)
        self._faults = Faults(config)
        self._share_done = 0.0
        self._dropped = 0
        self._warnings: tuple[str, ...] = ()

    def run(self) -> Dataset:
        """Resume an earlier ingest, or start."""
        with full_disk_is_named(self._out_dir, need_bytes=self._need_bytes):
            kept = self._journal.kept()
            if kept is not None:
                self._accept(kept.scan.columns)
            if kept is None or not self._is_whole(kept):
                kept = self._begun()
            elif (self._out_dir / MANIFEST).is_file():
                return self._with_whole_sample(load_dataset(self._out_dir))
            else:
                self._warn(kept.scan)
            with ThreadPoolExecutor(WORKERS) as pool:
                writers = {name: self._writer(name, kept, pool) for name in self._rule.names}
                try:
                    self._deal(kept, writers, pool)
                    return self._published(kept, writers)
                except BaseException:
                    for writer in writers.values():
                        writer.abandon()
                    raise

    def _need_bytes(self) -> int:
        """Estimate the bytes still to write; before the first shard, the size of the source."""
        written = self._journal.size_bytes
        if not written or not self._share_done:
            return sum(file.size_bytes for file in self._source.listing.files)
        return round(written / self._share_done * (1 - self._share_done))

    def _is_whole(self, kept: Kept) -> bool:
        try:
            for shard in itertools.chain(*kept.shards.values()):
                verify_shard(self._out_dir, shard)
        except DataError as damage:
            _LOG.warning("ingest begins again: %s", damage)
            return False
        return True

    def _begun(self) -> Kept:
        for name in (*self._rule.names, SAMPLE, MANIFEST):
            remove(self._out_dir / name)
        scan = self._source.scan(self._progress)
        self._warn(scan)
        _check_split_by(self._config, scan)
        self._accept(scan.columns)
        return self._journal.begin(scan, self._chosen_store(scan))

    def _warn(self, scan: Scan) -> None:
        """Show the warnings, and keep them for the manifest."""
        assumed = (each.text for each in scan.assumptions)
        self._warnings = (*listing_warnings(self._source.listing, self._config), *assumed)
        for line in self._warnings:
            _LOG.warning("%s", line)

    def _chosen_store(self, scan: Scan) -> ChosenStore | None:
        """Choose the store of the training images from the first block; None without images.

        The journal keeps the choice, because the disk may be fuller when ingest resumes.
        """
        if scan.image is None:
            return None
        first = next(self._source.blocks(scan), None)
        images = round(scan.rows * self._config.splits[TRAIN])
        facts = first and image_facts(first.table, scan.columns, images=images)
        if not facts:
            return None
        chosen = choose_store(
            self._config.images,
            facts,
            shorter=min(scan.image[:2]),
            epochs=self._epochs,
            room=room_at(self._out_dir),
        )
        _LOG.info("training images are stored as %s", chosen.why)
        return chosen

    def _writer(self, name: str, kept: Kept, pool: ThreadPoolExecutor) -> SplitWriter:
        writer = SplitWriter(
            self._out_dir,
            name,
            kept.scan.columns,
            shard_rows=self._config.shard_rows,
            pool=pool,
            workers=self._workers,
            finished=self._journal.finished,
        )
        writer.go_on(kept.shards[name], rows=kept.mark.rows[name])
        return writer

    def _deal(self, kept: Kept, writers: dict[str, SplitWriter], pool: ThreadPoolExecutor) -> None:
        """Read the remaining blocks into the shards, and check the whole dataset."""
        scan, done = kept.scan, kept.mark.done
        self._journal.go_on(kept)
        self._faults.go_on(kept.mark.faults, bad=kept.mark.bad)
        for number, (block, split) in enumerate(self._dealt(scan), 1):
            if number <= kept.mark.blocks:
                # Already in the shards; it was dealt so that later copies of its records are counted.
                continue
            self._faults.add(block)
            if not self._faults.too_many:
                self._write(block.table, split, kept, writers, pool)
            done += block.table.num_rows + block.bad
            self._share_done = done / max(done, scan.rows, 1)
            self._progress(done, max(done, scan.rows))
            self._journal.dealt(
                Mark(
                    blocks=number,
                    done=done,
                    rows={name: writer.rows for name, writer in writers.items()},
                    bad=self._faults.count,
                    faults=tuple(self._faults.listed),
                )
            )
        self._source.listing.check_unchanged()
        self._faults.check()
        _check_splits(self._config, scan, writers, dropped=self._dropped)

    def _dealt(self, scan: Scan) -> Iterator[tuple[Block, NDArray[np.intp]]]:
        """Yield each block of the source with the split of each of its records."""
        ignored = (PATH,) if self._source.listing.format == "images" else ()
        dealer = Dealer(
            self._config, self._rule, scan.columns, folder=self._out_dir, ignored=ignored
        )
        with contextlib.closing(dealer):
            for block in self._source.blocks(scan, self._rule.content):
                yield block, dealer.deal(block)
            self._dropped = dealer.dropped

    def _write(
        self,
        table: pa.Table,
        split: NDArray[np.intp],
        kept: Kept,
        writers: dict[str, SplitWriter],
        pool: ThreadPoolExecutor,
    ) -> None:
        columns = kept.scan.columns
        for index, name in enumerate(self._rule.names):
            chosen = np.flatnonzero(split == index)
            if not len(chosen):
                continue
            part = table.take(pa.array(chosen))
            if name == TRAIN and kept.store is not None and kept.scan.image is not None:
                part = stored_table(
                    part, columns, kept.store, channels=kept.scan.image[2], pool=pool
                )
            writers[name].add(part)

    def _published(self, kept: Kept, writers: dict[str, SplitWriter]) -> Dataset:
        scan = kept.scan
        dataset = Dataset(
            root=self._out_dir,
            columns=scan.columns,
            splits={name: writers[name].close() for name in self._config.splits},
            column_hashes={name: writers[name].hashes() for name in self._config.splits},
            image=_image_shape(scan, self._config),
            image_store=None if kept.store is None else kept.store.why,
            bad_rows=self._faults.bad_rows(),
            copies_dropped=self._dropped,
            warnings=self._warnings,
        )
        return self._with_sample(dataset)

    def _with_whole_sample(self, dataset: Dataset) -> Dataset:
        """The dataset of a finished ingest; its sample is written again where it is missing or damaged."""
        try:
            if dataset.sample is not None:
                verify_shard(self._out_dir, dataset.sample)
        except DataError as damage:
            _LOG.warning("the sample is written again: %s", damage)
            return self._with_sample(replace(dataset, sample=None))
        return dataset

    def _with_sample(self, dataset: Dataset) -> Dataset:
        """Write the sample of a dataset that has none, and the manifest."""
        dataset = replace(dataset, sample=self._sample(dataset))
        write_manifest(dataset)
        return dataset

    def _sample(self, dataset: Dataset) -> Shard:
        """Write the first records again, to a file of their own."""
        names = [column.name for column in dataset.columns]
        table = pa.Table.from_batches([dataset.first_rows(names)])
        return write_table(self._out_dir, SAMPLE, table, columns=dataset.columns)


def _check_split_by(config: IngestConfig, scan: Scan) -> None:
    names = [column.name for column in scan.columns]
    if config.split_by is not None and config.split_by not in names:
        raise ConfigError(
            "data.split_by must name a column of the data",
            got=config.split_by,
            fix=nearest(config.split_by, names),
        )


def _check_splits(
    config: IngestConfig, scan: Scan, writers: Mapping[str, SplitWriter], *, dropped: int
) -> None:
    total = sum(writer.rows for writer in writers.values())
    if not total:
        raise no_record(config.source)
    duplicates = config.duplicates_for(column.dtype for column in scan.columns)
    how, spread = f" without {dropped:,} copies" if dropped else "", ""
    if config.split_by:
        how += f" with their {config.split_by!r} kept together"
    elif duplicates == "together":
        how += " with copies kept together"
    if dropped or (duplicates == "together" and not config.split_by):
        spread = " or set data.duplicates: spread,"
    for name, share in config.splits.items():
        if not writers[name].rows:
            raise DataError(
                f"split {name!r} must hold at least one record",
                got=Plain(f"a share of {share:g} of {total:,} records{how}, which gave none"),
                fix=f"Bring more records, or raise data.splits.{name},{spread} or set another "
                "data.seed.",
            )


def _image_shape(scan: Scan, config: IngestConfig) -> ImageShape | None:
    if scan.image is None:
        return None
    height, width, channels = scan.image
    return ImageShape(
        height=height,
        width=width,
        channels=channels,
        fit=config.images.fit,
        crop=config.images.crop,
    )
