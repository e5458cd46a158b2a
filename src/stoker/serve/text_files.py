"""TensorFlow Serving's configuration files: protobuf's text format, read strictly.

`tensorflow-serving-api` contains the messages of the model configuration. The messages of the other files are described
here, with the fields that TensorFlow Serving declares, so that protobuf's own parser reads the files and refuses
unknown fields.

Source: TensorFlow Serving, `session_bundle_config.proto`, `ssl_config.proto`, `monitoring_config.proto`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from stoker.core.errors import ConfigError, Plain
from stoker.core.protobuf_messages import describe_messages, message_classes

_MAX_BYTES = 4 << 20
"""Maximum size of a file, bytes; a configuration of ten thousand models has about one megabyte."""

_MESSAGES = {
    "Int64Value": "int64 value=1",
    "StringValue": "string value=1",
    "BoolValue": "bool value=1",
    "BatchingParameters": (
        "Int64Value max_batch_size=1; Int64Value batch_timeout_micros=2; "
        "Int64Value max_enqueued_batches=3; Int64Value num_batch_threads=4; "
        "StringValue thread_pool_name=5; int64* allowed_batch_sizes=6; "
        "bool pad_variable_length_inputs=7; BoolValue enable_large_batch_splitting=8; "
        "Int64Value max_execution_batch_size=9"
    ),
    "SSLConfig": "string server_key=1; string server_cert=2; string custom_ca=3; bool client_verify=4",
    "PrometheusConfig": "bool enable=1; string path=2",
    "MonitoringConfig": "PrometheusConfig prometheus_config=1",
}
"""Message -> its fields."""

_CLASSES = message_classes(
    describe_messages("stoker.serve", _MESSAGES, file_name="stoker/serve/text_files.proto"),
    _MESSAGES,
)[1]


def read_text_file(path: Path, message: str | Message, *, full_name: str) -> Any:
    """Parse a file in protobuf's text format.

    Args:
        path: The file.
        message: Name of a message in `_MESSAGES`, or an empty message that is filled.
        full_name: TensorFlow Serving's name of the message, for errors.

    Returns:
        The message.

    Raises:
        ConfigError: the file does not exist, or is invalid; the message names the line.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{full_name} must be read from a file", got=Plain(f"{path} ({error.strerror})")
        ) from error
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{path} must have at most {_MAX_BYTES:,} bytes", got=Plain("more"))
    return parse_text(raw, message, full_name=full_name, source=str(path))


def parse_text(raw: bytes, message: str | Message, *, full_name: str, source: str) -> Any:
    """Parse protobuf's text format, like `read_text_file`.

    Raises:
        ConfigError: the text is invalid; the message names the line.
    """
    empty = _CLASSES[message]() if isinstance(message, str) else message
    try:
        return text_format.Parse(raw.decode(), empty)
    except (text_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"Error parsing text-format {full_name}",
            got=Plain(f"{source}: {error}".rstrip(".")),
        ) from error
