"""What the levers depend on, as a trial finds it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stoker.app.context import Context
from stoker.tune.levers import Situation

if TYPE_CHECKING:
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.train.config import ResolvedTraining


def situation_of(
    context: Context,
    transform: AnyTransform,
    resolved: ResolvedTraining,
    *,
    model: Any,
    per_epoch: int,
    made_here: bool,
) -> Situation:
    """What can be changed about a training.

    Args:
        context: Of the experiment, as far as it was opened.
        transform: What makes the features.
        resolved: What the `auto`s of `train` became.
        model: The compiled model.
        per_epoch: Steps of an epoch.
        made_here: Whether batches are made by this process, as they are needed.
    """
    from stoker.app.training.stage import service_of
    from stoker.cluster.devices import find_devices
    from stoker.train.config import BFLOAT16_CAPABILITY

    own = context.experiment.own_dataset
    devices, train = find_devices(), context.experiment.train
    gpus = devices.gpus
    return Situation(
        own_dataset=own is not None,
        passes_agree=own is not None and _passes_agree(context),
        image_store=None if own is not None else _store(context.shards().image_store),
        decoder=train.feed.decoder,
        made_here=made_here,
        byte_features={} if train.feed.uint8 else context.results["analyze"].get("bytes", {}),
        feed_threads=train.feed.threads,
        parallel_batches=train.feed.parallel_batches,
        prefetch=train.feed.prefetch,
        autotune=train.feed.autotune,
        slack=train.feed.slack,
        string_features=any(feature.dtype == "string" for feature in transform.features),
        gpus=len(gpus),
        cores=devices.cpu_cores,
        intra_op_threads=train.intra_op_threads,
        inter_op_threads=train.inter_op_threads,
        replicas=resolved.replicas,
        strategy=resolved.strategy,
        reduction_dtype=train.reduction_dtype,
        reduction_bytes_per_pack=train.reduction_bytes_per_pack,
        gradient_bytes=_gradient_bytes(model, train.reduction_dtype),
        bfloat16=all(gpu.compute_capability >= BFLOAT16_CAPABILITY for gpu in gpus),
        precision=resolved.precision,
        xla=resolved.xla,
        steps_per_call=resolved.steps_per_call,
        per_epoch=per_epoch,
        batch_size=resolved.batch_size,
        batch_is_set=own is None,
        accumulate=resolved.accumulate,
        cached=own is not None and own.pipeline.cache == "memory",
        service=service_of(context.experiment, resolved) is not None,
        blocks=() if train.remat else _blocks(model),
    )


def _passes_agree(context: Context) -> bool:
    from stoker.data.user_dataset.feed import passes_agree
    from stoker.data.user_dataset.load_dataset import OwnDataset

    dataset = context.dataset()
    return isinstance(dataset, OwnDataset) and passes_agree(dataset.datasets["train"])


def _blocks(model: Any) -> tuple[str, ...]:
    """Layers right below the model that hold layers themselves."""
    from stoker.train.model.keras_model import walk_layers

    below = [path.split("/")[0] for path, _ in walk_layers(model) if "/" in path]
    return tuple(dict.fromkeys(below))


def _gradient_bytes(model: Any, dtype: str) -> int:
    """Of one exchange between replicas."""
    import tensorflow as tf

    sizes = [weight.shape for weight in model.trainable_variables]
    return sum(math.prod(shape) for shape in sizes) * tf.as_dtype(dtype).size


def _store(told: str | None) -> str | None:
    """`original (as it came)` -> `original`."""
    return None if told is None else told.split()[0]
