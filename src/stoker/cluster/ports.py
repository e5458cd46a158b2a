"""Whether a port is free, asked without opening it."""

from __future__ import annotations

import os
import socket


def why_taken(port: int) -> str | None:
    """Why a server of TensorFlow could not have a port to itself; None where it could.

    TensorFlow binds all addresses, and would share a port silently (SO_REUSEPORT). The probe is
    bound and does not listen: it opens nothing, and fails where something listens.
    """
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - what TensorFlow will take
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
    return None
