"""The transform: trace `preprocessing_fn`, compute its analyzers, and save its graph."""
