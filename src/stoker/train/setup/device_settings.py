"""Applies the settings for GPU memory, visible GPUs and threads, before TensorFlow is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.core.user_code import first_line
from stoker.train.config import MemoryConfig, TrainConfig


def apply_memory(config: MemoryConfig) -> None:
    """Set which GPUs and how much of their memory TensorFlow uses; call this before it uses its devices.

    Args:
        config: The section `train.memory`.

    Raises:
        ConfigError: A named GPU does not exist, or TensorFlow has already started with other
            settings.
    """
    try:
        _apply(config)
    except ConfigError:
        # Without settings, this must not fail in a process in which TensorFlow has started. The environment
        # of Stoker's processes already enables memory growth.
        if config != MemoryConfig():
            raise


def _apply(config: MemoryConfig) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if config.visible_devices is not None:
        chosen = [gpu for index, gpu in enumerate(gpus) if index in config.visible_devices]
        if len(chosen) != len(config.visible_devices):
            raise ConfigError(
                "train.memory.visible_devices must name GPUs of this machine",
                got=list(config.visible_devices),
                fix=f"It has {len(gpus)}, numbered from 0.",
            )
        _before_tensorflow_begins(tf.config.set_visible_devices, chosen, "GPU")
        gpus = chosen
    for gpu in gpus:
        if config.limit_mb is not None:
            limited = tf.config.LogicalDeviceConfiguration(memory_limit=config.limit_mb)
            _before_tensorflow_begins(tf.config.set_logical_device_configuration, gpu, [limited])
        elif len(logical_gpus(gpu)) < 2:
            _before_tensorflow_begins(tf.config.experimental.set_memory_growth, gpu, config.growth)


def logical_gpus(gpu: Any) -> list[Any]:
    """Return the logical GPUs that `tf.config.set_logical_device_configuration` has created.

    TensorFlow does not allow memory growth on a GPU with logical GPUs.
    """
    return list(tf.config.get_logical_device_configuration(gpu) or [])


def _before_tensorflow_begins(setting: Callable[..., None], *args: Any) -> None:
    try:
        setting(*args)
    except RuntimeError as error:
        raise ConfigError(
            "train.memory must be set before TensorFlow is used in this process",
            got=Plain(first_line(error)),
            fix="Start training in a separate process, and import nothing before it that "
            "computes with TensorFlow.",
        ) from error


def apply_threads(config: TrainConfig) -> None:
    """Set TensorFlow's numbers of threads; call this before TensorFlow computes anything.

    Args:
        config: The section `train`; without a setting, TensorFlow decides.

    Raises:
        ConfigError: TensorFlow has already started with other numbers.
    """
    wanted = {
        "intra": (config.intra_op_threads, tf.config.threading.get_intra_op_parallelism_threads),
        "inter": (config.inter_op_threads, tf.config.threading.get_inter_op_parallelism_threads),
    }
    setters = {
        "intra": tf.config.threading.set_intra_op_parallelism_threads,
        "inter": tf.config.threading.set_inter_op_parallelism_threads,
    }
    for name, (threads, now) in wanted.items():
        if threads is None or now() == threads:
            continue
        try:
            setters[name](threads)
        except RuntimeError as error:
            raise ConfigError(
                f"train.{name}_op_threads must be set before TensorFlow is used in this process",
                got=Plain(first_line(error)),
                fix="Start training in a separate process, and import nothing before it that "
                "computes with TensorFlow.",
            ) from error
