"""TensorFlow Serving's configuration files: protobuf's text format, read strictly.

`tensorflow-serving-api` brings the messages of the model configuration. Those of the other files are
described here, field by field as TensorFlow Serving declares them, so that protobuf's own parser
reads them and refuses what it does not know.

Source: TensorFlow Serving, `session_bundle_config.proto`, `ssl_config.proto`, `monitoring_config.proto`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
    wrappers_pb2,
)
from google.protobuf.message import Message

from stoker.core.errors import ConfigError, Plain

_Kind = descriptor_pb2.FieldDescriptorProto

_MAX_BYTES = 4 << 20
"""Largest file that is read: a configuration of ten thousand models has one megabyte."""

_INT64 = ".google.protobuf.Int64Value"
_MESSAGES: dict[str, list[tuple[str, int, Any, bool]]] = {
    "BatchingParameters": [
        ("max_batch_size", 1, _INT64, False),
        ("batch_timeout_micros", 2, _INT64, False),
        ("max_enqueued_batches", 3, _INT64, False),
        ("num_batch_threads", 4, _INT64, False),
        ("thread_pool_name", 5, ".google.protobuf.StringValue", False),
        ("allowed_batch_sizes", 6, _Kind.TYPE_INT64, True),
        ("pad_variable_length_inputs", 7, _Kind.TYPE_BOOL, False),
        ("enable_large_batch_splitting", 8, ".google.protobuf.BoolValue", False),
        ("max_execution_batch_size", 9, _INT64, False),
    ],
    "SSLConfig": [
        ("server_key", 1, _Kind.TYPE_STRING, False),
        ("server_cert", 2, _Kind.TYPE_STRING, False),
        ("custom_ca", 3, _Kind.TYPE_STRING, False),
        ("client_verify", 4, _Kind.TYPE_BOOL, False),
    ],
    "PrometheusConfig": [
        ("enable", 1, _Kind.TYPE_BOOL, False),
        ("path", 2, _Kind.TYPE_STRING, False),
    ],
    "MonitoringConfig": [("prometheus_config", 1, ".stoker.serve.PrometheusConfig", False)],
}
"""Message -> its fields: name, number, type (a name where it is a message), whether repeated."""


def read_text_file(path: Path, message: str | Message, *, full_name: str) -> Any:
    """Parse a file in protobuf's text format.

    Args:
        path: The file.
        message: One of the messages above by its name, or an empty message to be filled.
        full_name: What TensorFlow Serving calls the message, for the error.

    Returns:
        The message.

    Raises:
        ConfigError: there is no such file, or it is not in the form; the line is named.
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
    """Parse protobuf's text format; as `read_text_file`.

    Raises:
        ConfigError: it is not in the form; the line is named.
    """
    empty = _CLASSES[message]() if isinstance(message, str) else message
    try:
        return text_format.Parse(raw.decode(), empty)
    except (text_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"Error parsing text-format {full_name}",
            got=Plain(f"{source}: {error}".rstrip(".")),
        ) from error


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="stoker/serve/text_files.proto", package="stoker.serve", syntax="proto3"
    )
    file.dependency.append(wrappers_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            added = described.field.add(name=field, number=number)
            added.label = _Kind.LABEL_REPEATED if repeated else _Kind.LABEL_OPTIONAL
            added.type = _Kind.TYPE_MESSAGE if isinstance(kind, str) else kind
            if isinstance(kind, str):
                added.type_name = kind
    return file


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    wrappers = descriptor_pb2.FileDescriptorProto()
    wrappers_pb2.DESCRIPTOR.CopyToProto(wrappers)
    pool.Add(wrappers)
    pool.Add(_described())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"stoker.serve.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _classes()
