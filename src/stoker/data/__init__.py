"""Raw bytes -> checked records -> shards -> the model's inputs -> batches."""
