"""Map tokens to ids by learned vocabularies, or by tables of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.data.features.preprocessing.tft_arguments import IGNORED, accepts
from stoker.data.features.preprocessing.trace import (
    Domain,
    Trace,
    VocabularyFile,
    active,
    required,
    required_whole,
)

_OF_VOCABULARIES = {
    **dict.fromkeys(
        ("weights", "labels", "min_diff_from_avg", "coverage_top_k", "coverage_frequency_threshold")
    ),
    **dict.fromkeys(("key_fn", "reserved_tokens")),
    **dict.fromkeys(("use_adjusted_mutual_info", "fingerprint_shuffle", "store_frequency"), False),
    **dict.fromkeys(("file_format", "name"), IGNORED),
}
"""Further arguments of TensorFlow Transform's vocabularies; see `accepts`. All are keyword-only, as in the original."""


@accepts(**_OF_VOCABULARIES)
def compute_and_apply_vocabulary(
    x: tf.Tensor,
    *,
    default_value: int = -1,
    top_k: int | None = None,
    frequency_threshold: int | None = None,
    num_oov_buckets: int = 0,
    vocab_filename: str | None = None,
) -> tf.Tensor:
    """Learn the distinct tokens of x, and map each to its id.

    Args:
        x: [batch, ...] strings or integers.
        default_value: The id of unknown tokens if `num_oov_buckets` is 0.
        top_k: Maximum number of terms, the most frequent; by default, all are kept.
        frequency_threshold: Minimum number of occurrences of a term; rarer tokens are left out.
        num_oov_buckets: Number of further ids, after the vocabulary's, to which unknown tokens are hashed.
        vocab_filename: Name of the vocabulary; by default `vocab_` and a number.

    Returns:
        A tensor of x's shape, int64. Id 0 is the most frequent term; equally frequent terms are in
        descending byte order. An empty string (missing) is out of vocabulary. A token that contains a line
        break is a normal term: the vocabulary's file, which has one term per line, holds it escaped.

    Raises:
        ConfigError: an option is negative; the name is used already, or is not a plain file name.

    Source: `tft.compute_and_apply_vocabulary`.
    """
    deferred = vocabulary(
        x, top_k=top_k, frequency_threshold=frequency_threshold, vocab_filename=vocab_filename
    )
    return apply_vocabulary(
        x, deferred, default_value=default_value, num_oov_buckets=num_oov_buckets
    )


@accepts(**_OF_VOCABULARIES)
def vocabulary(
    x: tf.Tensor,
    *,
    top_k: int | None = None,
    frequency_threshold: int | None = None,
    vocab_filename: str | None = None,
) -> tf.Tensor:
    """Learn the distinct tokens of x; see `compute_and_apply_vocabulary`.

    Returns:
        A scalar string tensor that represents the vocabulary; pass it to `apply_vocabulary`.

    Source: `tft.vocabulary`.
    """
    trace = required("vocabulary", x)
    _require_tokens("vocabulary", x)
    for name, value in (("top_k", top_k), ("frequency_threshold", frequency_threshold)):
        if value is not None:
            required_whole(name, value, least=0)
    call = trace.request(
        "vocabulary",
        x,
        top_k=top_k,
        frequency_threshold=frequency_threshold,
        vocab_filename=_required_name(trace, vocab_filename),
    )
    deferred = tf.strings.as_string(trace.calls[call].placeholder)
    trace.vocabularies[deferred.ref()] = call
    return deferred


@accepts(lookup_fn=None, file_format=IGNORED, name=IGNORED)
def apply_vocabulary(
    x: tf.Tensor,
    deferred_vocab_filename_tensor: tf.Tensor,
    *,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> tf.Tensor:
    """Map the tokens of x to ids of a vocabulary that `vocabulary` learned.

    Args:
        x: [batch, ...] strings or integers.
        deferred_vocab_filename_tensor: The result of `vocabulary`.
        default_value: The id of unknown tokens if `num_oov_buckets` is 0.
        num_oov_buckets: Number of further ids, after the vocabulary's, to which unknown tokens are hashed.

    Returns:
        A tensor of x's shape, int64.

    Source: `tft.apply_vocabulary`.
    """
    trace = required("apply_vocabulary", x)
    _require_tokens("apply_vocabulary", x)
    required_whole("num_oov_buckets", num_oov_buckets, least=0)
    required_whole("default_value", default_value, least=-(2**63))
    call = _vocabulary_call(trace, deferred_vocab_filename_tensor)
    file: VocabularyFile | None = trace.answer(call)
    if file is None:
        pending = tf.cast(trace.calls[call].placeholder, tf.int64)
        return tf.zeros_like(x, tf.int64) + pending
    keys = x if x.dtype in (tf.string, tf.int64) else tf.cast(x, tf.int64)
    if file.escaped and keys.dtype == tf.string:
        keys = _escaped(keys)
    table = trace.track(
        lambda: file_table(
            file,
            key_dtype=keys.dtype,
            default_value=default_value,
            num_oov_buckets=num_oov_buckets,
        )
    )
    ids = table.lookup(keys)
    size = file.terms + num_oov_buckets
    trace.domains[ids.ref()] = Domain(
        num_buckets=size if num_oov_buckets else max(size, default_value + 1),
        vocabulary=file.name,
        terms=file.terms,
    )
    return ids


def make_and_track_object(trackable_factory_callable: Callable[[], Any]) -> Any:
    """Create a table or another trackable once, so that it is saved with the graph.

    Args:
        trackable_factory_callable: Function that creates and returns it, e.g. a `tf.lookup.StaticHashTable`.

    Source: `tft.make_and_track_object`.
    """
    trace = active()
    if trace is None:
        raise ConfigError(
            "stoker.transform.make_and_track_object must be called inside preprocessing_fn",
            got=Plain("a call while no transform is being built"),
        )
    return trace.track(trackable_factory_callable)


def file_table(
    file: VocabularyFile, *, key_dtype: tf.DType, default_value: int, num_oov_buckets: int
) -> Any:
    """Return a lookup table over a vocabulary's file, which becomes an asset of the SavedModel."""
    initializer = tf.lookup.TextFileInitializer(
        file.path,
        key_dtype=key_dtype,
        key_index=tf.lookup.TextFileIndex.WHOLE_LINE,
        value_dtype=tf.int64,
        value_index=tf.lookup.TextFileIndex.LINE_NUMBER,
    )
    if num_oov_buckets:
        return tf.lookup.StaticVocabularyTable(
            initializer, num_oov_buckets=num_oov_buckets, lookup_key_dtype=key_dtype
        )
    return tf.lookup.StaticHashTable(initializer, default_value=default_value)


def _escaped(x: tf.Tensor) -> tf.Tensor:
    """Escape strings as in an escaped vocabulary; see `stoker.data.features.spec.escaped`."""
    for pattern, rewrite in ((r"\\", r"\\\\"), ("\n", r"\\n"), ("\r", r"\\r")):
        x = tf.strings.regex_replace(x, pattern, rewrite)
    return x


def _vocabulary_call(trace: Trace, deferred: tf.Tensor) -> int:
    call = trace.vocabularies.get(deferred.ref()) if isinstance(deferred, tf.Tensor) else None
    if call is None:
        raise ConfigError(
            "stoker.transform.apply_vocabulary must be given the result of vocabulary()",
            got=Plain(type(deferred).__name__),
            fix="Write apply_vocabulary(x, stoker.transform.vocabulary(y)).",
        )
    return call


def _require_tokens(function: str, x: tf.Tensor) -> None:
    if x.dtype != tf.string and not x.dtype.is_integer:
        raise ConfigError(
            f"stoker.transform.{function} must be given strings or integers",
            got=Plain(x.dtype.name),
            fix="Cast a float column first (tf.strings.as_string, tf.cast).",
        )


def _required_name(trace: Trace, name: str | None) -> str | None:
    if name is None:
        return None
    is_plain = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name)
    if not is_plain or re.fullmatch(r"vocab_\d+", name):
        raise ConfigError(
            "vocab_filename must be a plain file name (letters, digits, dot, dash, underscore), but "
            "not `vocab_` with a number, which is the default name",
            got=name,
            fix="Give it the name of the column, for example.",
        )
    if any(call.params.get("vocab_filename") == name for call in trace.calls):
        raise ConfigError(
            "vocab_filename must be unique within preprocessing_fn",
            got=name,
            fix="Call vocabulary() once, and apply_vocabulary() as many times as needed.",
        )
    return name
