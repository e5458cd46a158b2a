"""Errors that HTTP itself has a status for."""

from __future__ import annotations

import json


class HttpError(Exception):
    """A request that HTTP itself has a status for."""

    def __init__(self, status: int, message: str) -> None:
        """Args: status: the HTTP status; message: one line for the client."""
        self.status = status
        self.body = error_body(message)
        super().__init__(message)


def error_body(message: str) -> str:
    """An error as TensorFlow Serving's clients expect it."""
    return json.dumps({"error": message})
