"""The transform: `preprocessing_fn` traced, its analyzers computed, and its graph saved."""
