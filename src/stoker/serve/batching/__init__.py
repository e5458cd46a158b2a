"""Joins requests that wait for the same model into one run. A request to an idle model does not wait."""
