"""Counts the operations of a model, and measures a device: peak rate, MFU, time by kernel class."""
