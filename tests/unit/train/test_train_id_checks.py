"""Ids without a row in an Embedding are refused; a lookup that knows few of the values is a warning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from stoker.core.errors import ConfigError, Finding
from stoker.train.setup.id_checks import checked_ids

CITIES = ["Oslo", "Rome", "Bern", "Cork"]


def call(layers: Sequence[Any], values: Any, *, dtype: str) -> list[Finding]:
    """Call a model of these layers, nested in another one, with a feature `city`."""
    inputs = keras.Input((), dtype=dtype, name="city")
    inner = keras.Sequential([keras.Input((), dtype=dtype), *layers])
    model = keras.Model({"city": inputs}, inner(inputs))
    features = {"city": tf.constant(values), "size": tf.zeros(len(values))}
    with checked_ids(features) as found:
        model({"city": features["city"]}, training=False)
    return found


class Subclassed(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.StringLookup(vocabulary=CITIES), keras.layers.Embedding(5, 2)]

    def call(self, features: Any) -> Any:
        x = features["city"]
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize(
    ("layer", "values", "dtype", "share"),
    [
        (keras.layers.StringLookup(vocabulary=CITIES), ["oslo"] * 64, "string", "100%"),
        (keras.layers.StringLookup(vocabulary=CITIES), ["Oslo"] * 20 + ["x"] * 44, "string", "69%"),
        (keras.layers.StringLookup(vocabulary=CITIES), ["Oslo"] * 40 + ["x"] * 24, "string", None),
        (keras.layers.StringLookup(vocabulary=CITIES), ["x"] * 8, "string", "100%"),
        (keras.layers.StringLookup(vocabulary=CITIES), ["x"] * 7, "string", None),
        (keras.layers.StringLookup(vocabulary=CITIES), ["x"] * 9 + ["Oslo"], "string", None),
        (keras.layers.StringLookup(vocabulary=CITIES), [""] * 60 + ["Rome"] * 4, "string", None),
        (
            keras.layers.StringLookup(
                vocabulary=CITIES, num_oov_indices=3, output_mode="multi_hot"
            ),
            ["x"] * 64,
            "string",
            "100%",
        ),
        (keras.layers.IntegerLookup(vocabulary=[1, 2]), [3] * 64, "int64", "100%"),
        (keras.layers.IntegerLookup(vocabulary=[1, 2]), [2] * 64, "int64", None),
        (
            keras.layers.TextVectorization(vocabulary=["oslo", "rome"]),
            ["Oslo in Norway today"] * 16,
            "string",
            "75%",
        ),
        (
            keras.layers.TextVectorization(vocabulary=["oslo", "rome"]),
            ["Oslo, Rome!"] * 16,
            "string",
            None,
        ),
    ],
)
def test_a_lookup_that_knows_few_of_the_values_is_one_warning(
    layer: Any, values: list[Any], dtype: str, share: str | None
) -> None:
    found = call([layer], values, dtype=dtype)

    if share is None:
        assert found == []
    else:
        [warning] = found
        assert warning.message.startswith(f"{share} of the values of 'city' in the first batch")
        assert layer.name in warning.message


def test_a_lookup_in_a_subclassed_model_is_checked_and_restored() -> None:
    before = keras.layers.StringLookup.call, keras.layers.Embedding.call
    features = {"city": tf.constant(["1"] * 40)}

    with checked_ids(features) as found:
        Subclassed()(features)

    [warning] = found
    assert "100% of the values of 'city'" in warning.message
    assert (keras.layers.StringLookup.call, keras.layers.Embedding.call) == before


@pytest.mark.parametrize(
    ("ids", "got", "fix"),
    [
        ([0, 1, -1, 3], "-1 in the first batch of 'city', and 1 of 4 ids", "num_oov_buckets=1"),
        ([0, 1, 4, 7], "7 in the first batch of 'city', and 2 of 4 ids", "input_dim=8"),
    ],
)
def test_an_id_without_a_row_is_refused(ids: list[int], got: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call([keras.layers.Embedding(4, 2, name="places")], ids, dtype="int64")

    assert "layer 'places', an Embedding, has rows for the ids from 0 to 3" in str(refused.value)
    assert got in str(refused.value)
    assert fix in str(refused.value)


def test_ids_that_the_model_makes_positive_pass() -> None:
    shifted = keras.layers.Lambda(lambda ids: ids + 1)

    assert call([shifted, keras.layers.Embedding(5, 2)], np.arange(-1, 4), dtype="int64") == []


def test_a_traced_call_is_not_checked() -> None:
    layer = keras.layers.Embedding(4, 2)
    with checked_ids({}):
        traced = tf.function(layer).get_concrete_function(tf.TensorSpec([None], tf.int64))

    assert traced(tf.constant([3], tf.int64)).shape == (1, 2)
