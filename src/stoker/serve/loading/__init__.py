"""Checks a SavedModel on disk, and loads it into a session."""
