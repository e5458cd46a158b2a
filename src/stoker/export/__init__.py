"""Exports a trained model and its transform as a SavedModel, and converts it to other formats."""
