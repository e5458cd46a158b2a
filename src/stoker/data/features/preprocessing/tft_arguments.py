"""Arguments that functions of TensorFlow Transform have, and Stoker's functions of the same name do not need.

An argument that changes nothing here is accepted and ignored (`name`; `epsilon`, because quantiles
are exact). An argument that would change the result is accepted only with its default value; any other
value raises an error that names the argument.

Every function also takes a `tf.RaggedTensor`, and is applied to the values of its lists.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from stoker.core.errors import ConfigError

Result = TypeVar("Result")


class _Ignored:
    """Marks an argument that accepts any value."""


IGNORED: Any = _Ignored()


def accepts(**extra: Any) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Let a function accept more of TensorFlow Transform's arguments.

    Args:
        **extra: Argument -> the only accepted value, or `IGNORED`; in the order in which
            TensorFlow Transform takes them after the function's own positional arguments.
    """

    def extended(function: Callable[..., Result]) -> Callable[..., Result]:
        signature = _with_extra(inspect.signature(function), extra)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise ConfigError(
                    f"stoker.transform.{function.__name__}{signature} takes TensorFlow Transform's "
                    "arguments",
                    got=str(error),
                ) from None
            for name, only in extra.items():
                _require(function.__name__, name, given.pop(name, only), only)
            positional = [given.pop(name) for name in _positional(function) if name in given]
            if isinstance(positional[0], tf.RaggedTensor):
                return _of_lists(function, *positional, **given)
            return function(*positional, **given)

        call.__signature__ = signature  # type: ignore[attr-defined]  # what help() shows
        return call

    return extended


def _of_lists(
    function: Callable[..., Result], lists: tf.RaggedTensor, *args: Any, **kwargs: Any
) -> Any:
    """Apply a function to the values of all lists; a result with one value per input becomes lists again."""
    result: Any = function(lists.flat_values, *args, **kwargs)
    is_mapped = result.shape.rank and result.shape[0] is None
    return lists.with_flat_values(result) if is_mapped else result


def _positional(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def _with_extra(signature: inspect.Signature, extra: dict[str, Any]) -> inspect.Signature:
    own = list(signature.parameters.values())
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if only is IGNORED else only,
        )
        for name, only in extra.items()
    ]
    first = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = [p for p in own if p.kind is not p.POSITIONAL_OR_KEYWORD]
    return signature.replace(parameters=[*first, *added, *rest])


def _require(function: str, name: str, value: Any, only: Any) -> None:
    plain = isinstance(value, bool | int | float | str)
    if only is IGNORED or value is only or (plain and value == only):
        return
    raise ConfigError(
        f"stoker.transform.{function} supports only {name}={only!r}",
        got=value,
        fix=_INSTEAD.get(
            name, f"Leave {name} out; docs/reference/transform.md lists the arguments."
        ),
    )


_INSTEAD = {
    "elementwise": "Make each position of the vector a separate feature, x[:, 0], or leave it out.",
    "reduce_instance_dims": "Reduce over all values, or call it for each position, x[:, 0].",
    "weights": "Leave it out: all rows have equal weight. train.sample_weight weights training.",
    "use_adjusted_mutual_info": "Choose the terms by top_k or frequency_threshold.",
    "labels": "Choose the terms by top_k or frequency_threshold.",
    "key_fn": "Learn a vocabulary for each key: filter the tokens first.",
}
"""Argument -> what to do instead."""

_MISSING = {
    **dict.fromkeys(
        ("scale_to_z_score_per_key", "scale_to_0_1_per_key", "scale_by_min_max_per_key"),
        "Scale over all rows (scale_to_z_score), and return the key as a separate feature.",
    ),
    "bucketize_per_key": "Use bucketize over all rows, and return the key as a separate feature.",
    "count_per_key": "Counts for each value are in the analysis stage: statistics.json.",
    **dict.fromkeys(
        ("sum", "size"), "Use mean, and the counts of rows and values in statistics.json."
    ),
    **dict.fromkeys(
        ("histogram", "estimated_probability_density", "covariance", "pca"),
        "Histograms are in the analysis stage: statistics.json and report.html.",
    ),
    **dict.fromkeys(
        ("ngrams", "bag_of_words", "word_count", "tfidf", "segment_indices"),
        "Use keras.layers.TextVectorization in the model, or tf.strings.ngrams.",
    ),
    "deduplicate_tensor_per_row": "Use tf.unique for each row with tf.map_fn.",
    "apply_buckets_with_interpolation": "Use apply_buckets, or scale_to_0_1.",
    **dict.fromkeys(
        ("scale_to_gaussian", "tukey_location", "tukey_scale", "tukey_h_params"),
        "Use scale_to_z_score of tf.math.log1p(x) for long tails.",
    ),
    **dict.fromkeys(
        ("sparse_tensor_to_dense_with_shape", "sparse_tensor_left_align"),
        "Columns are dense here: a missing value is NaN or an empty string.",
    ),
    "apply_pyfunc": "Use TensorFlow operations: Python is not part of a SavedModel.",
    "annotate_asset": "Files of a tf.lookup table become assets of the SavedModel automatically.",
    **dict.fromkeys(
        ("TFTransformOutput", "TransformFeaturesLayer"),
        "Use the argument `transform` of build(features, transform), a stoker.transform.TransformOutput.",
    ),
    "DatasetMetadata": "The schema is in the analysis stage: schema.json.",
    **dict.fromkeys(
        ("get_analyze_input_columns", "get_transform_input_columns"),
        "The columns that the function reads are in the transform's spec.json.",
    ),
    "get_num_buckets_for_transformed_feature": "Use transform.num_buckets(NAME) in build.",
}
"""Names of TensorFlow Transform that Stoker lacks -> what to use instead."""


class NoSuchFunction(ConfigError, AttributeError):
    """Raised for a name of TensorFlow Transform that Stoker lacks; also an AttributeError, for `hasattr`."""


def missing_function(name: str) -> AttributeError:
    """Return the error for a name that `stoker.transform` does not have."""
    if name in _MISSING:
        return NoSuchFunction(
            f"stoker.transform does not have TensorFlow Transform's {name}",
            fix=_MISSING[name],
        )
    return AttributeError(f"module 'stoker.transform' has no attribute {name!r}")
