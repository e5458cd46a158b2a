"""A SavedModel on disk -> a checked session."""
