"""Images as a `tf.data` pipeline takes them: one Python call a batch, and the rest in the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import DataError
from stoker.data.feed.images.augment import AugmentConfig, color_factors
from stoker.data.feed.images.jitter import jitter_colors
from stoker.data.feed.images.split_images import ImageSplit
from stoker.data.feed.stages import StageWork

Reference = Callable[[list[bytes]], NDArray[np.uint8]]
"""Encoded images -> [batch, height, width, channels], by the exported graph."""

PARALLEL_CALLS = 2
"""Batches that are read at once. Each uses every core; the second keeps them busy while the last
images of the first are finished and handed over."""


class ImageFeed:
    """The batches of one image column: augmented, or as evaluation sees them."""

    def __init__(
        self,
        images: ImageSplit,
        *,
        augment: AugmentConfig | None = None,
        seed: int = 0,
        reference: Reference | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            images: The column.
            augment: What is done to each image; None: what evaluation and serving see.
            seed: The run's seed.
            reference: What decodes images that are not augmented; None: the split's own engine,
                which must then agree with the exported graph.
        """
        self.failure: DataError | None = None
        self._images = images
        self._augment = augment
        self._seed = seed
        self._reference = reference

    @property
    def augments(self) -> bool:
        """Whether an image looks otherwise in every epoch."""
        return self._augment is not None

    def read(self, rows: tf.Tensor, epoch: tf.Tensor) -> dict[str, tf.Tensor]:
        """Read one batch; for `Dataset.map(..., PARALLEL_CALLS, deterministic=True)`.

        Where a shard is damaged the pipeline fails, and `failure` says how.

        Args:
            rows: [batch] int64, rows of the split.
            epoch: Scalar int64, from 0.

        Returns:
            What `finish` takes: `pixels`, [batch, height, width, channels] uint8, and with colour
            jitter `colors`, [batch, 3] float32.
        """
        shape = self._images.shape
        found = tf.numpy_function(self._read, [rows, epoch], tf.uint8, stateful=False)
        batch = {
            "pixels": tf.ensure_shape(found, [None, shape.height, shape.width, shape.channels])
        }
        if self._augment is not None and self._augment.color_jitter is not None:
            factors = tf.numpy_function(self._factors, [rows, epoch], tf.float32, stateful=False)
            batch["colors"] = tf.ensure_shape(factors, [None, 3])
        return batch

    @staticmethod
    def finish(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        """The images, their colours changed; call it inside the compiled step.

        Args:
            batch: What `read` gave.

        Returns:
            [batch, height, width, channels] uint8.
        """
        if "colors" not in batch:
            return batch["pixels"]
        return jitter_colors(batch["pixels"], batch["colors"])

    def gather(self, rows: NDArray[np.int64], *, epoch: int) -> NDArray[np.uint8]:
        """The same batch without a pipeline, its colours not yet changed.

        Raises:
            DataError: a shard is damaged.
        """
        if self._augment is None and self._reference is not None:
            return self._reference(self._images.encoded(rows))
        if self._augment is None:
            return self._images.evaluation(rows)
        return self._images.training(rows, augment=self._augment, seed=self._seed, epoch=epoch)

    def stages(self, name: str, *, rows: NDArray[np.int64], threads: int) -> Iterator[StageWork]:
        """How the column's images of some rows are made, in the first epoch; see `measure_stages`.

        Args:
            name: The column's.
            rows: [batch] rows of the split.
            threads: How many the decoder has.
        """
        images, encoded = self._images, list[bytes]()

        def read() -> None:
            encoded[:] = images.encoded(rows)

        views, exact = images.views(rows, augment=self._augment, seed=self._seed, epoch=0)
        by_graph = self._reference if self._augment is None else None

        def decode() -> None:
            if by_graph is not None:
                by_graph(encoded)
            else:
                images.decoded(encoded, rows, views, exact=exact)

        for what, run in (("read", read), ("decode", decode)):
            yield StageWork(name=f"{what} {name}", samples=len(rows), parallelism=threads, run=run)

    def _read(self, rows: NDArray[np.int64], epoch: np.int64) -> NDArray[np.uint8]:
        try:
            return self.gather(rows, epoch=int(epoch))
        except DataError as failure:
            # TensorFlow makes a text of its own of what a Python function raises.
            self.failure = failure
            raise

    def _factors(self, rows: NDArray[np.int64], epoch: np.int64) -> NDArray[np.float32]:
        if self._augment is None or self._augment.color_jitter is None:
            raise RuntimeError("there is no colour jitter")
        return color_factors(
            self._augment.color_jitter, seed=self._seed, epoch=int(epoch), indices=rows
        )
