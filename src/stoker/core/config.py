"""YAML, `--set` and Python objects -> the same frozen dataclasses, or one line that says why not."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from stoker.core.errors import ConfigError, Plain

ConfigType = TypeVar("ConfigType")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 where PyYAML is otherwise: a key stands once in a mapping, and 20:30 is a text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice: the first value would be lost silently."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key_node.value!r} stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """A number; what YAML 1.1 takes for one to the base 60 is a text."""
        if ":" in node.value:
            return node.value
        if node.tag.endswith(":int"):
            return self.construct_yaml_int(node)
        return self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping.

    Raises:
        ConfigError: no such file, no YAML (with line and column), or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} must be a file that can be read",
            got=Plain(error.strerror or str(error)),
            fix="`stoker init --from YOUR_DATA` writes one.",
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text", got=Plain(str(error))) from None
    value = _parse(text, str(path))
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} must hold `key: value` lines", got=Plain(_type_name(type(value)))
        )
    return value


def with_overrides(raw: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply `--set a.b.c=value` assignments; each value is read as YAML.

    Args:
        raw: The mapping as read; it is not changed.
        assignments: `dotted.key=value`, later ones win.

    Raises:
        ConfigError: no `=`, an empty key, or a key below something that is no mapping.
    """
    result = _copied(raw)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise ConfigError(
                "--set takes KEY=VALUE", got=assignment, fix="E.g. --set train.batch_size=64"
            )
        where = result
        for depth, part in enumerate(parts[:-1]):
            below = where.setdefault(part, {})
            if not isinstance(below, dict):
                raise ConfigError(
                    f"--set {key}: {'.'.join(parts[: depth + 1])} must be a section",
                    got=below,
                    fix="Set the whole section, or a key that it has.",
                )
            where = below
        where[parts[-1]] = _parse(text, f"--set {key}")
    return result


def build(cls: type[ConfigType], raw: object, *, where: str = "") -> ConfigType:
    """Make a configuration dataclass from plain values, strictly.

    Args:
        cls: A dataclass whose fields are scalars, Literal, Optional, tuples, dicts and dataclasses.
        raw: A mapping, as YAML gives it.
        where: The dotted key of this section, for the message.

    Raises:
        ConfigError: an unknown key (the nearest one is named), a wrong type, a missing key, or a
            rule of the dataclass's own.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{where or 'the configuration'} must be a section of `key: value` lines", got=raw
        )
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if key not in fields:
            raise ConfigError(
                f"{_dotted(where, str(key))} is no setting", fix=nearest(str(key), list(fields))
            )
    hints = _hints(cls)
    values = {
        name: convert(hints[name], value, where=_dotted(where, name)) for name, value in raw.items()
    }
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in values:
            raise ConfigError(
                f"{_dotted(where, name)} must be given",
                got=Plain("nothing"),
                fix=f"Add `{name}: ...` to stoker.yaml.",
            )
    return cls(**values)


def convert(hint: Any, value: object, *, where: str) -> Any:
    """One value to one annotated type, or a ConfigError that names key, type and value."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is Literal:
        return _convert_literal(args, value, where)
    if origin in (tuple, list) or hint is tuple:
        return _convert_sequence(args, value, where)
    if origin is dict or origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a section of `key: value` lines", got=value)
        return {
            convert(args[0], key, where=where): convert(args[1], item, where=f"{where}.{key}")
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        return build(hint, value, where=where)  # type: ignore[arg-type]
    return _convert_scalar(hint, value, where)


def nearest(name: str, known: Iterable[str]) -> str:
    """The next action for an unknown name: the nearest known one, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "There are none."


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - it is a SafeLoader
    except RecursionError:
        raise ConfigError(
            f"{where} must not be nested so deeply", got=Plain("more levels than are read")
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where} must be YAML{place}", got=Plain(problem)) from None


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _dotted(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _convert_union(args: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [arg for arg in args if arg is not type(None)]
    sections = [choice for choice in choices if dataclasses.is_dataclass(choice)]
    if isinstance(value, Mapping) and sections:
        # The section that knows most of the keys is the one that is meant, and says what is wrong.
        known = [len(value.keys() & _hints(section).keys()) for section in sections]
        choices = [sections[known.index(max(known))]]
    if len(choices) == 1:
        return convert(choices[0], value, where=where)
    for choice in choices:
        try:
            return convert(choice, value, where=where)
        except ConfigError:
            continue
    expected = " or ".join(dict.fromkeys(_type_name(choice) for choice in choices))
    raise ConfigError(f"{where} must be {expected}", got=value)


def _convert_literal(args: tuple[Any, ...], value: object, where: str) -> Any:
    for choice in args:
        if type(choice) is type(value) and choice == value:
            return value
    shown = ", ".join(str(choice) for choice in args)
    raise ConfigError(f"{where} must be one of: {shown}", got=value)


def _convert_sequence(args: tuple[Any, ...], value: object, where: str) -> Any:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list", got=value, fix="E.g. [a, b].")
    endless = len(args) == 2 and args[1] is Ellipsis
    if args and not endless and len(args) != len(value):
        raise ConfigError(f"{where} must hold {len(args)} values", got=list(value))
    kinds = [args[0]] * len(value) if endless else list(args)
    return tuple(
        convert(kind, item, where=f"{where}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _convert_scalar(hint: Any, value: object, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):
        return _float_text(value, where)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if type(value) is hint or (hint is Path and isinstance(value, Path)):
        return value
    raise ConfigError(f"{where} must be {_type_name(hint)}", got=value)


def _float_text(value: str, where: str) -> float:
    # YAML 1.1 reads 1e-3 (no dot) as text; everyone means a number by it.
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{where} must be {_type_name(float)}", got=value) from None


def _type_name(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        Path: "a path",
        dict: "a section of `key: value` lines",
        list: "a list",
        type(None): "nothing",
    }
    if dataclasses.is_dataclass(hint):
        return names[dict]
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    return names.get(hint, getattr(hint, "__name__", str(hint)))
