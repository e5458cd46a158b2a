"""Reads settings from YAML and `--set` into frozen dataclasses, with one-line errors."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import math
import re
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from stoker.core.errors import ConfigError, Plain
from stoker.core.errors import nearest as nearest  # noqa: PLC0414 - exported: most rooms import it from here

ConfigType = TypeVar("ConfigType")


MAX_BYTES = 1 << 20
"""Maximum size of a YAML file: enough for 20,000 columns in `data.types`."""

MAX_VALUES = 100_000
"""Maximum number of values in a YAML text, including values that aliases and merges repeat. PyYAML takes 5 s to read
this many."""

MAX_LEVELS = 100
"""Maximum depth of nesting, including levels that aliases repeat. PyYAML's time grows with the square of the depth."""

_OCTAL = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]*")
_HIDDEN_BREAK = re.compile("[\x85\u2028\u2029]")
"""Characters that end a line in PyYAML, as in YAML 1.1, but neither in YAML 1.2 nor in an editor."""

_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """Follows YAML 1.2 where PyYAML does not: a repeated key in a mapping is an error, and 20:30 is text."""

    _values = _levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Reject too many values or levels before the rest is read."""
        self._values, self._levels = self._values + 1, self._levels + 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # PyYAML has no types
        _require_few(self._values, self._levels, mark)
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Join surrogate pairs: JSON writes a character beyond 16 bits as two escapes of 16 bits."""
        node = super().compose_scalar_node(anchor)
        if _NO_TEXT.search(node.value):
            node.value = node.value.encode("utf-16", "surrogatepass").decode(
                "utf-16", "surrogatepass"
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Reject an empty key, and a key that occurs twice: the first value would be lost silently."""
        mapping = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in mapping.value:
            if isinstance(key, yaml.ScalarNode):
                if key.tag == "tag:yaml.org,2002:null":
                    raise _refused("a key without a name", key.start_mark)
                if key.value in seen:
                    raise _refused(f"key {key.value!r} occurs twice", key.start_mark)
                seen.add(key.value)
        return mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Convert a value; reject text that no setting can use, and values that do not fit their YAML type."""
        try:
            value = super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError):
            kind = node.tag.rpartition(":")[2]
            raise _refused(
                f"{str(node.value)[:40]!r} cannot be read as {kind}", node.start_mark
            ) from None
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _refused(f"{node.value[:40]} does not fit 64 bits", node.start_mark)
        if isinstance(value, str) and _NO_TEXT.search(value):
            raise _refused(
                "text with a NUL character, or half of a surrogate pair", node.start_mark
            )
        return value

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Return a number; 20:30, which is a number of base 60 in YAML 1.1, stays text."""
        if ":" in self.construct_scalar(node):  # raises for `!!int {a: 1}`, a mapping
            return node.value
        if _OCTAL.fullmatch(node.value):
            problem = (
                f"{node.value} is octal in YAML 1.1 and decimal in YAML 1.2; write it without the"
            )
            raise _refused(f"{problem} leading 0, or in quotes if it is text", node.start_mark)
        if node.tag.endswith(":int"):
            return self.construct_yaml_int(node)
        return self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def _refused(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _require_few(values: int, levels: int, mark: yaml.Mark) -> None:
    if values > MAX_VALUES:
        raise _refused(f"more than {MAX_VALUES:,} values, with all that aliases repeat", mark)
    if levels > MAX_LEVELS:
        raise _refused(f"more than {MAX_LEVELS} values inside each other", mark)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping.

    Raises:
        ConfigError: the file does not exist, is not YAML (with line and column), or is not a mapping.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ConfigError(
            f"{path} must be a file that can be read",
            got=Plain(error.strerror or str(error)),
            fix="`stoker init --from YOUR_DATA` writes one.",
        ) from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} must be UTF-8 text (line {line})", got=raw[error.start : error.end]
        ) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{path} must be at most {MAX_BYTES >> 20} MiB", got=Plain("a larger file")
        )
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} must hold `key: value` lines", got=Plain(_type_name(type(value)))
        )
    return value


def with_overrides(raw: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return a mapping with `--set a.b.c=value` assignments applied; each value is read as YAML.

    Args:
        raw: The mapping as read; it is not changed.
        assignments: `dotted.key=value`, later ones win.

    Raises:
        ConfigError: an assignment has no `=` or an empty key, or its key is below a value that is not a mapping.
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
        where[parts[-1]] = parse_yaml(text, f"--set {key}")
    return result


def build(cls: type[ConfigType], raw: object, *, where: str = "") -> ConfigType:
    """Build a configuration dataclass from plain values, and return it.

    Args:
        cls: A dataclass whose fields are scalars, Literal, Optional, tuples, dicts and dataclasses.
        raw: A mapping, as YAML gives it.
        where: The dotted key of this section, for the message.

    Raises:
        ConfigError: a key is unknown (the message names the most similar one) or missing, a type is wrong, or a rule
            of the dataclass is broken.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{where or 'the configuration'} must be a section of `key: value` lines", got=raw
        )
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # cls is a dataclass
    for key in raw:
        if key not in fields:
            raise ConfigError(
                f"{_dotted(where, str(key))} is not a setting",
                fix=_nearest_setting(cls, str(key), where),
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
    """Convert a value to an annotated type; if it does not fit, raise a ConfigError that names key, type and value."""
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
        if isinstance(value, hint):  # type: ignore[arg-type]  # mypy takes hint for an instance
            return value
        return build(hint, value, where=where)  # type: ignore[arg-type]  # mypy takes hint for an instance
    return _convert_scalar(hint, value, where)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of one YAML document.

    Args:
        text: The document.
        where: Its name for messages.

    Raises:
        ConfigError: the text is not YAML (with line and column), or is too large or too deep.
    """
    if hidden := _HIDDEN_BREAK.search(text):
        line = text.count("\n", 0, hidden.start()) + 1
        raise ConfigError(
            f"{where} must be YAML (line {line}) without the line breaks that editors do not show",
            got=Plain(f"U+{ord(hidden[0]):04X}"),
            fix="Remove it, or write it in double quotes as \\N (U+0085), \\L (U+2028) or \\P (U+2029).",
        )
    try:
        node = _composed(text)
        if node is None:
            return None
        _require_bounded(node, {})
        return _Loader("").construct_document(node)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"character {chr(error.character)!r}"
        raise ConfigError(f"{where} must be YAML (line {line})", got=Plain(problem)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where} must be YAML{place}", got=Plain(problem)) from None


def _composed(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    except (OverflowError, ValueError) as error:  # "\\UFFFFFFFF"
        raise yaml.scanner.ScannerError(None, None, str(error), loader.get_mark()) from None


def _require_bounded(node: yaml.Node, sizes: dict[yaml.Node, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of values in a node, including those that aliases repeat, and their depth.

    Args:
        node: Any node.
        sizes: Node -> its result; (0, 0) while a node is being counted.
    """
    if node not in sizes:
        sizes[node] = 0, 0
        children = () if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        found = [_require_bounded(child, sizes) for child in children]
        values = 1 + sum(values for values, _ in found)
        levels = 1 + max((levels for _, levels in found), default=0)
        _require_few(values, levels, node.start_mark)
        sizes[node] = values, levels
    if sizes[node] == (0, 0):
        raise _refused("a value that contains itself", node.start_mark)
    return sizes[node]


def located(error: ConfigError, path: Path) -> ConfigError:
    """Return the error with the file's name and, if the error names a key of the file, the line of this key.

    Args:
        error: The error that `build` raised for the file's values.
        path: The file.
    """
    node = _composed(path.read_text(encoding="utf-8"))
    lines = {} if node is None else _key_lines(node, "")
    named = [key for key in lines if names_key(error.rule, key)]
    line = f", line {lines[max(named, key=len)]}" if named else ""
    return ConfigError(f"{path}{line}: {error.rule}", got=error.got, fix=error.fix)


def names_key(rule: str, key: str) -> bool:
    """Return whether an error's rule names a key. A key without a dot counts only at the start of the rule."""
    found = re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", rule)
    return found is not None and (found.start() == 0 or "." in key)


def _key_lines(node: yaml.Node, where: str) -> dict[str, int]:
    """Return a mapping from each dotted key to its line, counted from 1."""
    found: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            name = _dotted(where, key.value)
            found[name] = key.start_mark.line + 1
            found |= _key_lines(value, name)
    return found


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _dotted(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _nearest_setting(cls: Any, key: str, where: str) -> str:
    """Return what to do about an unknown key: use the subsection that has it, or else the most similar key."""
    for name, hint in _hints(cls).items():
        choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        for section in choices:
            if dataclasses.is_dataclass(section) and key in _hints(section):
                return f"Did you mean '{_dotted(where, name)}.{key}'?"
    return nearest(key, _hints(cls))


_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def _convert_union(args: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [arg for arg in args if arg is not type(None)]
    sections = [choice for choice in choices if dataclasses.is_dataclass(choice)]
    if isinstance(value, Mapping) and sections:
        # The section that has the most of the given keys is the intended one, so its error helps most.
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
    raise ConfigError(f"{where} must be {expected}", got=value, fix=_in_quotes(choices, value))


def _convert_literal(args: tuple[Any, ...], value: object, where: str) -> Any:
    for choice in args:
        if type(choice) is type(value) and choice == value:
            return value
    shown = ", ".join(str(choice) for choice in args)
    raise ConfigError(f"{where} must be one of: {shown}", got=value)


def _convert_sequence(args: tuple[Any, ...], value: object, where: str) -> Any:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list", got=value, fix="E.g. [a, b].")
    any_length = len(args) == 2 and args[1] is Ellipsis
    if args and not any_length and len(args) != len(value):
        raise ConfigError(f"{where} must hold {len(args)} values", got=list(value))
    kinds = [args[0]] * len(value) if any_length else list(args)
    return tuple(
        convert(kind, item, where=f"{where}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _convert_scalar(hint: Any, value: object, where: str) -> Any:
    if hint is float:
        return _float(value, where)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if type(value) is hint or (hint is Path and isinstance(value, Path)):
        return value
    raise ConfigError(
        f"{where} must be {_type_name(hint)}", got=value, fix=_in_quotes([hint], value)
    )


def _in_quotes(hints: Sequence[Any], value: object) -> str:
    """Return what to do if YAML read a text as another type, e.g. `no`, `on`, `12` or `2026-01-31`."""
    is_other = isinstance(value, bool | int | float | dt.date)
    return "Write it in quotes if it is text." if str in hints and is_other else ""


def _float(value: object, where: str) -> float:
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-3 (without a dot) as text, but it means a number.
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
    if math.isnan(number):
        raise ConfigError(f"{where} must be {_type_name(float)}", got=value)
    return number


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


_LONGEST_NAME = 63
"""Maximum number of characters of a DNS label. Source: RFC 1123."""


def dns_name(*candidates: str) -> str:
    """Return the first candidate that can be turned into a DNS label (a-z, 0-9, inner dashes), or `model`."""
    for candidate in candidates:
        plain = (
            unicodedata.normalize("NFKD", candidate.casefold()).encode("ascii", "ignore").decode()
        )
        name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
        if name and not name[0].isalpha():
            name = f"model-{name}"
        if name:
            return name[:_LONGEST_NAME].rstrip("-")
    return "model"
