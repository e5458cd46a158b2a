"""Refuses a model whose step would depend on the number of workers."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.core.threads import Replaced
from stoker.internals.keras_internals import compute_loss
from stoker.internals.tensorflow_internals import written_resources
from stoker.train.checkpoints.seeds import keras_seeds, seed_states, use_keras_seeds
from stoker.train.health.step_operations import step_operations
from stoker.train.model.keras_model import overrides, update_metrics
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.strategy import Distribution
from stoker.train.step.step import Batch, loss_arguments, unscaled_losses

_DRAWS = re.compile(
    r"Random(Uniform(Int)?|StandardNormal|Shuffle|Gamma|PoissonV2|Poisson)|TruncatedNormal"
    r"|ParameterizedTruncatedNormal|Multinomial|Stateful(Standard|Truncated|Uniform|RandomBinomial).*"
    r"|RngReadAndSkip|RngSkip|NonDeterministicInts"
)
"""Operations of TensorFlow that draw random numbers from a state of the process."""

_CONTEXT = ("get_replica_context", "get_strategy", "has_strategy", "in_cross_replica_context")
"""Functions of `tf.distribute` that tell a layer which replica runs it, how many there are, or whether there are
several."""


def require_elastic_model(built: BuiltModel, batch: Batch, distribution: Distribution) -> None:
    """Trace a training pass, and refuse parts that `VirtualWorkers` cannot make independent of the number of workers.

    Args:
        built: The compiled model, with all its variables.
        batch: A batch in the form that the model needs.
        distribution: The devices that share a step.

    Raises:
        ConfigError: The model has such parts; the error names the layers, metrics, variables or methods, and what
            they do.
    """
    model = built.model
    problems = [*_own_methods(model), *_own_metrics(model)]
    if not problems:
        traced, readers = _trace(built, batch, distribution)
        problems = [*readers, *_draws(traced), *_writes(traced, model, distribution)]
    if problems:
        raise ConfigError(
            "with train.elastic a step must not depend on which worker computes which rows",
            got=Plain(" and ".join(dict.fromkeys(problems))),
            fix="Change the model, or remove train.elastic.",
        )


def _own_methods(model: keras.Model) -> Iterator[str]:
    for name in ("train_step", "compute_metrics"):
        if name in overrides(model):
            yield f"{type(model).__name__}.{name}, which does the work of Stoker's step"


def _own_metrics(model: keras.Model) -> Iterator[str]:
    """Yield metrics that are not Keras's own: the states of Keras's metrics are sums; those of others may not be."""
    for metric in [
        part for each in model.metrics for part in (each, *getattr(each, "metrics", ()))
    ]:
        if not type(metric).update_state.__module__.startswith("keras."):
            yield f"metric {metric.name!r}, whose class {type(metric).__name__} updates its state itself"


def _trace(built: BuiltModel, batch: Batch, distribution: Distribution) -> tuple[Any, list[str]]:
    """Return the traced pass, and the layers and functions that read the context of the replica in it."""
    model, strategy = built.model, distribution.strategy
    seeds = keras_seeds(strategy)
    readers: list[str] = []

    def noted(name: str) -> Any:
        plain = getattr(tf.distribute, name)

        def called() -> Any:
            readers.append(f"{_caller()}, which calls tf.distribute.{name}")
            return plain()

        return called

    # All replicas share this object, because each of them is traced in its own thread.
    watched = Replaced(tf.distribute, **{name: noted(name) for name in _CONTEXT})

    def replica() -> tf.Tensor:
        use_keras_seeds(seeds)
        with watched, unscaled_losses():
            outputs = model(built.adapt(batch[0]), training=True)
            parts = loss_arguments(batch, outputs)
            loss = compute_loss(model, parts, training=True)
            update_metrics(model, parts)
        return tf.cast(loss, tf.float32)

    @tf.function(autograph=False)
    def one_pass() -> Any:
        return strategy.run(replica)

    return one_pass.get_concrete_function(), readers


def _caller() -> str:
    """Return class and name of the layer, metric or loss whose code is running."""
    for frame, _ in traceback.walk_stack(None):
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.layers.Layer | keras.metrics.Metric | keras.losses.Loss):
            return f"{type(owner).__name__} {owner.name!r}"
    return "the model"


def _draws(traced: Any) -> Iterator[str]:
    for operation in step_operations(traced):
        if _DRAWS.fullmatch(operation.kind):
            where = operation.scope or "the model"
            yield f"{where}, which draws by TensorFlow's {operation.kind} instead of keras.random"


def _writes(traced: Any, model: keras.Model, distribution: Distribution) -> Iterator[str]:
    """Yield the variables that a pass writes, without those that become a mean or a sum over virtual workers."""
    strategy = distribution.strategy
    allowed = {
        id(variable.value)
        for variable in [*seed_states(model, keras_seeds(strategy)), *model.metrics_variables]
    }
    known: dict[int, Any] = {}
    for variable in [*model.variables, *model.metrics_variables, keras_seeds(strategy).state]:
        for part in strategy.experimental_local_results(variable.value):
            known[id(part.handle)] = variable
    others = {id(variable.handle): variable for variable in traced.graph.variables}
    for handle in written_resources(traced.graph):
        variable = known.get(id(handle))
        if variable is None:
            if (other := others.get(id(handle))) is not None:
                yield f"variable {other.name.removesuffix(':0')!r}, which is not a weight of a Keras layer"
        elif variable.trainable and id(variable.value) not in allowed:
            yield f"weight {variable.path!r}, which the forward pass changes"
        elif id(variable.value) not in allowed and not tf.as_dtype(variable.dtype).is_floating:
            yield f"state {variable.path!r} of dtype {variable.dtype}, which has no mean"
