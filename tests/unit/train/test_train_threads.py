"""`train.intra_op_threads`: set before TensorFlow begins, and refused after."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stoker.core.errors import ConfigError
from stoker.train.config import TrainConfig

BEFORE = """\
import tensorflow as tf
from stoker.train.config import TrainConfig
from stoker.train.threads import apply_threads
config = TrainConfig(intra_op_threads=1, inter_op_threads=3)
apply_threads(config)
tf.constant(1.0) + 1.0
apply_threads(config)
print(tf.config.threading.get_intra_op_parallelism_threads())
print(tf.config.threading.get_inter_op_parallelism_threads())
from stoker.core.errors import ConfigError
try:
    apply_threads(TrainConfig(intra_op_threads=2))
except ConfigError as error:
    print(error.line())
apply_threads(TrainConfig())
"""


def test_threads_are_set_before_tensorflow_begins_and_not_after() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE], capture_output=True, text=True, check=True
    )

    intra, inter, refused = done.stdout.splitlines()
    assert (intra, inter) == ("1", "3")
    assert refused.startswith("train.intra_op_threads must be set before TensorFlow is used")


@pytest.mark.parametrize("threads", [0, -1, 5000])
def test_a_number_that_cannot_be_is_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=r"train\.intra_op_threads"):
        TrainConfig(intra_op_threads=threads)
