"""Requests that wait for the same model are run as one; nothing waits where the model is idle."""
