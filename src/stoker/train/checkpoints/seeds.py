"""Random number generators outside the model's own seeds.

A layer stores its seed with its weights. Numbers drawn without a seed come from a generator that
Keras keeps per thread; callbacks draw from Python's and NumPy's generators.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from stoker.core.threads import Replaced
from stoker.internals.keras_internals import (
    SeedGenerator,
    global_seed_generator,
    seed_generators,
    use_global_seeds,
)
from stoker.train.model.keras_model import walk_layers

_APART = 0x9E3779B97F4A7C15 >> 1
"""Odd, with bits everywhere: the seeds of replicas are far apart."""


def keras_seeds(strategy: tf.distribute.Strategy) -> SeedGenerator:
    """Return Keras's generator for numbers drawn without a seed, with a state on each replica.

    Args:
        strategy: The strategy whose replicas draw from it.
    """
    with strategy.scope():
        generator = global_seed_generator()
        spread = isinstance(generator.state.value, tf.distribute.DistributedValues)
        if strategy.num_replicas_in_sync > 1 and not spread:
            # It was created outside the scope: replicas would share one variable.
            generator = SeedGenerator(generator.get_config()["seed"])
            use_keras_seeds(generator)
    return generator


def use_keras_seeds(generator: SeedGenerator) -> None:
    """Make this thread draw from a generator; call it first in a function for `strategy.run`.

    A strategy traces each replica in a separate thread, where Keras would create another generator
    inside a `tf.function`, which fails.
    """
    use_global_seeds(generator)


def distinct_replica_seeds(replicas: int) -> AbstractContextManager[None]:
    """Give each replica different random numbers in a step; the first draws as one device would.

    All replicas have the same generator state, so Keras's Dropout would drop the same units of
    corresponding rows on each replica. The states stay equal, and checkpoints store them.

    Args:
        replicas: Number of replicas.
    """
    return nullcontext() if replicas == 1 else _DRAWN_APART


_plain_next = SeedGenerator.next


def _next_of_replica(generator: SeedGenerator, *args: Any, **kwargs: Any) -> tf.Tensor:
    seed = _plain_next(generator, *args, **kwargs)
    context = tf.distribute.get_replica_context()
    return seed if context is None else seed_of_part(seed, context.replica_id_in_sync_group)


def seed_of_part(seed: tf.Tensor, number: Any) -> tf.Tensor:
    """Return the seed with which a part of a step draws; that of part 0 is the seed itself.

    Args:
        seed: [2], a generator's state.
        number: Of the part, scalar: its replica or its virtual worker.
    """
    number = tf.cast(number, seed.dtype)
    own = tf.stack([number * tf.constant(_APART, seed.dtype), tf.zeros_like(number)])
    return tf.bitwise.bitwise_xor(seed, own)


_DRAWN_APART = Replaced(SeedGenerator, next=_next_of_replica)


def seed_states(model: keras.Model, generator: SeedGenerator) -> list[Any]:
    """Return the states of all generators that a step of a model may draw from, Keras's own included.

    Args:
        model: Built.
        generator: From `keras_seeds`.
    """
    layers = [model, *(layer for _, layer in walk_layers(model))]
    states = [generator.state, *(each.state for layer in layers for each in seed_generators(layer))]
    return list({id(state): state for state in states}.values())


def host_seeds() -> dict[str, Any]:
    """Return the states of Python's and NumPy's global generators as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def restore_host_seeds(seeds: dict[str, Any]) -> None:
    """Restore Python's and NumPy's global generators from `host_seeds`."""
    version, words, gauss = seeds["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = seeds["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
