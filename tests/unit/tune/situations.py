"""A situation that tests begin from."""

from stoker.tune.levers import Situation

PLAIN = Situation(
    own_dataset=False,
    passes_agree=False,
    image_store=None,
    decoder="auto",
    made_here=False,
    byte_features={},
    feed_threads=None,
    parallel_batches=None,
    prefetch=None,
    autotune=True,
    slack=False,
    string_features=False,
    gpus=0,
    cores=1,
    intra_op_threads=None,
    inter_op_threads=None,
    replicas=1,
    strategy="one_device",
    reduction_dtype="float32",
    reduction_bytes_per_pack=0,
    gradient_bytes=64 << 20,
    bfloat16=True,
    precision="float32",
    xla=False,
    steps_per_call=1,
    per_epoch=100,
    batch_size=32,
    batch_is_set=True,
    accumulate=1,
    cached=False,
    service=False,
    blocks=(),
)
"""Shards without images, on one core."""
