"""This machine as a target."""
