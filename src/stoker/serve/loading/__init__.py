"""Loads a SavedModel from disk into a checked session."""
