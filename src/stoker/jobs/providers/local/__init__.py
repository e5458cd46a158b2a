"""Runs jobs on this machine."""
