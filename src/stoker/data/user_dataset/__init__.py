"""A user's own `tf.data.Dataset` instead of shards and transform."""
