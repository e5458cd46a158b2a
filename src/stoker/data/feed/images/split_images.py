"""The images of one split: any row of it at any time, decoded, checked, seen as training sees it.

Nothing is kept in memory but each image's place. The batch of any step can be asked for alone.
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
from stoker.data.feed.images.augment import (
    AugmentConfig,
    Views,
    evaluation_views,
    training_views,
)
from stoker.data.feed.images.decode import JOB, REASONS, Engine, Status, Target, read_job
from stoker.data.ingest.image_index import read_image_index

_FIX = "Run `stoker ingest` again: that makes the shard again from the source."


class ImageSplit:
    """One image column of one split, read at random.

    A shard is open only while a batch reads from it, so there may be any number of shards, and one that
    was replaced or cut meanwhile is noticed.
    """

    def __init__(self, dataset: Dataset, split: str, *, column: Column, engine: Engine) -> None:
        """Check each shard's length and index; the images are checked one by one as they are read.

        Args:
            dataset: What ingest wrote; `dataset.image` says what images are brought to.
            split: Its name.
            column: Its image column.
            engine: What decodes.

        Raises:
            DataError: a shard is missing or cut, or an index is damaged.
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

    def evaluation(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """These rows as evaluation and serving see them, equal to what the exported graph makes.

        Args:
            indices: [batch] rows of the split.

        Returns:
            [batch, height, width, channels].

        Raises:
            DataError: a shard changed, or an image is damaged; names shard and row.
        """
        views, exact = self.views(indices)
        return self.viewed(indices, views, exact=exact)

    def training(
        self, indices: NDArray[np.int64], *, augment: AugmentConfig, seed: int, epoch: int
    ) -> NDArray[np.uint8]:
        """These rows as training sees them in one epoch, but for `jitter_colors`.

        Args:
            indices: [batch] rows of the split.
            augment: What is done to each.
            seed: The run's seed.
            epoch: The epoch, from 0.

        Returns:
            [batch, height, width, channels].

        Raises:
            DataError: as `evaluation`.
        """
        views, exact = self.views(indices, augment=augment, seed=seed, epoch=epoch)
        return self.viewed(indices, views, exact=exact)

    def views(
        self,
        indices: NDArray[np.int64],
        *,
        augment: AugmentConfig | None = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> tuple[Views, bool]:
        """What is seen of these rows, and whether it must equal what the exported graph makes.

        Args:
            indices: [batch] rows of the split.
            augment: What is done to each; None: as evaluation sees them.
            seed: The run's seed.
            epoch: The epoch, from 0.
        """
        heights, widths = self._sizes(indices)
        if augment is None:
            return evaluation_views(self.shape, heights, widths), True
        views = training_views(
            augment,
            self.shape,
            seed=seed,
            epoch=epoch,
            indices=indices,
            heights=heights,
            widths=widths,
        )
        return views, augment.random_resized_crop is None

    def encoded(self, indices: NDArray[np.int64]) -> list[bytes]:
        """The bytes of these rows, as they are stored.

        Raises:
            DataError: as `evaluation`.
        """
        nothing = Views(
            boxes=np.zeros((len(indices), 4), np.float32), flips=np.zeros(len(indices), np.bool_)
        )
        with self._prepared(indices, nothing) as jobs:
            found = [read_job(job) for job in jobs]
            jobs["status"] = [one if isinstance(one, Status) else Status.DONE for one in found]
        return [one for one in found if isinstance(one, bytes)]

    def viewed(self, indices: NDArray[np.int64], views: Views, *, exact: bool) -> NDArray[np.uint8]:
        """These rows, each the given part of it.

        Args:
            indices: [batch] rows of the split.
            views: What is seen of each.
            exact: Whether it must equal what the exported graph makes of the same boxes.
        """
        with self._prepared(indices, views) as jobs:
            return self._engine.decode(jobs, self._target(exact=exact))

    def decoded(
        self, encoded: Sequence[bytes], indices: NDArray[np.int64], views: Views, *, exact: bool
    ) -> NDArray[np.uint8]:
        """As `viewed`, of bytes that `encoded` has read."""
        held = [np.frombuffer(data, np.uint8) for data in encoded]
        jobs = self._jobs(indices, views)
        jobs["data"] = [data.ctypes.data for data in held]
        pixels = self._engine.decode(jobs, self._target(exact=exact))
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
        """[batch] in which shard each row lies."""
        return np.searchsorted(self._first, indices, side="right") - 1

    @contextlib.contextmanager
    def _prepared(self, indices: NDArray[np.int64], views: Views) -> Iterator[NDArray[np.void]]:
        """The jobs of a batch with their files open; how they ended is checked at the end."""
        places = self._places(indices)
        jobs = self._jobs(indices, views)
        with contextlib.ExitStack() as files:
            for place in np.unique(places):
                jobs["file"][places == place] = files.enter_context(self._opened(int(place)))
            yield jobs
        self._check(jobs, indices, places)

    def _sizes(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        chosen = self._index[indices]
        return chosen["height"].astype(np.float64), chosen["width"].astype(np.float64)

    def _jobs(self, indices: NDArray[np.int64], views: Views) -> NDArray[np.void]:
        jobs = np.zeros(len(indices), JOB)
        chosen = self._index[indices]
        for name in ("offset", "length", "crc32c", "height", "width", "orientation"):
            jobs[name] = chosen[name]
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
        more = f" (and {len(bad) - 1} more of this batch)" if len(bad) > 1 else ""
        raise DataError(
            f"image {row} of shard {self._paths[place]} must be what ingest wrote{more}",
            got=Plain(REASONS[Status(int(jobs["status"][bad[0]]))]),
            fix=_FIX,
        )
