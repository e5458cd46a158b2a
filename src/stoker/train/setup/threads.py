"""Sets the number of threads for TensorFlow's operations."""

from __future__ import annotations

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.core.user_code import first_line
from stoker.train.config import TrainConfig


def apply_threads(config: TrainConfig) -> None:
    """Configure TensorFlow; must be called before it computes anything.

    Args:
        config: The section `train`; without a setting TensorFlow decides.

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
