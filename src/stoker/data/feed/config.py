"""The section `train.feed`: how batches are prepared. Of its settings, only `decoder` can change a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stoker.core.errors import ConfigError

Decoder = Literal["auto", "native", "opencv"]
"""Decoder of images on the host."""

ByteForm = Literal["x", "x/255", "x*(1/255)"]
"""How numbers were made from bytes x. The last two differ in the last bit of some numbers."""

MAX = {"threads": 1024, "parallel_batches": 1024, "prefetch": 100_000}
"""Setting -> maximum accepted value; a larger value is probably a typo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig:
    """How batches are prepared; `stoker tune` can try values for each setting.

    With `data.service`, the service's workers prepare the training batches, and these settings apply only to
    validation.
    """

    threads: int | None = None
    """Number of threads that make batches. null: the number of cores. For a dataset of your own, null means
    TensorFlow's own threads, which the step uses, too."""

    parallel_batches: int | None = None
    """Number of batches of images that are made at the same time; all threads work on each. null: 2."""

    prefetch: int | None = None
    """Number of batches that are made before the step needs them. null: 8; for a dataset of your own,
    TensorFlow's autotuner chooses the number. For tables this is a number of calls, because the rows of a whole
    call are read at once, and null means 1."""

    decoder: Decoder = "auto"
    """Image decoder. auto: native if it can be built, else opencv, which takes more CPU time. Their results may
    differ by a gray level in randomly cropped images, and are equal otherwise."""

    autotune: bool = True
    """Let TensorFlow choose the parallelism and the buffers of a dataset of your own. false: they stay as in your
    code. A dataset that turns autotuning off keeps it off."""

    slack: bool = False
    """Delay a dataset of your own at the start of each step, so that it does not take CPU time from the launch
    of the step. For steps on an accelerator."""

    uint8: dict[str, ByteForm] = field(default_factory=dict)
    """Feature of a dataset of your own -> how its numbers were made from bytes x. x: pixels from 0 to 255;
    x/255: divided; x*(1/255): multiplied, as Rescaling and convert_image_dtype do. The feature is cached and
    sent to the device as uint8, and converted back in the step; a number of any other form ends the run."""

    def __post_init__(self) -> None:
        for name, most in MAX.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"train.feed.{name} must be from 1 to {most:,}", got=value)


AS_IT_IS = FeedConfig()
"""The default of every setting."""
