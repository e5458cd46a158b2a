"""Messages and services of gRPC by a short text for each message, where no package brings their code.

They live in pools of their own: a client library in the same process may bring the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Kind = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Kind.TYPE_BOOL,
    "int32": _Kind.TYPE_INT32,
    "int64": _Kind.TYPE_INT64,
    "uint32": _Kind.TYPE_UINT32,
    "uint64": _Kind.TYPE_UINT64,
    "float": _Kind.TYPE_FLOAT,
    "double": _Kind.TYPE_DOUBLE,
    "string": _Kind.TYPE_STRING,
    "bytes": _Kind.TYPE_BYTES,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A service and its messages."""

    service: str
    """Its full name."""

    pool: descriptor_pool.DescriptorPool
    """Where both are described."""

    messages: Mapping[str, Any]
    """The class of each message by its name, of those within others too."""


def described(service: str, messages: Mapping[str, str], *, file_name: str) -> Description:
    """Describe a service.

    Args:
        service: Its full name. Every message `XRequest` has its `XResponse`, and both are of the method `X`.
        messages: Message -> its fields: `*` is repeated, `?` one of the oneof `parameter_choice`, and
            `map<M>` goes from a text to a message M.
        file_name: The name of the file that would describe them.
    """
    package, _, service_name = service.rpartition(".")
    file = descriptor_pb2.FileDescriptorProto(name=file_name, package=package, syntax="proto3")
    made: dict[str, descriptor_pb2.DescriptorProto] = {}
    for full_name in sorted(messages, key=lambda name: name.count(".")):
        outer, _, name = full_name.rpartition(".")
        siblings = made[outer].nested_type if outer else file.message_type
        made[full_name] = siblings.add(name=name)
        for field in filter(None, messages[full_name].split("; ")):
            _add_field(made[full_name], field, f".{package}.{full_name}", package)
    methods = file.service.add(name=service_name).method
    for name in messages:
        method = name.removesuffix("Request")
        if method != name:
            methods.add(
                name=method,
                input_type=f".{package}.{name}",
                output_type=f".{package}.{method}Response",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in messages
    }
    return Description(service=service, pool=pool, messages=classes)


def _add_field(
    message: descriptor_pb2.DescriptorProto, text: str, full_name: str, package: str
) -> None:
    kind, _, named = text.partition(" ")
    name, _, number = named.partition("=")
    field = message.field.add(name=name.lstrip("?"), number=int(number))
    is_map = kind.startswith("map<")
    repeated = kind.endswith("*") or is_map
    field.label = _Kind.LABEL_REPEATED if repeated else _Kind.LABEL_OPTIONAL
    if name.startswith("?"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    kind = kind.rstrip("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _Kind.TYPE_MESSAGE
    field.type_name = f".{package}.{kind}"
    if is_map:
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "string key=1", "", package)
        _add_field(entry, f"{kind[len('map<') : -1]} value=2", "", package)
        field.type_name = f"{full_name}.{entry.name}"
