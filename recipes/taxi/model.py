"""The tip task of TFX's Chicago taxi example: scaled numbers, vocabularies, buckets and hashes."""

import keras
import tensorflow as tf
from keras import layers

import stoker.transform as st

SCALED = ["fare", "trip_miles", "trip_seconds"]
BUCKETS = {
    "pickup_latitude": 10,
    "pickup_longitude": 10,
    "dropoff_latitude": 10,
    "dropoff_longitude": 10,
}
WHOLE = {  # column -> how many values it can take, and one more for "missing"
    "trip_start_hour": 25,
    "trip_start_day": 9,
    "trip_start_month": 14,
    "pickup_community_area": 79,
    "dropoff_community_area": 79,
}
VOCABULARIES = {"payment_type": 10, "company": 100}
HASHED = {"pickup_census_tract": 64, "dropoff_census_tract": 64}


def preprocessing_fn(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Raw columns -> features and the label; a missing number is NaN, a missing string is ""."""
    outputs = {}
    for name in SCALED:
        outputs[name] = _or_zero(st.scale_to_z_score(tf.math.log1p(tf.nn.relu(inputs[name]))))
    for name, buckets in BUCKETS.items():
        ids = st.bucketize(inputs[name], buckets)
        # A bucket of its own for "missing", which is not a place on the map.
        outputs[name] = tf.where(tf.math.is_nan(inputs[name]), tf.cast(buckets, ids.dtype), ids)
    for name, values in WHOLE.items():
        number = tf.cast(inputs[name], tf.float32)
        missing = tf.math.is_nan(number)
        whole = tf.cast(tf.where(missing, 0.0, number), tf.int64)
        outputs[name] = tf.where(missing, tf.cast(values - 1, tf.int64), whole)
    for name, size in VOCABULARIES.items():
        outputs[name] = st.compute_and_apply_vocabulary(inputs[name], top_k=size, num_oov_buckets=1)
    for name, buckets in HASHED.items():
        tract = tf.strings.as_string(tf.cast(inputs[name], tf.float64), precision=0)
        outputs[name] = st.hash_strings(tract, buckets)
    outputs["big_tip"] = _is_big_tip(inputs["tips"], inputs["fare"])
    return outputs


def _is_big_tip(tips: tf.Tensor, fare: tf.Tensor) -> tf.Tensor:
    # Of a fare of 0 or less there is no share: such a trip counts as one without a big tip.
    return tf.cast((fare > 0) & (tips > 0.2 * fare), tf.int64)


def _or_zero(scaled: tf.Tensor) -> tf.Tensor:
    # 0 is the mean after scaling: "missing" then says nothing.
    return tf.where(tf.math.is_nan(scaled), tf.zeros_like(scaled), scaled)


def build(features: dict[str, keras.KerasTensor], transform: st.TransformOutput) -> keras.Model:
    """The probability of a big tip."""
    sizes = {name: buckets + 1 for name, buckets in BUCKETS.items()} | WHOLE | HASHED
    sizes |= {name: transform.num_buckets(name) for name in VOCABULARIES}
    columns = [keras.ops.expand_dims(features[name], -1) for name in SCALED]
    for name, size in sizes.items():
        columns.append(layers.Embedding(size, 8)(features[name]))
    x = layers.Concatenate()(columns)
    for units in (64, 32):
        x = layers.Dense(units, activation="relu")(x)
    answer = layers.Dense(1, activation="sigmoid", name="probability")(x)

    model = keras.Model(features, answer)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model
