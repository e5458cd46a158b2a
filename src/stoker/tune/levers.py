"""What can be changed about a training so that it is faster, in the order in which it is tried.

A lever stands before those that depend on it: what is done to the input decides whether the step is
what is waited for, the number of steps in a call how much of a step is Python, and the precision
whether XLA helps. It is applied by settings of `stoker.yaml`, so that it can be written down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from stoker.tune.profile import Bottleneck

Part = Literal["input", "python", "step"]
"""Where a step's time goes, and which levers shorten it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """A change of settings, and how it is judged."""

    name: str
    """For a person: `ten steps a call`."""

    settings: Mapping[str, Any]
    """Dotted names of `stoker.yaml` -> values."""

    part: Part
    """Of the step's time, what it shortens."""

    changes_numbers: bool = False
    """The loss curve has to be looked at before it is kept."""

    only_proposed: bool = False
    """It is another training: whoever owns the model decides, with the gain before their eyes."""

    by_speed: bool = False
    """Of the input, but its work stays what it is: samples a second decide, not its CPU time."""

    does_more_at_once: bool = False
    """Of the input; it helps only where batches are waited for and a core has nothing to do."""

    only_for: Bottleneck | None = None
    """What has to be waited for, where it shortens nothing else."""

    after_memory_of: str | None = None
    """Name of a lever that did not fit in memory; only then this one is tried."""

    why: str
    """What it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What the levers depend on."""

    own_dataset: bool
    """The data is a `tf.data.Dataset` of the user's."""

    passes_agree: bool
    """Two passes over it begin with the same bytes, so that one may stand for all."""

    image_store: str | None
    """How images lie in the shards; None without images."""

    decoder: str
    """`train.feed.decoder`."""

    made_here: bool
    """Batches are made as they are needed, by this process: none are kept, and there is no data
    service."""

    byte_features: Mapping[str, str]
    """Features of a dataset of the user's that could be sent as uint8, as `train.feed.uint8` has
    them: all their numbers, in every split, were seen to be bytes. None where some are sent so."""

    feed_threads: int | None
    parallel_batches: int | None
    prefetch: int | None
    autotune: bool
    slack: bool
    """As `train.feed` has them."""

    string_features: bool
    """XLA has no strings."""

    gpus: int
    cores: int
    """That this process may use."""

    intra_op_threads: int | None
    inter_op_threads: int | None
    replicas: int
    strategy: str
    reduction_dtype: str
    reduction_bytes_per_pack: int
    gradient_bytes: int
    """Of one exchange, as they are sent."""
    bfloat16: bool
    """The GPUs multiply bfloat16."""

    precision: str
    xla: bool
    steps_per_call: int
    per_epoch: int
    batch_size: int
    batch_is_set: bool
    """Whether a setting decides it: not with a dataset of the user's own."""

    accumulate: int
    cached: bool
    """`data.pipeline.cache` is in use."""

    service: bool
    """`data.service` is in use: batches are made elsewhere."""

    blocks: tuple[str, ...]
    """Layers of the model that hold layers; none where some are computed again already."""


LARGER = 4
"""How many times the batch is tried."""

AT_ONCE = 4
"""Batches of images that are made at once for trial."""

AHEAD = 32
"""Batches that are made ahead for trial."""

CALL_LENGTHS = (10, 50)
"""Steps of a call that are tried; of a shorter epoch all of its steps."""


def levers(situation: Situation) -> list[Lever]:
    """All that make sense, in their order."""
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
    if situation.own_dataset and situation.passes_agree and not situation.cached:
        yield Lever(
            name="keep the dataset's first pass in memory",
            settings={"data.pipeline.cache": "memory"},
            part="input",
            why="later passes read what the first one made",
        )
    if situation.image_store == "original":
        for store, what in (
            ("resized", "store images near the size that is trained on"),
            ("raw", "store images decoded"),
        ):
            yield Lever(
                name=what,
                settings={"data.images.store": store},
                part="input",
                changes_numbers=True,
                why="less is decoded for each sample",
            )
    if situation.image_store == "resized":
        yield Lever(
            name="store images decoded",
            settings={"data.images.store": "raw"},
            part="input",
            changes_numbers=True,
            why="nothing is decoded for a sample",
        )
    if situation.made_here:
        yield from _decoding(situation)
        yield from _feeding(situation)
    if situation.own_dataset and situation.made_here:
        yield from _tensorflow_options(situation)
    if situation.own_dataset and (situation.made_here or situation.gpus):
        yield from _bytes(situation)


def _decoding(situation: Situation) -> Iterator[Lever]:
    """What decodes images; raw ones need no decoder."""
    if situation.image_store not in {"original", "resized"}:
        return
    other = "native" if situation.decoder == "opencv" else "opencv"
    yield Lever(
        name=f"images decoded by {other}",
        settings={"train.feed.decoder": other},
        part="input",
        changes_numbers=True,
        why="which decoder is quicker depends on the images and on the machine",
    )


def _feeding(situation: Situation) -> Iterator[Lever]:
    """How much of the input is done at once, and how far ahead of the step."""
    if situation.feed_threads is None:
        # Half of them leave cores to the step; twice as many have something to do while others read.
        half, twice = situation.cores // 2, 2 * situation.cores
        for threads, idle in ((half, False), (twice, True)):
            if threads:
                yield Lever(
                    name=f"input on {threads} thread{'s' * (threads > 1)}",
                    settings={"train.feed.threads": threads},
                    part="input",
                    by_speed=True,
                    does_more_at_once=idle,
                    why="threads that wait for a file leave their core idle"
                    if idle
                    else "the input leaves cores to the step",
                )
    if situation.image_store is not None and situation.parallel_batches is None:
        yield Lever(
            name=f"{AT_ONCE} batches of images at once",
            settings={"train.feed.parallel_batches": AT_ONCE},
            part="input",
            by_speed=True,
            does_more_at_once=True,
            why="small batches do not fill all threads",
        )
    if situation.prefetch is None:
        yield Lever(
            name=f"{AHEAD} batches made ahead",
            settings={"train.feed.prefetch": AHEAD},
            part="input",
            by_speed=True,
            does_more_at_once=True,
            why="longer pauses of the input are bridged",
        )


def _tensorflow_options(situation: Situation) -> Iterator[Lever]:
    """`tf.data.Options` of a pipeline that the user wrote."""
    if situation.autotune:
        yield Lever(
            name="the dataset as it is written, without TensorFlow's autotuner",
            settings={"train.feed.autotune": False},
            part="input",
            by_speed=True,
            why="parallelism and buffers that are written stay, and nobody searches for others",
        )
    if situation.gpus and not situation.slack:
        yield Lever(
            name="the input held back while a step is launched",
            settings={"train.feed.slack": True},
            part="input",
            by_speed=True,
            why="what launches the step's kernels has the CPU to itself",
        )


def _bytes(situation: Situation) -> Iterator[Lever]:
    if situation.byte_features:
        yield Lever(
            name=f"{', '.join(situation.byte_features)} sent as uint8",
            settings={"train.feed.uint8": dict(situation.byte_features)},
            part="input",
            by_speed=True,
            why="a quarter of the bytes is kept, copied and sent to the device",
        )


def _python(situation: Situation) -> Iterator[Lever]:
    for length in sorted({min(length, situation.per_epoch) for length in CALL_LENGTHS}):
        if situation.steps_per_call < length:
            yield Lever(
                name=f"{length} steps a call",
                settings={"train.steps_per_call": length},
                part="python",
                why="Python is run once a call",
            )


def _step(situation: Situation) -> Iterator[Lever]:
    other = other_precision(situation)
    yield Lever(
        name=f"precision {other}",
        settings={"train.precision": other},
        part="step",
        changes_numbers=True,
        why="products of matrices in fewer bits move half the bytes"
        if other != "float32"
        else "this device computes float32 faster than what was asked for",
    )
    if not situation.string_features:
        yield Lever(
            name="no XLA" if situation.xla else "XLA",
            settings={"train.xla": not situation.xla},
            part="step",
            changes_numbers=True,
            why="operations are fused"
            if not situation.xla
            else "TensorFlow's own kernels are tried",
        )


def _strategy(situation: Situation) -> Iterator[Lever]:
    """One device instead of several, or the other way round; samples of a step stay as many."""
    if situation.strategy == "mirrored" and situation.replicas > 1:
        whole = situation.batch_size * situation.replicas
        yield Lever(
            name="one device",
            settings={"train.strategy": "one_device", "train.replicas": "auto"}
            | ({"train.batch_size": whole} if situation.batch_is_set else {}),
            part="step",
            changes_numbers=True,
            why="no gradients are exchanged",
        )
    shares = situation.batch_size % max(1, situation.gpus) == 0
    if situation.strategy == "one_device" and situation.gpus > 1 and shares:
        part = situation.batch_size // situation.gpus
        yield Lever(
            name=f"mirrored over {situation.gpus} GPUs",
            settings={"train.strategy": "mirrored"}
            | ({"train.batch_size": part} if situation.batch_is_set else {}),
            part="step",
            changes_numbers=True,
            why="each GPU computes a part of a step",
        )


def _exchange(situation: Situation) -> Iterator[Lever]:
    if situation.replicas > 1 and situation.reduction_dtype == "float32":
        yield Lever(
            name="gradients sent as bfloat16",
            settings={"train.reduction_dtype": "bfloat16"},
            part="step",
            changes_numbers=True,
            why="half the bytes go between replicas",
        )


PACKS = (2, 8)
"""Into how many packs gradients are cut for trial."""

LEAST_PACK_BYTES = 2**20
"""A smaller pack costs its own start more than it wins."""


def _packs(situation: Situation) -> Iterator[Lever]:
    """Send what is there; XLA gives all gradients at once, and accumulation at the end."""
    at_once = situation.xla or situation.accumulate > 1
    if situation.replicas == 1 or situation.reduction_bytes_per_pack or at_once:
        return
    for count in PACKS:
        size_bytes = math.ceil(situation.gradient_bytes / count)
        if size_bytes >= LEAST_PACK_BYTES:
            yield Lever(
                name=f"gradients sent in {count} packs",
                settings={"train.reduction_bytes_per_pack": size_bytes},
                part="step",
                # The sum of two numbers has one order.
                changes_numbers=situation.replicas > 2,
                only_for="communication",
                why="the first ones go between replicas while the others are still computed",
            )


def _passes(situation: Situation) -> Iterator[Lever]:
    """Exchange less often; a batch of the user's own is only cut by it, and is not exchanged less."""
    if situation.replicas > 1 and situation.accumulate == 1 and situation.batch_is_set:
        yield Lever(
            name=f"{LARGER} passes an update",
            settings={"train.accumulate": LARGER},
            part="step",
            changes_numbers=True,
            only_proposed=True,
            only_for="communication",
            why=f"gradients go between replicas once for {LARGER} times the samples; fewer updates an "
            "epoch, so the learning rate and the epochs are to be chosen again",
        )


def _threads(situation: Situation) -> Iterator[Lever]:
    if situation.gpus or situation.cores < 2:
        return
    threads = situation.cores // 2
    if situation.intra_op_threads is None:
        yield Lever(
            name=f"{threads} thread{'s' * (threads > 1)} for an operation",
            settings={"train.intra_op_threads": threads},
            part="step",
            changes_numbers=True,
            why="small operations are not cut up, and cores are left to the input",
        )
    # Replicas wait for each other, each on a thread of its own.
    if situation.inter_op_threads is None and situation.replicas == 1:
        yield Lever(
            name=f"{threads} operation{'s' * (threads > 1)} at once",
            settings={"train.inter_op_threads": threads},
            part="step",
            changes_numbers=True,
            why="operations do not take each other's cores and caches",
        )


def other_precision(situation: Situation) -> str:
    """The precision that a step is compared in: float32, or what the device is made for beside it."""
    if situation.precision != "float32":
        return "float32"
    if situation.gpus and not situation.bfloat16:
        return "mixed_float16"
    return "mixed_bfloat16"


def _batch(situation: Situation) -> Iterator[Lever]:
    if situation.accumulate > 1:
        whole = situation.batch_size * situation.accumulate
        yield from _also_computed_again(
            Lever(
                name="no accumulation: the whole batch in one pass",
                settings={"train.batch_size": whole, "train.accumulate": 1}
                if situation.batch_is_set
                else {"train.accumulate": 1},
                part="step",
                changes_numbers=True,
                why="one pass over as many samples",
            ),
            situation,
        )
    key = "train.batch_size" if situation.batch_is_set else "data.pipeline.batch_size"
    yield from _also_computed_again(
        Lever(
            name=f"{LARGER} times the batch",
            settings={key: LARGER * situation.batch_size},
            part="step",
            changes_numbers=True,
            only_proposed=True,
            why="more samples for each step's fixed cost; fewer updates an epoch, so the learning "
            "rate and the epochs are to be chosen again",
        ),
        situation,
    )


def _also_computed_again(lever: Lever, situation: Situation) -> Iterator[Lever]:
    """A lever that needs memory; where that is too little, with rematerialisation."""
    yield lever
    if situation.blocks:
        yield replace(
            lever,
            name=f"{lever.name}, with rematerialisation",
            settings=dict(lever.settings) | {"train.remat": list(situation.blocks)},
            why=f"{lever.why}; what is inside of {', '.join(situation.blocks)} is computed again "
            "for the gradient, for the memory that this takes",
            changes_numbers=True,
            after_memory_of=lever.name,
        )


EXHAUSTED = 0.8
"""Of the cores' time: where training uses so much of it, no thread more makes batches faster."""


def data_service(situation: Situation, *, cores_used: float, busy_fraction: float) -> Lever | None:
    """Make batches on other machines; None where that is no remedy for an input that is waited for.

    Args:
        situation: What is set.
        cores_used: CPU seconds of training by second, mean.
        busy_fraction: U.

    Returns:
        A lever that cannot be tried here: it needs the other machines.
    """
    exhausted = cores_used >= EXHAUSTED * situation.cores
    if situation.own_dataset or situation.service or not exhausted:
        return None
    return Lever(
        name="make batches on other machines",
        settings={},
        part="input",
        only_proposed=True,
        why=f"not tried, it needs other machines: training uses {cores_used:.1f} of this machine's "
        f"{situation.cores} cores, and waits for its input nevertheless. `stoker data-service start` "
        "makes batches elsewhere, data.service.address reads them; at most "
        f"{1 / busy_fraction:.2g} times as fast, where the step is all that is left",
    )
