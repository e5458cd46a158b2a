"""The section `train.feed`: how batches are prepared during the step. Only `decoder` can change a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stoker.core.errors import ConfigError

Decoder = Literal["auto", "native", "opencv"]
"""What decodes images on the host."""

ByteForm = Literal["x", "x/255", "x*(1/255)"]
"""How numbers were made of bytes x. A quotient and a product with the inverse differ in the last bit."""

MOST = {"threads": 1024, "parallel_batches": 1024, "prefetch": 100_000}
"""More is a slip of the pen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig:
    """How batches are made ready; each setting is a lever of `stoker tune`.

    With `data.service` its workers make the training's batches in their own way, and this is for the
    validation's.
    """

    threads: int | None = None
    """Threads that make batches. null: as many as cores; of a dataset of your own TensorFlow's, which
    the step shares."""

    parallel_batches: int | None = None
    """Batches of images that are made at once, each by all threads. null: 2."""

    prefetch: int | None = None
    """Batches that are made ahead of the step. null: 8, of a dataset of your own as many as TensorFlow's
    autotuner finds. Where the rows of a call are read at once (tables) it counts calls, and null is 1."""

    decoder: Decoder = "auto"
    """What decodes images. auto: native where it can be built, else opencv, which takes more CPU. The
    two may differ by a grey level in images that are cropped at random; all else is equal."""

    autotune: bool = True
    """Let TensorFlow set the parallelism and the buffers of a dataset of your own; false: as they are
    written. One that turns it off itself keeps that."""

    slack: bool = False
    """Hold a dataset of your own back at the start of a step, where it would take the CPU from the
    step's own launch. For steps on an accelerator."""

    uint8: dict[str, ByteForm] = field(default_factory=dict)
    """Feature of a dataset of your own -> how its numbers were made of bytes x. x: pixels from 0 to 255;
    x/255: divided; x*(1/255): multiplied, as Rescaling and convert_image_dtype do. It is kept and sent
    to the device as uint8, and is the same numbers again within the step; another value ends the run."""

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"train.feed.{name} must be from 1 to {most:,}", got=value)


AS_IT_IS = FeedConfig()
"""Nothing is asked for."""
