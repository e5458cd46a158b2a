"""What the model sees of the data: `preprocessing_fn` traced, answered and built as a graph."""
