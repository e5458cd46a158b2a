"""The section `train.feed`: how batches are prepared during the step. Only `decoder` can change a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stoker.core.errors import ConfigError

Decoder = Literal["auto", "native", "opencv"]
"""What decodes images on the host."""

ByteForm = Literal["x", "x/255", "x*(1/255)"]
"""How numbers were made from bytes x. A quotient and a product with the inverse differ in the last bit."""

MAX = {"threads": 1024, "parallel_batches": 1024, "prefetch": 100_000}
"""Setting -> largest accepted value; more is a typo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig:
    """How batches are prepared; each setting is a lever of `stoker tune`.

    With `data.service`, its workers prepare the training batches, and this applies to validation only.
    """

    threads: int | None = None
    """Threads that make batches. null: as many as cores; for a dataset of your own TensorFlow's threads,
    which the step uses too."""

    parallel_batches: int | None = None
    """Batches of images that are made at once, each by all threads. null: 2."""

    prefetch: int | None = None
    """Batches made ahead of the step. null: 8; for a dataset of your own as many as TensorFlow's autotuner
    chooses. For tables, where the rows of a call are read at once, it counts calls, and null is 1."""

    decoder: Decoder = "auto"
    """Image decoder. auto: native if it can be built, else opencv, which takes more CPU. The two may differ
    by a gray level in randomly cropped images; all else is equal."""

    autotune: bool = True
    """Let TensorFlow set the parallelism and the buffers of a dataset of your own; false: as in your code. A
    dataset that turns autotuning off keeps it off."""

    slack: bool = False
    """Delay a dataset of your own at the start of a step, where it would take CPU time from the step's
    launch. For steps on an accelerator."""

    uint8: dict[str, ByteForm] = field(default_factory=dict)
    """Feature of a dataset of your own -> how its numbers were made from bytes x. x: pixels from 0 to 255;
    x/255: divided; x*(1/255): multiplied, as by Rescaling and convert_image_dtype. It is cached and sent
    to the device as uint8, and converted back in the step; any other value ends the run."""

    def __post_init__(self) -> None:
        for name, most in MAX.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"train.feed.{name} must be from 1 to {most:,}", got=value)


AS_IT_IS = FeedConfig()
"""All defaults."""
