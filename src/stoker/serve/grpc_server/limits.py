"""The limits of the gRPC server for frames, streams, calls and connections.

The constants are fixed. `ServerLimits` holds the limits that the configuration and gRPC's own channel
arguments set.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from stoker.core.errors import ConfigError
from stoker.serve.limits import HttpLimits

MAX_FRAME_BYTES = 1 << 20
"""Largest frame that is accepted: an image is one frame or a few."""

STREAM_WINDOW = 8 << 20
"""Bytes that a client may send on a stream before the server sends a window update."""

CONNECTION_WINDOW = 64 << 20
"""The same for all streams of a connection together."""

MAX_PINGS = 100
"""Pings and settings frames that a client may send between two responses, each acknowledged by the server;
one more is allowed after each `PING_REFILL_S`."""

PING_REFILL_S = 1.0
"""Seconds after which one more ping is allowed."""

MAX_SETTINGS = 32
"""Most settings in one frame; the protocol defines six."""

MAX_EARLY_RESETS = 1000
"""Streams that a client may reset in a second, each within `EARLY_RESET_S` of its start."""

EARLY_RESET_S = 0.05
"""A stream that is reset sooner than this after its start counts against `MAX_EARLY_RESETS`, seconds."""

MIN_PROGRESS_BYTES = 16 << 10
"""What a client must read of a blocked response within `HttpLimits.send_s`."""

CACHED_BLOCKS = 64
"""Most header blocks that are cached per connection."""

CACHED_BLOCK_BYTES = 1024
"""Largest cached header block, with its decoded form: a few bytes of HPACK may stand for thousands."""

MAX_STATUS_MESSAGE = 4096
"""Longest status message, percent-encoded: all trailers must fit into one frame of any client."""

SMALL_CALL_BYTES = 64 << 10
"""Bytes of messages that a call may always hold, whatever other calls hold."""

MIN_RECEIVE_BYTES_PER_S = 64 << 10
"""Slowest accepted upload of a large message, after its first `HttpLimits.body_s` seconds."""

INLINE_BYTES = 16 << 10
"""Largest message that is answered in the event loop, which reads nothing else meanwhile."""

CHECK_S = 1.0
"""Interval of the checks for clients that are too slow or gone, seconds."""

DRAIN_CHECK_S = 0.005
"""Interval of the checks during shutdown whether all calls have ended, seconds."""

UNLIMITED = 2**31 - 1
"""Largest value of gRPC's channel arguments: bytes, milliseconds. For a message it is also TensorFlow
Serving's limit, which is protobuf's own; gRPC in Python would stop at 4 MiB."""

_MIN_HEADER_BYTES, _MAX_HEADER_BYTES = 1 << 10, 1 << 20
"""Range of the limit for headers: those of a plain call take some hundred bytes."""

_MAX_STREAMS = 4096
"""Default of the most concurrent calls of a connection."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """Limits of calls and their connections that can be configured."""

    connection: HttpLimits
    """Limits of a connection, as for REST."""

    in_flight: int
    """Most calls that have a thread or wait for one; another gets RESOURCE_EXHAUSTED."""

    held_bytes: int
    """Most bytes of messages held at once, of all calls together."""

    receive_bytes: int = UNLIMITED
    """Largest message that is accepted."""

    send_bytes: int = UNLIMITED
    """Largest message that is sent."""

    streams: int = _MAX_STREAMS
    """Most concurrent calls of a connection."""

    age_s: float = math.inf
    """How long a connection accepts new calls, seconds; then GOAWAY asks its client to connect again, and a
    load balancer may send it to another server."""

    grace_s: float = math.inf
    """How long running calls may last after that, seconds."""

    idle_s: float = math.inf
    """How long a connection may be without a call, seconds."""

    def with_channel_arguments(self, arguments: Mapping[str, str | int]) -> ServerLimits:
        """Return the limits changed by gRPC's channel arguments; unknown arguments are logged and ignored.

        Raises:
            ConfigError: a value is not a number in the argument's range.
        """
        remaining = dict(arguments)

        def pop(name: str, default: int, *, least: int = 1) -> int:
            value = remaining.pop(name, default)
            if value == -1:  # gRPC's value for "no limit"
                return UNLIMITED
            if not isinstance(value, int) or not least <= value <= UNLIMITED:
                raise ConfigError(
                    f"{name} must be a whole number from {least:,} to {UNLIMITED:,}, or -1",
                    got=value,
                    fix="Correct it in --grpc_channel_arguments.",
                )
            return value

        header_bytes = pop(
            "grpc.max_metadata_size", self.connection.head_bytes, least=_MIN_HEADER_BYTES
        )
        limits = dataclasses.replace(
            self,
            connection=dataclasses.replace(
                self.connection, head_bytes=min(header_bytes, _MAX_HEADER_BYTES)
            ),
            receive_bytes=pop("grpc.max_receive_message_length", self.receive_bytes, least=0),
            send_bytes=pop("grpc.max_send_message_length", self.send_bytes, least=0),
            streams=pop("grpc.max_concurrent_streams", self.streams),
            age_s=pop("grpc.max_connection_age_ms", UNLIMITED) / 1000,
            grace_s=pop("grpc.max_connection_age_grace_ms", UNLIMITED) / 1000,
            idle_s=pop("grpc.max_connection_idle_ms", UNLIMITED) / 1000,
        )
        for name in remaining:
            _log.warning("--grpc_channel_arguments: %s has no effect here", name)
        return limits
