"""What becomes of records that are there more than once: `data.duplicates`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.data.columns import Column
from stoker.data.ingest.assign import SplitRule, hash_rows
from stoker.data.ingest.copies import CopyCounter
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.records import Block

NO_SPLIT = -1
"""In place of a split's index: the record is left out."""


class Dealer:
    """Deals out a source's blocks to splits, in the source's order."""

    def __init__(
        self,
        config: IngestConfig,
        rule: SplitRule,
        columns: Sequence[Column],
        *,
        folder: Path,
        ignored: Sequence[str] = (),
    ) -> None:
        """Start with no record.

        Args:
            config: How copies are treated.
            rule: The split of each content.
            columns: What the records consist of.
            folder: For temporary files.
            ignored: Columns in which a copy may differ.
        """
        self.dropped = 0
        self._rule = rule
        self._columns = columns
        self._duplicates = config.duplicates_for(column.dtype for column in columns)
        deciding = rule.deciding(columns)
        self._others = [c for c in columns if c not in deciding and c.name not in ignored]
        is_spread = self._duplicates == "spread" and config.split_by is None
        self._counter = None
        if is_spread or self._duplicates == "drop":
            self._counter = CopyCounter(folder)

    def deal(self, block: Block) -> NDArray[np.intp]:
        """[rows] the index of each record's split, or `NO_SPLIT`; each block once, in order."""
        content = block.content
        if content is None:
            content = self._rule.content(block.table, self._columns)
        if self._counter is None:
            return self._rule.deal(content)
        if self._duplicates == "spread":
            return self._rule.deal(content, self._counter.number(content))
        # A copy is equal in every column, not only in those that decide the split.
        whole = content + hash_rows(block.table, self._others)
        is_copy = self._counter.number(whole) > 0
        self.dropped += int(is_copy.sum())
        return np.where(is_copy, NO_SPLIT, self._rule.deal(content))

    def close(self) -> None:
        """Free the disk."""
        if self._counter is not None:
            self._counter.close()
