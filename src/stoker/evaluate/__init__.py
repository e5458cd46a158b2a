"""Metrics, slices and gates, computed with the exported SavedModel, never with the model in memory."""
