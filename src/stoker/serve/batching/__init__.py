"""Joins requests that wait for the same model into one run; a request to an idle model does not wait."""
