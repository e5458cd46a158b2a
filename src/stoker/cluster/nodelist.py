"""Reads Slurm's short form of node names, such as `n[01-03,7],m1`."""

from __future__ import annotations

import re

from stoker.core.errors import ConfigError, Plain

MAX_NODES = 1 << 16
"""Maximum number of names in a list; Slurm has the same limit."""

_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Return the names in a list, in the list's order.

    Args:
        text: E.g. `n[01-03,7],m1` or `rack[1-2]n[0-3]`. The last bracket varies fastest, and numbers keep their
            leading zeros.

    Raises:
        ConfigError: the text has another form.
    """
    parts = _PART.findall(text)
    if not parts or ",".join(parts) != text.strip():
        raise _malformed(text)
    names: list[str] = []
    for part in parts:
        names += _expand(part, text)
        if len(names) > MAX_NODES:
            raise _malformed(text)
    return tuple(names)


def _expand(part: str, text: str) -> list[str]:
    literals = _BRACKET.split(part.strip())
    names = [literals[0]]
    # Parts outside and inside of brackets alternate.
    for inside, after in zip(literals[1::2], literals[2::2], strict=True):
        numbers = [number for each in inside.split(",") for number in _numbers(each, text)]
        if len(names) * len(numbers) > MAX_NODES:
            raise _malformed(text)
        names = [f"{name}{number}{after}" for name in names for number in numbers]
    return names


def _numbers(text: str, whole: str) -> list[str]:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise _malformed(whole)
    first, last = match[1], match[2] or match[1]
    if not int(first) <= int(last) <= int(first) + MAX_NODES:
        raise _malformed(whole)
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _malformed(text: str) -> ConfigError:
    return ConfigError(
        "Slurm's list of nodes must have the form n[01-03,7],m1",
        got=text or Plain("an empty list"),
        fix="Compare SLURM_STEP_NODELIST with `scontrol show hostnames`.",
    )
