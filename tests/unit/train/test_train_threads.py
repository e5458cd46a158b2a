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
from stoker.train.setup.device_settings import apply_threads
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


ONE_THREAD = """\
import tensorflow as tf
from stoker.data.feed.options import as_written, with_own_threads
from stoker.train.config import TrainConfig
from stoker.train.step.multi_step import make_multi_step
from stoker.train.step.step_totals import StepResult
from stoker.train.setup.device_settings import apply_threads
apply_threads(TrainConfig(intra_op_threads=1, inter_op_threads=1))

def step(element):
    return StepResult(tf.reduce_sum(element), tf.constant(1.0), tf.constant(True), tf.constant([0, 0]))

def some(x):
    return tf.numpy_function(lambda y: y + 1, [x], tf.float32)

shared = tf.data.Options()
shared.threading.private_threadpool_size = -1
batches = tf.data.Dataset.from_tensors(1.0).repeat().map(some, num_parallel_calls=4)
batches = batches.map(some).prefetch(2)
for each in (as_written(batches), batches, batches.with_options(shared)):
    iterator = iter(with_own_threads(each))
    sums = make_multi_step(step, rows_per_step=None)(iterator, tf.constant(100, tf.int64))
    print(float(sums.loss_sum))
    # Or the input would go on to call Python while Python ends, which sometimes waits for ever.
    del iterator
"""


def test_threads_are_set_before_tensorflow_begins_and_not_after() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE], capture_output=True, text=True, check=True
    )

    intra, inter, refused = done.stdout.splitlines()
    assert (intra, inter) == ("1", "3")
    assert refused.startswith("train.intra_op_threads must be set before TensorFlow is used")


def test_where_one_thread_computes_others_make_the_input() -> None:
    """What computes waits for its batch itself: were that made by the same thread, it would never come."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_THREAD], capture_output=True, text=True, check=True, timeout=120
    )

    assert done.stdout.split() == ["300.0"] * 3
    assert "private_threadpool_size" not in done.stderr, "TensorFlow warns of what is meant"


@pytest.mark.parametrize("threads", [0, -1, 5000])
def test_a_number_that_cannot_be_is_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=r"train\.intra_op_threads"):
        TrainConfig(intra_op_threads=threads)
