"""A user's own `tf.data.Dataset`, which replaces shards and transform."""
