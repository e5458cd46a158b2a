"""Calls the user's `build` and checks the model that it returns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.core.multi_output import ONLY
from stoker.core.user_code import call
from stoker.data.user_dataset.features import AnyTransform
from stoker.export.saved_model import input_adapter
from stoker.train.config import Precision
from stoker.train.model.keras_model import output_names, overrides

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A compiled model and a function that maps named features to its input."""

    model: keras.Model
    adapt: Callable[[Mapping[str, tf.Tensor]], Any]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs to which labels refer."""
        names = output_names(self.model)
        return tuple(names) if len(names) > 1 else (ONLY,)

    @property
    def outputs_of_classes(self) -> tuple[str, ...]:
        """Outputs whose loss is not a regression loss."""
        return tuple(output for output in self.outputs if not self.is_regression(output))

    def from_logits(self, output: str = ONLY) -> bool:
        """Return whether the compiled loss of an output expects logits."""
        return any(getattr(loss, "from_logits", False) for loss in self.losses(output))

    def is_regression(self, output: str = ONLY) -> bool:
        """Return whether the compiled loss of an output is a regression loss; the labels do not matter."""
        names = {
            getattr(loss, "name", None) or getattr(loss, "__name__", None) or str(loss)
            for loss in self.losses(output)
        }
        return bool({name.lower().replace("_", "") for name in names} & _REGRESSION_LOSSES)

    def losses(self, output: str = ONLY) -> list[Any]:
        """Return the compiled losses of an output: names, functions or objects, as the user passed them."""
        loss, names = self.model.loss, output_names(self.model)
        if isinstance(loss, Mapping) and output != ONLY:
            loss = loss.get(output, ())
        elif isinstance(loss, list | tuple) and output in names and len(loss) == len(names):
            loss = loss[names.index(output)]
        return list(keras.tree.flatten(loss))


_REGRESSION_LOSSES = {
    *("mse", "meansquarederror", "mae", "meanabsoluteerror", "mape", "msle", "huber", "logcosh"),
    *("meanabsolutepercentageerror", "meansquaredlogarithmicerror", "poisson"),
}
"""Names of Keras's regression losses as in `compile`, in lower case and without underscores."""


def prepare_process(*, precision: Precision, seed: int, deterministic: bool) -> None:
    """Set seeds, dtype policy and determinism for the whole process."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_dtype_policy(precision)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def build_model(build: Callable[..., Any], transform: AnyTransform, *, what: str) -> BuiltModel:
    """Call `build(features)` or `build(features, transform)` and check what it returns.

    Args:
        build: The user's function.
        transform: Has names, dtypes and shapes of the features, and sizes of the vocabularies.
        what: `module:function` of `build`, for messages.

    Raises:
        ConfigError: The function fails, or does not return a compiled `keras.Model` with a loss.
    """
    names = {feature.name: _input_name(feature.name) for feature in transform.features}
    features = {
        feature.name: keras.Input(
            shape=feature.shape, dtype=feature.dtype, name=names[feature.name]
        )
        for feature in transform.features
    }
    arguments = (features, transform.output) if _takes_transform(build) else (features,)
    model = call(build, *arguments, what=what)
    _check(model, what, feature=transform.features[0].name)
    if model.run_eagerly:
        _LOG.warning("compile(run_eagerly=True) has no effect: Stoker compiles every step")
    return BuiltModel(model=model, adapt=input_adapter(model, names))


def _takes_transform(build: Callable[..., Any]) -> bool:
    parameters = inspect.signature(build).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _check(model: object, what: str, *, feature: str) -> None:
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"{what} must return a compiled keras.Model",
            got=Plain(type(model).__name__),
            fix="End it with `model.compile(...)` and `return model`.",
        )
    if not model.compiled or model.optimizer is None:
        raise ConfigError(
            f"{what} must return a model that is compiled with an optimizer and a loss",
            got=Plain("a model that is not compiled"),
            fix='Call `model.compile(optimizer="adam", loss=...)` before `return model`.',
        )
    own = overrides(model)
    if model.loss is None and "compute_loss" not in own:
        _check_without_loss(model, what, feature=feature)
    if type(model).call is keras.Model.call:
        raise ConfigError(
            f"{what} must return a model that can be called: the served model answers what call does",
            got=Plain(f"{type(model).__name__} without call"),
            fix=f"Add to the class: def call(self, inputs), which gets the features as a dict by name, "
            f"inputs[{feature!r}], and returns e.g. the answer of one of its parts.",
        )


def _check_without_loss(model: keras.Model, what: str, *, feature: str) -> None:
    own = overrides(model)
    if "train_step" not in own:
        raise ConfigError(
            f"{what} must return a model that is compiled with a loss",
            got=Plain("no loss"),
            fix='E.g. `model.compile(optimizer="adam", loss="mse")`.',
        )
    if "test_step" not in own:
        raise ConfigError(
            f"{what} must return a model that can be validated",
            got=Plain("an overridden train_step, no loss and Keras's test_step"),
            fix="Add to the class: def test_step(self, data), which returns a dict of what train_step "
            f"measures without training, and name one of it, train.monitor: val_{_measured(model)}. "
            f"data is (features, label), features[{feature!r}]. Or compile the model with a loss.",
        )


def _measured(model: keras.Model) -> str:
    """Return the name of one of the user's metrics, for an example."""
    return next((metric.name for metric in model.metrics if metric.name != "loss"), "loss")


def _input_name(feature: str) -> str:
    # Keras refuses a slash in a layer's name, and accepts all other characters.
    name = feature.replace("/", "_")
    return name if name == feature else f"{name}_{feature.encode().hex()[:12]}"
