"""Prepares a run before its first step: model, strategy, devices and feeds, with their checks."""
