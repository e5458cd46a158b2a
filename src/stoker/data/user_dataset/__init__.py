"""A user's own `tf.data.Dataset` in the place of shards and transform."""
