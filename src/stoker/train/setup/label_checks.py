"""Checks before the first step that the labels fit the loss and the last layer.

A loss does not refuse labels outside its range; the model then learns nonsense. The labels are known from a
summary of the whole split (`LabelSummary`), and the model's expectations from its compiled loss and last
layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from stoker.core.errors import ConfigError, Finding
from stoker.core.multi_output import ONLY
from stoker.data.features.analysis.label_summary import LabelSummary
from stoker.internals.keras_internals import is_kerass_loss, layer_of
from stoker.train.model.keras_model import is_weighted_metric, output_names, overrides
from stoker.train.setup.build_model import BuiltModel

Summaries = Mapping[str, Mapping[str, LabelSummary]]
"""Split -> output of the model -> summary of its labels."""

MAJORITY = 0.95
"""If a class has at least this share of the samples, a model that always predicts it has a good accuracy."""

_TOLERANCE = 1e-3
"""Maximum deviation from 1 of a sum of probabilities: rounding in float16 is smaller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Selection:
    monitor: str
    """The metric that selects the best epoch."""

    class_weight: Mapping[int, float]
    """Class -> weight of its samples."""

    texts: Collection[str]
    """Outputs whose label consists of the ids of strings."""

    is_weighted: bool
    """Whether the monitored metric counts each row by its weight."""

    has_sample_weight: bool
    """Whether there are sample weights, which the summaries of labels do not contain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """The labels of one output in one split, and the model's expectations."""

    subject: str
    label: LabelSummary
    loss: str
    """Keras's name of the loss, in snake case, e.g. `mean_squared_error`."""

    from_logits: bool
    ignores: int | None
    """The class that the loss ignores; None if it ignores none."""

    units: int | None
    """Number of values of a prediction along the last axis; None if unknown."""

    rank: int | None
    """Number of axes of a prediction, e.g. 1 for a vector; None if unknown."""

    output: str
    """Name of the model's output."""

    activation: str | None
    """Activation of the last layer; None if unknown."""

    selection: _Selection
    """Settings that select the best epoch, and weights of the samples."""

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest label, as text."""
        return (self.label.min or 0.0, self.label.max or 0.0)

    @property
    def one_value(self) -> bool:
        """Whether the label of a row is a single value."""
        return self.label.shape in ((), (1,))

    @property
    def range_text(self) -> str:
        least, most = self.limits
        return f"{self.subject} goes from {least:g} to {most:g}"


def require_labels_that_fit(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Raise an error if the compiled loss cannot learn the labels.

    Args:
        found: The result of `findings`.

    Returns:
        The warnings among the findings.

    Raises:
        ConfigError: The first error among the findings.
    """
    found = tuple(found)
    for finding in found:
        if finding.severity == "error":
            raise ConfigError(finding.message, fix=finding.fix)
    return found


def findings(
    built: BuiltModel,
    labels: Summaries,
    *,
    monitor: str,
    class_weight: Mapping[int, float] | None = None,
    has_sample_weight: bool = False,
    texts: Collection[str] = (),
) -> Iterator[Finding]:
    """Yield every problem with the labels once, errors and warnings.

    A model with a user-defined `train_step` or `compute_loss`, or with a loss that is not Keras's,
    is not checked.

    Args:
        built: The compiled model.
        labels: Summaries of the labels of each split.
        monitor: The metric that selects the best epoch.
        class_weight: Class -> weight.
        has_sample_weight: Whether there are sample weights.
        texts: Outputs whose label consists of the ids of strings.
    """
    selection = _Selection(
        monitor=monitor,
        class_weight=class_weight or {},
        texts=texts,
        is_weighted=is_weighted_metric(built.model, monitor),
        has_sample_weight=has_sample_weight,
    )
    if overrides(built.model) & {"train_step", "compute_loss"}:
        return
    seen: set[tuple[str, str]] = set()
    for split, by_output in labels.items():
        for output, summary in by_output.items():
            for case in _cases(built, output, summary, split=split, selection=selection):
                for finding in _check_case(case, train=split == "train"):
                    if (output, finding.kind) not in seen:
                        seen.add((output, finding.kind))
                        yield finding


def _cases(
    built: BuiltModel, output: str, summary: LabelSummary, *, split: str, selection: _Selection
) -> Iterator[_Case]:
    if not summary.rows or summary.min is None:
        return
    if output == ONLY and len(output_names(built.model)) > 1:
        # Several outputs share the only label, and each of them has its own loss.
        for each in output_names(built.model):
            yield from _cases(built, each, summary, split=split, selection=selection)
        return
    tensor = _symbolic(built.model, output)
    for loss in built.losses(output):
        name = _builtin_name(loss)
        if name is None:
            continue
        yield _Case(
            subject=f"the label of {split}"
            if output == ONLY
            else f"the label of output {output!r} in {split}",
            label=summary,
            loss=name,
            from_logits=bool(getattr(loss, "from_logits", False)),
            ignores=getattr(loss, "ignore_class", None),
            units=None if tensor is None else _units(tensor),
            rank=None if tensor is None else len(tensor.shape) - 1,
            output=output,
            activation=None if tensor is None else _activation(tensor),
            selection=selection,
        )


def answers_one_class(built: BuiltModel, output: str) -> bool:
    """Return whether the model is trained to predict exactly one class per row.

    The loss decides; for a loss that is not Keras's, whether the last layer has a softmax.
    """
    losses = built.losses(output)
    found = [_keras_loss(loss) for loss in losses]
    if any(isinstance(each, _ONE_CLASS) or each in _ONE_CLASS_FUNCTIONS for each in found):
        return True
    if any(_builtin_name(loss) for loss in losses):
        return False
    tensor = _symbolic(built.model, output)
    return tensor is not None and _activation(tensor) == "softmax"


_ONE_CLASS = (keras.losses.CategoricalCrossentropy, keras.losses.CategoricalFocalCrossentropy)
_ONE_CLASS_FUNCTIONS = (
    keras.losses.categorical_crossentropy,
    keras.losses.categorical_focal_crossentropy,
)


def _check_case(case: _Case, *, train: bool) -> Iterator[Finding]:
    if case.activation == "softmax" and case.units == 1:
        yield Finding.error(
            "softmax_of_one",
            "softmax over a single output is always 1",
            "Use activation='sigmoid' for two classes, or one output for each class.",
        )
        return
    if case.rank is not None and case.rank > 1:
        yield Finding.warning(
            "not_evaluated",
            f"the model's output has {case.rank} axes per row: training works, but `stoker evaluate` "
            "rejects the model",
            "Stop after `stoker train`, or reduce the output to one answer per row.",
        )
    rule = _RULES.get(case.loss)
    if rule is not None:
        yield from rule(case)
    if train:
        yield from _balance(case)
        yield from _class_weights(case)
    elif case.label.rows >= MIN_ROWS_JUDGED:
        yield from _one_label(case, "its metrics say nothing")


def _balance(case: _Case) -> Iterator[Finding]:
    label, monitor = case.label, case.selection.monitor
    if label.rows > 1 and len(label.counts or ()) == 1:
        yield from _one_label(case, "there is nothing to learn")
        return
    if label.multi_hot and label.rows >= MIN_ROWS_JUDGED:
        yield from _never_set(case)
    counts = _weighted(label.counts or _zeros_and_ones(label), case.selection)
    value, most = max(counts.items(), key=lambda item: item[1], default=("", 0.0))
    share = most / max(sum(counts.values()), 1)
    watched = case.output == ONLY or f"val_{case.output}_" in monitor
    if monitor.endswith("accuracy") and watched and share >= MAJORITY:
        yield Finding.warning(
            "imbalanced",
            f"{share:.1%} of {case.subject} is {value}, and train.monitor is {monitor}: a model that always "
            f"answers {value} has this accuracy",
            "Set train.monitor to val_loss, or to the AUC.",
        )


def _weighted(counts: Mapping[str, int], selection: _Selection) -> dict[str, float]:
    """Return value -> its count, weighted as in the monitored metric; empty if the weights are unknown."""
    if not selection.is_weighted:
        return {value: float(count) for value, count in counts.items()}
    if selection.has_sample_weight:
        return {}
    weights = {str(key): weight for key, weight in selection.class_weight.items()}
    return {value: count * weights.get(value, 1.0) for value, count in counts.items()}


def _one_label(case: _Case, so: str) -> Iterator[Finding]:
    counts = case.label.counts or {}
    if len(counts) == 1:
        yield Finding.warning(
            "one_label",
            f"{case.subject} is {next(iter(counts))} in every row: {so}",
            "Check how the label is computed, and how the data was split.",
        )


def _zeros_and_ones(label: LabelSummary) -> dict[str, int]:
    """Return how often 0 and 1 occur in all labels of a multi-hot label; empty for other labels."""
    if label.ones is None or not label.multi_hot:
        return {}
    return {"0": label.rows * len(label.ones) - sum(label.ones), "1": sum(label.ones)}


def _never_set(case: _Case) -> Iterator[Finding]:
    never = [str(place) for place, count in enumerate(case.label.ones or ()) if not count]
    if never:
        more = "..." if len(never) > _SHOWN else ""
        yield Finding.warning(
            "never_set",
            f"{len(never)} of {len(case.label.ones or ())} labels of {case.subject} are 0 in every "
            f"row: {', '.join(never[:_SHOWN])}{more}",
            "Remove them, or check how the label is computed.",
        )


def _class_weights(case: _Case) -> Iterator[Finding]:
    weights = case.selection.class_weight
    if weights and case.label.multi_hot:
        yield Finding.error(
            "class_weight",
            f"train.class_weight needs one class per row, but rows of {case.subject} have "
            f"{case.label.least_sum:g} to {case.label.most_sum:g} classes",
            "Weight rows with train.sample_weight, or weight labels in a user-defined loss.",
        )
    counts = case.label.counts
    unknown = [key for key in weights if counts and str(key) not in counts]
    if unknown and case.label.integral:
        yield Finding.warning(
            "class_weight",
            f"train.class_weight has {', '.join(map(str, unknown))}, which {case.subject} never is",
            f"It is one of {', '.join(sorted(counts or (), key=float)[:_SHOWN])}: text is numbered "
            "in the order of transform.classes.",
        )


MIN_ROWS_JUDGED = 30
"""With fewer rows, it may be chance that the eval split has a single class, or that a label is never set."""

_SHOWN = 5
"""Maximum number of values in a message."""


def _binary(case: _Case) -> Iterator[Finding]:
    least, most = case.limits
    if case.units is not None and case.units > 1 and case.one_value and case.rank == 1:
        yield Finding.error(
            "label_shape",
            f"{case.loss} compares each of {case.units} outputs with a label of its own, and a row "
            "has one label",
            _for_class_ids(case),
        )
    elif case.rank == 1 and case.units and case.label.shape not in ((), (1,), (case.units,)):
        yield Finding.error(
            "label_shape",
            f"{case.loss} compares each output with a label of its own: the model gives {case.units} "
            f"values a row, and {case.subject} has {case.label.shape[-1]}",
            f"Give the last layer {case.label.shape[-1]} units.",
        )
    elif least < 0 or most > 1:
        yield Finding.error(
            "label_range",
            f"{case.loss} needs labels from 0 to 1: {case.range_text}",
            _to_zero_and_one(case),
        )
    elif case.activation == "softmax" and case.label.multi_hot:
        yield Finding.warning(
            "several_labels",
            f"the outputs of softmax add up to 1, but rows of {case.subject} have "
            f"{case.label.least_sum:g} to {case.label.most_sum:g} classes",
            "Use activation='sigmoid' if a row may have several classes.",
        )
    yield from _activations(case, "sigmoid")


def _to_zero_and_one(case: _Case) -> str:
    values = sorted(map(float, case.label.counts or ()))
    if len(values) == 2:
        return (
            f"Map {values[0]:g} to 0 and {values[1]:g} to 1 in preprocessing_fn: "
            f"tf.cast(label == {values[1]:g}, tf.int64)."
        )
    if case.label.integral:
        return _for_class_ids(case)
    return 'Scale the label, or use a loss for numbers such as "mse" with a linear output.'


def _for_class_ids(case: _Case) -> str:
    most = int(case.limits[1])
    return (
        f'For class ids use loss="sparse_categorical_crossentropy" and {most + 1} outputs with '
        "softmax."
    )


def _sparse(case: _Case) -> Iterator[Finding]:
    least, most = case.limits
    units = case.units
    one_hot = len(case.label.shape) == case.rank and case.label.shape[-1:] == (units,)
    if units is not None and units > 1 and one_hot:
        yield Finding.error(
            "label_shape",
            f"{case.loss} needs one class id per row: {case.subject} has {units} values per row",
            'Use loss="categorical_crossentropy", or class ids as labels.',
        )
    elif units == 1:
        yield Finding.error(
            "label_shape",
            f"{case.loss} needs one output for each class, and the model has 1",
            f"Give the last layer {int(most) + 1} units, or use binary_crossentropy with sigmoid.",
        )
    elif not case.label.integral:
        yield Finding.error(
            "label_range",
            f"{case.loss} needs class ids, whole numbers from 0: {case.range_text}",
            'Convert it to ids in preprocessing_fn, or use a loss for numbers such as "mse".',
        )
    elif case.ignores is None and (least < 0 or (units is not None and most >= units)):
        yield Finding.error(
            "label_range",
            f"{case.loss} needs class ids from 0 to {'the classes - 1' if units is None else units - 1}"
            f": {case.range_text}",
            _to_ids(case),
        )
    yield from _activations(case, "softmax")


def _to_ids(case: _Case) -> str:
    least, most = case.limits
    if least < 0:
        return "Number the classes from 0 in preprocessing_fn; -1 is what an unknown text becomes."
    if least >= 1 and case.units is not None and most - least < case.units:
        return f"Subtract {least:g} in preprocessing_fn: the classes are numbered from {least:g}."
    return f"Give the last layer {int(most) + 1} units, or number the classes from 0 without gaps."


def _categorical(case: _Case) -> Iterator[Finding]:
    least, most = case.limits
    if case.one_value and case.rank == 1 and case.units is not None and case.units > 1:
        yield Finding.error(
            "label_shape",
            f"{case.loss} needs one value for each class: {case.subject} has one value per row",
            'Use loss="sparse_categorical_crossentropy", or tf.one_hot in preprocessing_fn.',
        )
    elif least < 0 or most > 1:
        yield Finding.error(
            "label_range",
            f"{case.loss} needs probabilities from 0 to 1: {case.range_text}",
            "Make them one-hot, or probabilities that add up to 1.",
        )
    elif not _adds_up(case.label):
        yield Finding.warning(
            "label_sum",
            f"{case.loss} needs labels that add up to 1 in each row: rows of {case.subject} add up to "
            f"{case.label.least_sum:g} to {case.label.most_sum:g}"
            + (", and `stoker evaluate` refuses them" if case.label.multi_hot else ""),
            "Use sigmoid and binary_crossentropy if a row may have several classes.",
        )
    yield from _activations(case, "softmax")


def _adds_up(label: LabelSummary) -> bool:
    if label.least_sum is None or label.most_sum is None:
        return True
    return label.least_sum >= 1 - _TOLERANCE and label.most_sum <= 1 + _TOLERANCE


def _activations(case: _Case, wanted: str) -> Iterator[Finding]:
    """Check that the last layer outputs what the loss expects: probabilities or logits."""
    if case.activation is None:
        return
    if case.from_logits and case.activation in ("sigmoid", "softmax"):
        yield Finding.warning(
            "logits",
            f"{case.loss}(from_logits=True) applies {wanted} to outputs that have it already",
            f"Leave out from_logits=True, or the last layer's activation={case.activation!r}.",
        )
    elif not case.from_logits and case.activation in ("linear", "relu", "tanh"):
        yield Finding.warning(
            "logits",
            f"{case.loss} reads probabilities, and the last layer's activation is "
            f"{case.activation}",
            f"Set activation={wanted!r} there, or from_logits=True in the loss.",
        )


def _hinge(case: _Case) -> Iterator[Finding]:
    least, most = case.limits
    if least < -1 or most > 1 or not case.label.integral:
        yield Finding.error(
            "label_range",
            f"{case.loss} needs labels -1 and 1 (or 0 and 1): {case.range_text}",
            "Map the two classes to -1 and 1 in preprocessing_fn.",
        )


def _not_negative(case: _Case) -> Iterator[Finding]:
    if case.limits[0] < 0:
        yield Finding.error(
            "label_range",
            f"{case.loss} needs labels of 0 or more: {case.range_text}",
            'Use "mse" or "huber" for numbers that can be negative.',
        )
    yield from _numbers(case)


def _numbers(case: _Case) -> Iterator[Finding]:
    """Check labels of a regression loss: refuse only shapes whose mismatch broadcasting would hide; else only warn."""
    least, most = case.limits
    width = case.label.shape[-1] if case.label.shape else 1
    known = case.rank == 1 and len(case.label.shape) <= 1 and case.units is not None
    if known and case.units != width:
        yield Finding.error(
            "label_shape",
            f"{case.loss} compares outputs and labels one by one: the model gives {case.units} "
            f"values a row, and {case.subject} has {width}",
            f"Give the last layer {width} unit(s)"
            + (", or use a loss for classes." if case.label.integral else "."),
        )
    low, high = _VALUE_RANGES.get(case.activation or "", (float("-inf"), float("inf")))
    if least < low or most > high:
        yield Finding.warning(
            "label_range",
            f"{case.activation} in the last layer outputs values from {low:g} to {high:g}: {case.range_text}",
            "Use a linear last layer, or scale the label.",
        )
    yield from _no_quantity(case)


def _no_quantity(case: _Case) -> Iterator[Finding]:
    """Check for labels whose differences or ratios, which the loss computes, have no meaning."""
    most = case.limits[1]
    if case.output in case.selection.texts and case.one_value and most > 1:
        yield Finding.warning(
            "classes_as_numbers",
            f"{case.loss} reads the ids of texts as numbers that have an order: {case.range_text}",
            _for_class_ids(case),
        )
    zeros = (case.label.counts or {}).get("0", 0)
    if case.loss == "mean_absolute_percentage_error" and zeros:
        yield Finding.warning(
            "label_zero",
            f"{case.loss} divides by the label, but {case.subject} is 0 in {zeros:,} rows",
            'Use "mae" or "mse".',
        )


_VALUE_RANGES = {
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "relu": (0.0, float("inf")),
    "softplus": (0.0, float("inf")),
}
"""Activation -> minimum and maximum of its values."""

_RULES: dict[str, Callable[[_Case], Iterator[Finding]]] = {
    **dict.fromkeys(("binary_crossentropy", "binary_focal_crossentropy"), _binary),
    "sparse_categorical_crossentropy": _sparse,
    **dict.fromkeys(
        ("categorical_crossentropy", "categorical_focal_crossentropy", "kl_divergence"),
        _categorical,
    ),
    **dict.fromkeys(("hinge", "squared_hinge"), _hinge),
    **dict.fromkeys(("poisson", "mean_squared_logarithmic_error"), _not_negative),
    **dict.fromkeys(
        (
            *("mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error"),
            *("huber", "log_cosh"),
        ),
        _numbers,
    ),
}
"""Name of one of Keras's losses -> the function that checks its labels."""


def _keras_loss(loss: Any) -> Any:
    """Return the object or function of a loss; None if Keras does not know its name."""
    try:
        return keras.losses.get(loss)
    except (ValueError, TypeError):
        return None


def _builtin_name(loss: Any) -> str | None:
    """Return the name of one of Keras's own losses in snake case; None for other losses."""
    found = _keras_loss(loss)
    kind = found if callable(found) and hasattr(found, "__name__") else type(found)
    if not is_kerass_loss(kind):
        return None
    return _WORDS.sub("_", kind.__name__).lower()


_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Matches the boundary between two words of a class name."""


def _symbolic(model: keras.Model, output: str) -> Any:
    """Return the symbolic output of a functional model; None if unknown."""
    names = output_names(model)
    if not names:
        return None
    tensors = dict(zip(names, keras.tree.flatten(model.output), strict=True))
    return tensors[names[0]] if output == ONLY else tensors.get(output)


def _units(tensor: Any) -> int | None:
    """Return the number of values of a prediction along its last axis; None if unknown."""
    rank = len(tensor.shape)
    return 1 if rank == 1 else tensor.shape[-1]


def _activation(tensor: Any) -> str | None:
    """Return the activation of the layer that computes an output; None if it is not one of Keras's."""
    layer = layer_of(tensor)
    if isinstance(layer, keras.layers.Softmax):
        return "softmax" if layer.axis in (-1, len(tensor.shape) - 1) else None
    activation = getattr(layer, "activation", None)
    name = getattr(activation, "__name__", None)
    return name if isinstance(name, str) else None
