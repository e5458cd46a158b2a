"""Read, check and decode the images of any rows of a split.

Only each image's position and size are kept in memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, ImageShape
from stoker.data.feed.images.augment import AugmentConfig, Views, views_of
from stoker.data.feed.images.decode import JOB, REASONS, Engine, Status, Target, read_job
from stoker.data.ingest.image_index import read_image_index

_FIX = "Run `stoker ingest` again; it writes the shard again from the source."


class ImageSplit:
    """One image column of one split; rows can be read in any order.

    A shard is open only while a batch is read from it. So there may be any number of shards, and a shard that
    was replaced or truncated since the last batch is noticed.
    """

    def __init__(self, dataset: Dataset, split: str, *, column: Column, engine: Engine) -> None:
        """Check each shard's length and index; the images themselves are checked when they are read.

        Args:
            dataset: The ingested dataset; `dataset.image` is the size of its images.
            split: Name of the split.
            column: The image column.
            engine: The decoder.

        Raises:
            DataError: a shard is missing or truncated, or an index is damaged.
        """
        if dataset.image is None:
            raise DataError(f"column {column.name!r} must hold images", got=Plain(column.dtype))
        images = [each.name for each in dataset.columns if each.dtype == "image"]
        self.shape: ImageShape = dataset.image
        self.name = column.name
        self._engine = engine
        self._shards = dataset.splits[split]
        self._paths = dataset.paths(split)
        parts = [
            read_image_index(dataset.root, shard)[images.index(column.name)]
            for shard in self._shards
        ]
        self._index = np.concatenate(parts)
        self._first = np.cumsum([0, *(len(part) for part in parts)])
        for place in range(len(parts)):
            with self._opened(place):
                pass

    @property
    def rows(self) -> int:
        """Number of images."""
        return len(self._index)

    def pixels(
        self,
        indices: NDArray[np.int64],
        *,
        augment: AugmentConfig | None = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> NDArray[np.uint8]:
        """Decode the images of rows, for one epoch of training or for evaluation; without color jitter.

        Args:
            indices: [batch] row numbers of the split.
            augment: The augmentations for training; None: the images equal those of the exported graph, as
                evaluation needs them.
            seed: The run's seed.
            epoch: The epoch, from 0.

        Returns:
            [batch, height, width, channels].

        Raises:
            DataError: a shard was changed, or an image is damaged; the error names shard and row.
        """
        return self.viewed(indices, self.views(indices, augment=augment, seed=seed, epoch=epoch))

    def views(
        self,
        indices: NDArray[np.int64],
        *,
        augment: AugmentConfig | None = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> Views:
        """Return the box and flip of each row's image; for the arguments see `pixels`."""
        chosen = self._index[indices]
        sizes = np.stack([chosen["height"], chosen["width"]], axis=1).astype(np.float64)
        return views_of(self.shape, sizes, indices=indices, augment=augment, seed=seed, epoch=epoch)

    def encoded(self, indices: NDArray[np.int64]) -> list[bytes]:
        """Return the stored bytes of rows' images.

        Raises:
            DataError: as in `pixels`.
        """
        with self._prepared(indices) as jobs:
            found = [read_job(job) for job in jobs]
            jobs["status"] = [one if isinstance(one, Status) else Status.DONE for one in found]
        return [one for one in found if isinstance(one, bytes)]

    def viewed(self, indices: NDArray[np.int64], views: Views) -> NDArray[np.uint8]:
        """Decode the given box of each row's image."""
        with self._prepared(indices, views) as jobs:
            return self._engine.decode(jobs, self._target(exact=views.exact))

    def decoded(
        self, encoded: Sequence[bytes], indices: NDArray[np.int64], views: Views
    ) -> NDArray[np.uint8]:
        """Do what `viewed` does, with bytes that `encoded` has read."""
        held = [np.frombuffer(data, np.uint8) for data in encoded]
        jobs = self._jobs(indices, views)
        jobs["data"] = [data.ctypes.data for data in held]
        pixels = self._engine.decode(jobs, self._target(exact=views.exact))
        self._check(jobs, indices, self._places(indices))
        return pixels

    def _target(self, *, exact: bool) -> Target:
        shape = self.shape
        return Target(
            height=shape.height,
            width=shape.width,
            channels=shape.channels,
            exact=exact,
            antialias=not exact or shape.fit == "crop",
        )

    def _places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each row's shard: [batch]."""
        return np.searchsorted(self._first, indices, side="right") - 1

    @contextlib.contextmanager
    def _prepared(
        self, indices: NDArray[np.int64], views: Views | None = None
    ) -> Iterator[NDArray[np.void]]:
        """Open the files that a batch's jobs need; after the block, raise an error for jobs that failed."""
        places = self._places(indices)
        jobs = self._jobs(indices, views)
        with contextlib.ExitStack() as files:
            for place in np.unique(places):
                jobs["file"][places == place] = files.enter_context(self._opened(int(place)))
            yield jobs
        self._check(jobs, indices, places)

    def _jobs(self, indices: NDArray[np.int64], views: Views | None) -> NDArray[np.void]:
        jobs = np.zeros(len(indices), JOB)
        chosen = self._index[indices]
        for name in ("offset", "length", "crc32c", "height", "width", "orientation"):
            jobs[name] = chosen[name]
        if views is not None:
            for place, name in enumerate(("x", "y", "box_width", "box_height")):
                jobs[name] = views.boxes[:, place]
            jobs["flip"] = views.flips
        return jobs

    @contextlib.contextmanager
    def _opened(self, place: int) -> Iterator[int]:
        path, wanted = self._paths[place], self._shards[place].size_bytes
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(
                f"shard {path} must be readable", got=Plain(str(error.strerror)), fix=_FIX
            ) from error
        try:
            size = os.fstat(handle).st_size
            if size != wanted:
                raise DataError(
                    f"shard {path} must be {wanted} bytes long, as its manifest says",
                    got=Plain(f"{size} bytes"),
                    fix=_FIX,
                )
            yield handle
        finally:
            os.close(handle)

    def _check(
        self, jobs: NDArray[np.void], indices: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        bad = np.flatnonzero(jobs["status"] != Status.DONE)
        if not len(bad):
            return
        place = int(places[bad[0]])
        row = int(indices[bad[0]] - self._first[place]) + 1
        more = f" (and {len(bad) - 1} more in this batch)" if len(bad) > 1 else ""
        raise DataError(
            f"image {row} of shard {self._paths[place]} must be as ingest wrote it{more}",
            got=Plain(REASONS[Status(int(jobs["status"][bad[0]]))]),
            fix=_FIX,
        )
