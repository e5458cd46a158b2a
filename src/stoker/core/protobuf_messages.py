"""Builds classes of protobuf messages from a short notation, if their generated code cannot be imported.

The notation is one string for each message: `"string name=1; int64* shape=2"` declares a string with number 1
and repeated 64-bit integers with number 2. On the wire only the numbers and types of fields matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Kind = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: _Kind.Type.Value(f"TYPE_{name.upper()}")
    for name in ["bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes"]
}


def describe_messages(
    package: str, messages: Mapping[str, str], *, file_name: str, oneof: str = ""
) -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of a .proto file that declares these messages.

    Args:
        package: The package of the file.
        messages: Name of the message -> its fields, separated by `; `, each `TYPE NAME=NUMBER`. TYPE is the name of a
            scalar type or of a message; `TYPE*` is a repeated field, and `map<M>` maps strings to messages M. A field
            `?NAME` belongs to the oneof. A message `Outer.Inner` is nested.
        file_name: The name of the file.
        oneof: The name of the oneof, the same in all messages that have a oneof.
    """
    file = descriptor_pb2.FileDescriptorProto(name=file_name, package=package, syntax="proto3")
    made: dict[str, descriptor_pb2.DescriptorProto] = {}
    for full_name in sorted(messages, key=lambda name: name.count(".")):
        outer, _, name = full_name.rpartition(".")
        siblings = made[outer].nested_type if outer else file.message_type
        made[full_name] = siblings.add(name=name)
        if "?" in messages[full_name]:
            made[full_name].oneof_decl.add(name=oneof)
        for field in filter(None, messages[full_name].split("; ")):
            _add_field(made[full_name], field, f".{package}.{full_name}", package)
    return file


def message_classes(
    file: descriptor_pb2.FileDescriptorProto, names: Iterable[str]
) -> tuple[descriptor_pool.DescriptorPool, dict[str, Any]]:
    """Return a separate descriptor pool for a file, and the classes of the file's messages.

    A separate pool avoids conflicts: TensorFlow or a client library may have the same names in the default pool.
    """
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool, {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))
        for name in names
    }


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
