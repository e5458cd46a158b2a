"""Captures and restores random number generators that are not part of the model.

A layer stores its seed with its weights. Random numbers without a seed come from a generator that
Keras keeps for each thread. Callbacks draw from Python's and NumPy's generators.
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
"""The seed of a part is XORed with this number times the part's number: its bits are set everywhere, so
the seeds of parts are far apart."""


def keras_seeds(strategy: tf.distribute.Strategy) -> SeedGenerator:
    """Return Keras's generator for random numbers without a seed, with a state on each replica.

    Args:
        strategy: The strategy whose replicas draw from the generator.
    """
    with strategy.scope():
        generator = global_seed_generator()
        spread = isinstance(generator.state.value, tf.distribute.DistributedValues)
        if strategy.num_replicas_in_sync > 1 and not spread:
            # Keras created it outside the strategy's scope, so replicas would share its variable.
            generator = SeedGenerator(generator.get_config()["seed"])
            use_keras_seeds(generator)
    return generator


def use_keras_seeds(generator: SeedGenerator) -> None:
    """Make this thread draw its unseeded random numbers from a generator.

    Call it at the start of a function for `strategy.run`: a strategy traces each replica in a separate
    thread, where Keras would create another generator inside a `tf.function`, which fails.
    """
    use_global_seeds(generator)


def distinct_replica_seeds(replicas: int) -> AbstractContextManager[None]:
    """Give each replica different random numbers in a step; the first replica draws the same as one device.

    All replicas have the same state of the generator, so without this, Keras's Dropout would drop the
    same units on each replica. The states stay equal, and checkpoints store them.

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
    """Return the seed with which a part of a step draws; part 0 draws with `seed` itself.

    Args:
        seed: [2] state of a generator.
        number: Number of the part, a scalar: the index of the replica or the virtual worker.
    """
    number = tf.cast(number, seed.dtype)
    own = tf.stack([number * tf.constant(_APART, seed.dtype), tf.zeros_like(number)])
    return tf.bitwise.bitwise_xor(seed, own)


_DRAWN_APART = Replaced(SeedGenerator, next=_next_of_replica)


def seed_states(model: keras.Model, generator: SeedGenerator) -> list[Any]:
    """Return the states of all generators from which a model's step may draw, including Keras's own.

    Args:
        model: The built model.
        generator: Keras's own generator, the result of `keras_seeds`.
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
    """Restore the states of Python's and NumPy's global generators from the result of `host_seeds`."""
    version, words, gauss = seeds["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = seeds["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
