"""A situation that tests begin from, and how they change it."""

from dataclasses import replace
from typing import Any

from stoker.cluster.devices import Devices, Gpu
from stoker.data.ingest import IngestConfig, ServiceConfig
from stoker.data.user_dataset.config import OwnDatasetConfig, PipelineConfig
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.tune.levers import ModelFacts, Situation

PLAIN = Situation(
    train=TrainConfig(),
    data=IngestConfig(source="data.csv"),
    resolved=ResolvedTraining(
        batch_size=32,
        accumulate=1,
        replicas=1,
        workers=1,
        steps_per_call=1,
        precision="float32",
        xla=False,
        strategy="one_device",
        lr_factor=1.0,
        why={},
    ),
    devices=Devices(cpu_cores=1, memory_bytes=1 << 34, gpus=()),
    model=ModelFacts(
        passes_agree=False,
        image_store=None,
        made_here=False,
        byte_features={},
        string_features=False,
        gradient_bytes=64 << 20,
        per_epoch=100,
        blocks=(),
    ),
)
"""Shards without images, on one core."""

OWN_DATASET = OwnDatasetConfig(dataset="model:dataset")
CACHED = replace(OWN_DATASET, pipeline=PipelineConfig(cache="memory"))
SERVED = IngestConfig(source="data.csv", service=ServiceConfig(address="127.0.0.1:5050"))


def gpus(count: int, *, capability: tuple[int, int] = (8, 0)) -> tuple[Gpu, ...]:
    """GPUs of one compute capability."""
    gpu = Gpu(name="GPU", memory_bytes=1 << 34, compute_capability=capability)
    return (gpu,) * count


def changed(situation: Situation, *, data: Any = None, **values: Any) -> Situation:
    """The situation with other values of the fields of its parts, by name."""
    feed, parts = situation.train.feed, {}
    for part in ("train", "resolved", "devices", "model"):
        old = getattr(situation, part)
        found = {name: value for name, value in values.items() if hasattr(old, name)}
        if part == "train":
            # `resolved` has these too, and there they count.
            found = {n: v for n, v in found.items() if not hasattr(situation.resolved, n)}
            of_feed = {n: v for n, v in values.items() if hasattr(feed, n)}
            found |= {"feed": replace(feed, **of_feed)} if of_feed else {}
        parts[part] = replace(old, **found)
    return replace(situation, data=situation.data if data is None else data, **parts)
