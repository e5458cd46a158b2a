"""The levers of a tuning: changes of settings that may make a training faster, in the order of their trials.

A lever is tried before all levers whose effect depends on it: the input decides whether the step is the
bottleneck, the number of steps per call decides how much of a step is Python, and the precision decides
whether XLA helps. Every lever is a set of settings of `stoker.yaml`, so a lock file can keep it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stoker.cluster.devices import Devices, Gpu
from stoker.data.ingest import IngestConfig
from stoker.data.user_dataset.config import OwnDatasetConfig
from stoker.train.config import BFLOAT16_CAPABILITY, ResolvedTraining, TrainConfig
from stoker.tune.profile import Bottleneck

Part = Literal["input", "python", "step"]
"""The part of a step's time that a lever shortens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """A change of settings, and how it is judged."""

    name: str
    """Name for the user: `10 steps per call`."""

    settings: Mapping[str, Any]
    """Dotted name of a setting of `stoker.yaml` -> its new value."""

    part: Part
    """The part of the step's time that it shortens."""

    changes_numbers: bool = False
    """Whether it may change the loss. If so, it is kept only if the loss curves stay alike."""

    only_proposed: bool = False
    """Whether it is measured but not applied, because it changes the training itself: the user decides."""

    by_speed: bool = False
    """For a lever of the input: whether it leaves the input's work unchanged. If so, it is judged by
    samples per second; if not, by the input's CPU time."""

    does_more_at_once: bool = False
    """For a lever of the input: whether it helps only if training waits for batches and a core is idle."""

    only_for: Bottleneck | None = None
    """The only bottleneck that it helps against; None if it may help against any."""

    after_memory_of: str | None = None
    """Name of another lever: this lever is tried only if the other one ran out of memory."""

    why: str
    """Why it may help, for the user."""


_feed_lever = functools.partial(Lever, part="input", by_speed=True)
"""Creates a lever that changes how the same input is prepared."""

_step_lever = functools.partial(Lever, part="step", changes_numbers=True)
"""Creates a lever that changes the step, and perhaps its rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts that are known only to a process that has opened the data and built the model."""

    passes_agree: bool
    """Whether two passes over a user-defined dataset begin with the same bytes, so that a cached pass can
    replace later ones."""

    image_store: str | None
    """How images are stored in the shards (`data.images.store`); None without images."""

    made_here: bool
    """Whether this process makes batches on demand: they are not kept, and no data service is used."""

    byte_features: Mapping[str, str]
    """Features of a user-defined dataset whose values are bytes (0 to 255) in all splits, so that they could
    be sent as uint8; in the form of `train.feed.uint8`. Empty if some are sent as uint8 already."""

    string_features: bool
    """Whether some features are strings, which XLA does not support."""

    gradient_bytes: int
    """Size of one exchange of gradients between replicas, bytes as sent."""

    per_epoch: int
    """Number of steps per epoch."""

    blocks: tuple[str, ...]
    """Names of the model's layers that contain layers; empty if some are rematerialized already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The settings and facts that decide which levers apply."""

    train: TrainConfig
    """The section `train`."""

    data: IngestConfig | OwnDatasetConfig
    """The section `data`."""

    resolved: ResolvedTraining
    """The section `train` with a value for each `auto`."""

    devices: Devices
    """CPU cores and GPUs of the machine."""

    model: ModelFacts

    @property
    def own_dataset(self) -> bool:
        """Whether the data is a user-defined `tf.data.Dataset`, which sets the batch size itself."""
        return isinstance(self.data, OwnDatasetConfig)

    @property
    def gpus(self) -> int:
        """Number of GPUs that this process may use."""
        return len(self.devices.gpus)

    @property
    def cores(self) -> int:
        """Number of CPU cores that this process may use."""
        return self.devices.cpu_cores

    @property
    def is_cached(self) -> bool:
        """Whether `data.pipeline.cache` keeps the batches in memory."""
        return isinstance(self.data, OwnDatasetConfig) and self.data.pipeline.cache == "memory"

    @property
    def has_service(self) -> bool:
        """Whether a data service makes the batches."""
        return isinstance(self.data, IngestConfig) and self.data.service is not None


LARGER = 4
"""Factor by which levers enlarge the batch, or the number of passes per update."""

AT_ONCE = 4
"""Number of batches of images that are prepared at the same time."""

AHEAD = 32
"""Number of batches that are prefetched."""

CALL_LENGTHS = (10, 50)
"""Numbers of steps per call that are tried; a call has at most all steps of an epoch."""


def levers(situation: Situation) -> list[Lever]:
    """Return the levers that apply, in the order of their trials."""
    return [
        *_input(situation),
        *_python(situation),
        *_step(situation),
        *_strategy(situation),
        *_exchange(situation),
        *_packs(situation),
        *_passes(situation),
        *_threads(situation),
        *_batch(situation),
    ]


def _input(situation: Situation) -> Iterator[Lever]:
    if situation.own_dataset and situation.model.passes_agree and not situation.is_cached:
        yield Lever(
            name="keep the dataset's first pass in memory",
            settings={"data.pipeline.cache": "memory"},
            part="input",
            why="later passes read the batches of the first one",
        )
    if situation.model.image_store == "original":
        for store, what in (
            ("resized", "store images near the size that is trained on"),
            ("raw", "store images decoded"),
        ):
            yield Lever(
                name=what,
                settings={"data.images.store": store},
                part="input",
                changes_numbers=True,
                why="decoding a sample takes less work",
            )
    if situation.model.image_store == "resized":
        yield Lever(
            name="store images decoded",
            settings={"data.images.store": "raw"},
            part="input",
            changes_numbers=True,
            why="samples need no decoding",
        )
    if situation.model.made_here:
        yield from _decoding(situation)
        yield from _feeding(situation)
    if situation.own_dataset and situation.model.made_here:
        yield from _tensorflow_options(situation)
    if situation.own_dataset and (situation.model.made_here or situation.gpus):
        yield from _bytes(situation)


def _decoding(situation: Situation) -> Iterator[Lever]:
    """Yield a lever that changes the decoder of images; raw images need no decoder."""
    if situation.model.image_store not in {"original", "resized"}:
        return
    other = "native" if situation.train.feed.decoder == "opencv" else "opencv"
    yield Lever(
        name=f"images decoded by {other}",
        settings={"train.feed.decoder": other},
        part="input",
        changes_numbers=True,
        why="which decoder is faster depends on the images and on the machine",
    )


def _feeding(situation: Situation) -> Iterator[Lever]:
    """Yield levers that change how much of the input runs at the same time, or how many batches are made in advance."""
    if situation.train.feed.threads is None:
        # Half as many threads as cores leave cores to the step. With twice as many threads as cores, some
        # threads work while others wait for files.
        half, twice = situation.cores // 2, 2 * situation.cores
        for threads, idle in ((half, False), (twice, True)):
            if threads:
                yield _feed_lever(
                    name=f"input on {threads} thread{'s' * (threads > 1)}",
                    settings={"train.feed.threads": threads},
                    does_more_at_once=idle,
                    why="threads that wait for a file leave their core idle"
                    if idle
                    else "the input leaves cores to the step",
                )
    if situation.model.image_store is not None and situation.train.feed.parallel_batches is None:
        yield _feed_lever(
            name=f"{AT_ONCE} batches of images at once",
            settings={"train.feed.parallel_batches": AT_ONCE},
            does_more_at_once=True,
            why="small batches do not fill all threads",
        )
    if situation.train.feed.prefetch is None:
        yield _feed_lever(
            name=f"{AHEAD} batches made ahead",
            settings={"train.feed.prefetch": AHEAD},
            does_more_at_once=True,
            why="training can continue during longer pauses of the input",
        )


def _tensorflow_options(situation: Situation) -> Iterator[Lever]:
    """Yield levers that change the `tf.data.Options` of a user-defined dataset."""
    if situation.train.feed.autotune:
        yield _feed_lever(
            name="the dataset as it is written, without TensorFlow's autotuner",
            settings={"train.feed.autotune": False},
            why="no autotuner changes the parallelism and the buffers that the code sets",
        )
    if situation.gpus and not situation.train.feed.slack:
        yield _feed_lever(
            name="the input held back while a step is launched",
            settings={"train.feed.slack": True},
            why="the thread that launches the kernels of a step has the CPU to itself",
        )


def _bytes(situation: Situation) -> Iterator[Lever]:
    if situation.model.byte_features:
        yield _feed_lever(
            name=f"{', '.join(situation.model.byte_features)} sent as uint8",
            settings={"train.feed.uint8": dict(situation.model.byte_features)},
            why="only a quarter of the bytes is kept, copied and sent to the device",
        )


def _python(situation: Situation) -> Iterator[Lever]:
    for length in sorted({min(length, situation.model.per_epoch) for length in CALL_LENGTHS}):
        if situation.resolved.steps_per_call < length:
            yield Lever(
                name=f"{length} steps per call",
                settings={"train.steps_per_call": length},
                part="python",
                why="Python runs once per call",
            )


def _step(situation: Situation) -> Iterator[Lever]:
    other = other_precision(situation.resolved.precision, situation.devices.gpus)
    yield _step_lever(
        name=f"precision {other}",
        settings={"train.precision": other},
        why="matrix products in 16 bits move half the bytes"
        if other != "float32"
        else "this device may compute float32 faster than the current precision",
    )
    if not situation.model.string_features:
        yield _step_lever(
            name="no XLA" if situation.resolved.xla else "XLA",
            settings={"train.xla": not situation.resolved.xla},
            why="operations are fused"
            if not situation.resolved.xla
            else "TensorFlow's own kernels may be faster",
        )


def _strategy(situation: Situation) -> Iterator[Lever]:
    """Yield levers that use one device instead of several or vice versa; the samples per step stay the same."""
    if situation.resolved.strategy == "mirrored" and situation.resolved.replicas > 1:
        whole = situation.resolved.batch_size * situation.resolved.replicas
        yield _step_lever(
            name="one device",
            settings={"train.strategy": "one_device", "train.replicas": "auto"}
            | ({"train.batch_size": whole} if not situation.own_dataset else {}),
            why="no gradients are exchanged",
        )
    shares = situation.resolved.batch_size % max(1, situation.gpus) == 0
    if situation.resolved.strategy == "one_device" and situation.gpus > 1 and shares:
        part = situation.resolved.batch_size // situation.gpus
        yield _step_lever(
            name=f"mirrored over {situation.gpus} GPUs",
            settings={"train.strategy": "mirrored"}
            | ({"train.batch_size": part} if not situation.own_dataset else {}),
            why="each GPU computes a part of a step",
        )


def _exchange(situation: Situation) -> Iterator[Lever]:
    if situation.resolved.replicas > 1 and situation.train.reduction_dtype == "float32":
        yield _step_lever(
            name="gradients sent as bfloat16",
            settings={"train.reduction_dtype": "bfloat16"},
            why="replicas exchange half the bytes",
        )


PACKS = (2, 8)
"""Numbers of packs of gradients that are tried."""

MIN_PACK_BYTES = 2**20
"""Minimum size of a pack, bytes: a smaller one costs more time than it saves."""


def _packs(situation: Situation) -> Iterator[Lever]:
    """Yield levers that send the first gradients before all are computed.

    With XLA or accumulation they cannot help, because all gradients are ready at the same time.
    """
    at_once = situation.resolved.xla or situation.resolved.accumulate > 1
    if situation.resolved.replicas == 1 or situation.train.reduction_bytes_per_pack or at_once:
        return
    for count in PACKS:
        size_bytes = math.ceil(situation.model.gradient_bytes / count)
        if size_bytes >= MIN_PACK_BYTES:
            yield Lever(
                name=f"gradients sent in {count} packs",
                settings={"train.reduction_bytes_per_pack": size_bytes},
                part="step",
                # The sum of two replicas' gradients does not depend on their order.
                changes_numbers=situation.resolved.replicas > 2,
                only_for="communication",
                why="the first gradients are exchanged while later ones are still computed",
            )


def _passes(situation: Situation) -> Iterator[Lever]:
    """Yield a lever that exchanges gradients less often; for a user-defined dataset it would only split the batch."""
    if (
        situation.resolved.replicas > 1
        and situation.resolved.accumulate == 1
        and not situation.own_dataset
    ):
        yield _step_lever(
            name=f"{LARGER} passes per update",
            settings={"train.accumulate": LARGER},
            only_proposed=True,
            only_for="communication",
            why=f"gradients are exchanged once for {LARGER} times the samples; an epoch has fewer updates, "
            "so choose the learning rate and the number of epochs again",
        )


def _threads(situation: Situation) -> Iterator[Lever]:
    if situation.gpus or situation.cores < 2:
        return
    threads = situation.cores // 2
    if situation.train.intra_op_threads is None:
        yield _step_lever(
            name=f"{threads} thread{'s' * (threads > 1)} for an operation",
            settings={"train.intra_op_threads": threads},
            why="small operations are not split, and cores are left to the input",
        )
    # Each replica waits for the others on a thread of its own, so replicas need these threads.
    if situation.train.inter_op_threads is None and situation.resolved.replicas == 1:
        yield _step_lever(
            name=f"{threads} operation{'s' * (threads > 1)} at once",
            settings={"train.inter_op_threads": threads},
            why="fewer operations compete for cores and caches",
        )


def other_precision(precision: str, gpus: Sequence[Gpu]) -> str:
    """Return the precision to compare with: float32, or if that is used, the device's best 16-bit one."""
    if precision != "float32":
        return "float32"
    if all(gpu.compute_capability >= BFLOAT16_CAPABILITY for gpu in gpus):
        return "mixed_bfloat16"
    return "mixed_float16"


def _batch(situation: Situation) -> Iterator[Lever]:
    if situation.resolved.accumulate > 1:
        whole = situation.resolved.batch_size * situation.resolved.accumulate
        yield from _and_rematerialized(
            Lever(
                name="no accumulation: the whole batch in one pass",
                settings={"train.batch_size": whole, "train.accumulate": 1}
                if not situation.own_dataset
                else {"train.accumulate": 1},
                part="step",
                changes_numbers=True,
                why="one pass processes the same samples",
            ),
            situation,
        )
    key = "train.batch_size" if not situation.own_dataset else "data.pipeline.batch_size"
    yield from _and_rematerialized(
        _step_lever(
            name=f"{LARGER} times the batch",
            settings={key: LARGER * situation.resolved.batch_size},
            only_proposed=True,
            why="more samples share the fixed cost of a step; an epoch has fewer updates, so choose the "
            "learning rate and the number of epochs again",
        ),
        situation,
    )


def _and_rematerialized(lever: Lever, situation: Situation) -> Iterator[Lever]:
    """Yield a lever, and the same lever with rematerialization, to be tried if it runs out of memory."""
    yield lever
    if situation.model.blocks:
        yield replace(
            lever,
            name=f"{lever.name}, with rematerialization",
            settings=dict(lever.settings) | {"train.remat": list(situation.model.blocks)},
            why=f"{lever.why}; {', '.join(situation.model.blocks)} are computed again for the gradient, "
            "which saves memory",
            changes_numbers=True,
            after_memory_of=lever.name,
        )


EXHAUSTED = 0.8
"""If training uses at least this share of the cores' time, more threads do not prepare batches faster."""


def data_service(situation: Situation, *, cores_used: float, busy_fraction: float) -> Lever | None:
    """Return the lever that prepares batches on other machines; None if it would not help.

    Args:
        situation: The current settings.
        cores_used: Mean number of cores that training uses.
        busy_fraction: U, the share of the time in which the device computes.

    Returns:
        A lever that is only proposed, because it needs other machines.
    """
    exhausted = cores_used >= EXHAUSTED * situation.cores
    if situation.own_dataset or situation.has_service or not exhausted:
        return None
    return Lever(
        name="make batches on other machines",
        settings={},
        part="input",
        only_proposed=True,
        why=f"not tried, because it needs other machines: training uses {cores_used:.1f} of this machine's "
        f"{situation.cores} cores, but still waits for its input. `stoker data-service start` prepares "
        "batches on another machine, and with data.service.address training reads them. Training becomes "
        f"at most {1 / busy_fraction:.2g} times as fast, because the step's own time remains",
    )
