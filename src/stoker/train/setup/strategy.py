"""Creates the strategies of tf.distribute, by name: the devices that share a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.core.user_code import first_line
from stoker.train.config import StrategyName, TrainConfig
from stoker.train.setup.device_settings import apply_memory, apply_threads, logical_gpus

_LOG = logging.getLogger(__name__)

TPU_UNTESTED = "train.strategy: tpu is written to TensorFlow's documented interface and was not run on hardware"
"""Warning for users of a TPU."""

PACKS_WITHOUT_EFFECT = (
    "train.reduction_bytes_per_pack is without effect: one replica sends no gradients"
)
"""Warning if train.reduction_bytes_per_pack is set but there is only one replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A strategy, and the rank of this process in it."""

    name: StrategyName
    """Name of the strategy in the settings."""

    strategy: tf.distribute.Strategy
    """TensorFlow's strategy; for one device, its default strategy."""

    replicas: int = 1
    """Number of copies of the model, over all workers."""

    worker: int = 0
    """Rank of this process."""

    workers: int = 1
    """Number of processes that train together."""

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the shared files."""
        return self.worker == 0

    @property
    def local_replicas(self) -> int:
        """Number of copies of the model in this process."""
        return self.replicas // self.workers

    @property
    def shares_batches(self) -> bool:
        """Whether each replica gets a share of a batch, and gradients are summed over the replicas."""
        return self.replicas > 1 or self.takes_whole_batches

    @property
    def takes_whole_batches(self) -> bool:
        """Whether the strategy gives each replica a fixed number of rows, as a TPU requires.

        With other strategies, all replicas get the whole element, and each cuts out its share, of any size.
        """
        return self.name == "tpu"

    def spread(self, batches: tf.data.Dataset[Any]) -> Any:
        """Return the training batches in the form that the compiled step needs."""
        if not self.takes_whole_batches:
            return batches
        return self.strategy.experimental_distribute_dataset(batches)


def make_distribution(
    name: StrategyName, *, replicas: int, reduction_bytes_per_pack: int = 0
) -> Distribution:
    """Create a strategy; with several workers, call this before any other TensorFlow operation.

    Args:
        name: Name of the strategy. Several workers find each other through `TF_CONFIG`.
        replicas: Number of copies of the model in this process: one per GPU, or one per core of a TPU.
            Without GPUs, the CPU is split into this many logical devices, to try a strategy on a laptop.
        reduction_bytes_per_pack: Minimum size of a pack of gradients, bytes; 0: a single pack. It applies
            to the gradients of a user-defined `train_step` between workers; Stoker's own step sets the
            size itself.

    Raises:
        ConfigError: The devices do not exist, or TensorFlow already uses them.
    """
    made = _make(name, replicas=replicas, packs=in_packs(reduction_bytes_per_pack))
    if reduction_bytes_per_pack and made.replicas == 1:
        _LOG.warning("%s", PACKS_WITHOUT_EFFECT)
    return made


def in_packs(size_bytes: int) -> tf.distribute.experimental.CommunicationOptions:
    """Return the options for a reduction that sends tensors in packs.

    Args:
        size_bytes: Minimum size of a pack, bytes; 0: a single pack.
    """
    return tf.distribute.experimental.CommunicationOptions(bytes_per_pack=size_bytes)


def _make(
    name: StrategyName,
    *,
    replicas: int,
    packs: tf.distribute.experimental.CommunicationOptions,
) -> Distribution:
    if name == "mirrored":
        return _mirrored(replicas)
    if name == "multi_worker":
        return _multi_worker(replicas, packs)
    if name == "tpu":
        return _tpu("", replicas=replicas)
    if name == "parameter_server":
        raise RuntimeError("a parameter server has a separate loop: stoker.train.parameter_server")
    return Distribution(name=name, strategy=tf.distribute.get_strategy())


def claim_devices(config: TrainConfig) -> None:
    """Configure TensorFlow's devices before a stage uses them.

    If TensorFlow has started and a setting can no longer be applied, training itself reports this later.

    Args:
        config: The section `train`: memory, threads and the number of replicas.
    """
    with suppress(ConfigError):
        apply_memory(config.memory)
    with suppress(ConfigError):
        apply_threads(config)
    cuts = config.strategy in ("auto", "mirrored", "multi_worker") and config.replicas != "auto"
    if cuts and not tf.config.list_physical_devices("GPU"):
        with suppress(ConfigError):
            _split_cpu(int(config.replicas))


def one_device() -> Distribution:
    """Return the strategy for one device."""
    return make_distribution("one_device", replicas=1)


def _mirrored(replicas: int) -> Distribution:
    devices = _local_devices(replicas)
    # TensorFlow chooses the reduction: NCCL with GPUs, a ring between logical CPU devices.
    return Distribution(
        name="mirrored",
        strategy=tf.distribute.MirroredStrategy(devices=devices),
        replicas=len(devices),
    )


def _local_devices(replicas: int) -> list[str]:
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        there = sum(len(logical_gpus(gpu)) or 1 for gpu in gpus)
        if replicas > there:
            raise ConfigError(
                "train.replicas must be at most the number of GPUs",
                got=replicas,
                fix=f"This machine has {there}.",
            )
        return [f"GPU:{index}" for index in range(replicas)]
    _split_cpu(replicas)
    return [f"CPU:{index}" for index in range(replicas)]


def _split_cpu(parts: int) -> None:
    if parts == 1:
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    there = tf.config.get_logical_device_configuration(cpu)
    if there is not None and len(there) >= parts:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(parts)]
        )
    except RuntimeError as error:
        raise ConfigError(
            f"{parts} logical CPU devices must be created before TensorFlow is used",
            got=Plain(first_line(error)),
            fix="Run this experiment in a separate process.",
        ) from error


def _multi_worker(
    replicas: int, options: tf.distribute.experimental.CommunicationOptions
) -> Distribution:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        _split_cpu(replicas)
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except (RuntimeError, ValueError, tf.errors.OpError) as error:
        raise ConfigError(
            "workers must connect to each other through TF_CONFIG before TensorFlow is used",
            got=Plain(first_line(error)),
            fix="`stoker train --workers N` starts them; see docs/how-to/multi-worker.md.",
        ) from error
    resolver = strategy.cluster_resolver
    cluster = resolver.cluster_spec().as_dict()
    return Distribution(
        name="multi_worker",
        strategy=strategy,
        replicas=strategy.num_replicas_in_sync,
        worker=_rank(resolver),
        workers=max(1, len(cluster.get("chief", [])) + len(cluster.get("worker", []))),
    )


def _rank(resolver: Any) -> int:
    """Return the rank of this process: a chief has rank 0, followed by the workers."""
    if not resolver.task_type:
        return 0
    chiefs = len(resolver.cluster_spec().as_dict().get("chief", []))
    return int(resolver.task_id) + (0 if resolver.task_type == "chief" else chiefs)


def _tpu(
    name: str,
    *,
    replicas: int,
    make_resolver: Callable[..., Any] = tf.distribute.cluster_resolver.TPUClusterResolver,
    connect: Callable[[Any], None] = tf.config.experimental_connect_to_cluster,
    initialize: Callable[[Any], Any] = tf.tpu.experimental.initialize_tpu_system,
    make_strategy: Callable[[Any], Any] = tf.distribute.TPUStrategy,
) -> Distribution:
    """Connect to a TPU as in TensorFlow's guide; this was not run on hardware.

    Source: tensorflow.org/guide/tpu, "TPU initialization".
    """
    try:
        resolver = make_resolver(tpu=name)
    except ValueError as error:
        raise ConfigError(
            "train.strategy: tpu needs a TPU that this machine can reach",
            got=Plain(first_line(error)),
            fix="Set TPU_NAME, or use another strategy.",
        ) from error
    connect(resolver)
    initialize(resolver)
    strategy = make_strategy(resolver)
    if strategy.num_replicas_in_sync != replicas:
        raise ConfigError(
            "train.replicas must be the number of the TPU's cores",
            got=replicas,
            fix=f"This TPU has {strategy.num_replicas_in_sync}.",
        )
    if strategy.extended.num_hosts > 1:
        raise ConfigError(
            "train.strategy: tpu needs a TPU of one host, which reads the data",
            got=Plain(f"{strategy.extended.num_hosts} hosts"),
            fix="Use a smaller slice of the TPU.",
        )
    _LOG.warning("%s", TPU_UNTESTED)
    return Distribution(name="tpu", strategy=strategy, replicas=replicas)
