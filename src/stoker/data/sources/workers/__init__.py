"""Processes that read many parts of a source in parallel."""
