"""TFRecord files of `tf.train.Example`, plain or packed, checked record by record."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from stoker.data.sources.columns.gathered import Gathered
from stoker.data.sources.columns.named_records import NamedReader, scan_named
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.file_kind import reading
from stoker.data.sources.files.listing import Listing
from stoker.data.sources.formats.examples import gather_examples
from stoker.data.sources.formats.framing import read_frames
from stoker.data.sources.records import WORKERS, Block, Content, Progress, Scan
from stoker.data.sources.workers.workers import InThreads


@dataclass(frozen=True, kw_only=True, slots=True)
class TfrecordFiles:
    """One or more TFRecord files with the same features."""

    listing: Listing
    """The files."""

    config: IngestConfig
    """How they are read."""

    labels: Collection[str]
    """The column that a record cannot miss."""

    def scan(self, progress: Progress) -> Scan:
        """Learn each feature's kind, length and type from all records.

        Raises:
            DataError: a file is no TFRecord, its features differ from the first's, or a feature
                differs from record to record.
            ConfigError: `data.types` names a feature that is not there, or images differ in size.
        """
        return scan_named(
            self._gathered(), self.config, labels=self.labels, in_order=False, progress=progress
        )

    def blocks(self, scan: Scan, content: Content | None = None) -> Iterator[Block]:
        """Every record in its columns' types, or named with what is wrong with it."""
        reader = NamedReader(
            scan=scan, config=self.config, labels=tuple(self.labels), content=content
        )
        with ThreadPoolExecutor(WORKERS) as pool:
            yield from InThreads(self.config.workers).map(
                partial(reader.block, pool=pool),
                self._gathered(),
                bytes_of=lambda gathered: gathered.size_bytes,
            )

    def _gathered(self) -> Iterator[Gathered]:
        for file in self.listing.files:
            with file.opened() as path, reading(file.location, "TFRecord"):
                for frames in read_frames(path, location=file.location):
                    yield gather_examples(file, frames)
