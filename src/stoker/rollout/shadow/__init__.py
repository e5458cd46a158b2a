"""Copies of requests run in a version whose answers nobody gets."""
