"""Make batches from shards; the order of rows is a pure function of seed, epoch and position."""
