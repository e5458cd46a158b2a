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
"""Maximum size of an accepted frame, bytes; an image then takes one frame or a few."""

STREAM_WINDOW = 8 << 20
"""Bytes that a client may send on a stream before the server sends a window update."""

CONNECTION_WINDOW = 64 << 20
"""Bytes that a client may send on all streams of a connection before the server sends a window update."""

MAX_PINGS = 100
"""Maximum number of pings and settings frames that a client may send between two responses, since the server
acknowledges each. One more is allowed after each `PING_REFILL_S`."""

PING_REFILL_S = 1.0
"""Seconds after which one more ping is allowed."""

MAX_SETTINGS = 32
"""Maximum number of settings in one frame; the protocol defines six."""

MAX_EARLY_RESETS = 1000
"""Maximum number of streams that a client may reset per second within `EARLY_RESET_S` of their start."""

EARLY_RESET_S = 0.05
"""A reset within this many seconds of the stream's start counts towards `MAX_EARLY_RESETS`."""

MIN_PROGRESS_BYTES = 16 << 10
"""Bytes of a blocked response that a client must read within `HttpLimits.send_s`."""

CACHED_BLOCKS = 64
"""Maximum number of header blocks that are cached per connection."""

CACHED_BLOCK_BYTES = 1024
"""Maximum size of a cached header block with its decoded headers, bytes: a few bytes of HPACK may stand for
thousands."""

MAX_STATUS_MESSAGE = 4096
"""Maximum length of a percent-encoded status message, bytes. All trailers must fit into one frame of any client."""

SMALL_CALL_BYTES = 64 << 10
"""Bytes of messages that a call may always hold, whatever other calls hold."""

MIN_RECEIVE_BYTES_PER_S = 64 << 10
"""Minimum speed at which a client must send a large message, bytes per second, after the first `HttpLimits.body_s`
seconds."""

INLINE_BYTES = 16 << 10
"""Maximum size of a message that is answered in the event loop, bytes. The loop reads nothing else meanwhile."""

CHECK_S = 1.0
"""Seconds between two checks for clients that are too slow or gone."""

DRAIN_CHECK_S = 0.005
"""Seconds between two checks whether all calls have ended, during shutdown."""

UNLIMITED = 2**31 - 1
"""Maximum value of gRPC's channel arguments (bytes or milliseconds). For the size of a message, it is also the limit of
protobuf, and so of TensorFlow Serving; the default of gRPC in Python is 4 MiB."""

_MIN_HEADER_BYTES, _MAX_HEADER_BYTES = 1 << 10, 1 << 20
"""Range of the configurable limit for headers, bytes. The headers of a plain call take a few hundred bytes."""

_MAX_STREAMS = 4096
"""Default of `ServerLimits.streams`."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """The configurable limits of calls and connections."""

    connection: HttpLimits
    """The limits of each connection; the REST server has the same ones."""

    in_flight: int
    """Maximum number of calls that have a thread or wait for one. A further call gets RESOURCE_EXHAUSTED."""

    held_bytes: int
    """Maximum bytes of messages that all calls together hold at the same time."""

    receive_bytes: int = UNLIMITED
    """Maximum size of a received message, bytes."""

    send_bytes: int = UNLIMITED
    """Maximum size of a sent message, bytes."""

    streams: int = _MAX_STREAMS
    """Maximum number of concurrent calls of a connection."""

    age_s: float = math.inf
    """How long a connection accepts new calls, seconds. Then GOAWAY makes the client connect again, and a load balancer
    may send it to another server."""

    grace_s: float = math.inf
    """How long calls may continue after GOAWAY, seconds."""

    idle_s: float = math.inf
    """How long a connection may be without a call, seconds."""

    def with_channel_arguments(self, arguments: Mapping[str, str | int]) -> ServerLimits:
        """Return the limits changed by gRPC's channel arguments; unknown arguments are logged and ignored.

        Raises:
            ConfigError: a value is not a number in the argument's range.
        """
        remaining = dict(arguments)

        def pop(name: str, default: int, *, min_value: int = 1) -> int:
            value = remaining.pop(name, default)
            if value == -1:  # gRPC's value for "no limit"
                return UNLIMITED
            if not isinstance(value, int) or not min_value <= value <= UNLIMITED:
                raise ConfigError(
                    f"{name} must be a whole number from {min_value:,} to {UNLIMITED:,}, or -1",
                    got=value,
                    fix="Correct it in --grpc_channel_arguments.",
                )
            return value

        header_bytes = pop(
            "grpc.max_metadata_size", self.connection.head_bytes, min_value=_MIN_HEADER_BYTES
        )
        limits = dataclasses.replace(
            self,
            connection=dataclasses.replace(
                self.connection, head_bytes=min(header_bytes, _MAX_HEADER_BYTES)
            ),
            receive_bytes=pop("grpc.max_receive_message_length", self.receive_bytes, min_value=0),
            send_bytes=pop("grpc.max_send_message_length", self.send_bytes, min_value=0),
            streams=pop("grpc.max_concurrent_streams", self.streams),
            age_s=pop("grpc.max_connection_age_ms", UNLIMITED) / 1000,
            grace_s=pop("grpc.max_connection_age_grace_ms", UNLIMITED) / 1000,
            idle_s=pop("grpc.max_connection_idle_ms", UNLIMITED) / 1000,
        )
        for name in remaining:
            _log.warning("--grpc_channel_arguments: %s has no effect on this server", name)
        return limits
