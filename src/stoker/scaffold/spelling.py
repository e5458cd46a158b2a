"""Templates of the files that `stoker init` writes, and Python and YAML literals for them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from string import Template

import yaml

_LINE = 100
"""Maximum width of a line of Python, characters; a list that needs more has one name per line."""


def fill(template: str, **values: object) -> str:
    """Return a template from `templates/` with its `$name` placeholders replaced.

    Args:
        template: Its file name without `.txt`.
        values: Placeholder -> its replacement.
    """
    text = (resources.files(__package__) / "templates" / f"{template}.txt").read_text(
        encoding="utf-8"
    )
    return Template(text).substitute(values)


def python_text(value: str) -> str:
    """Return a string as a Python literal, in double quotes if they need no escape."""
    spelled = repr(value)
    return f'"{spelled[1:-1]}"' if spelled[0] == "'" and '"' not in spelled else spelled


def python_list(values: Sequence[str]) -> str:
    """Return a list of strings as a Python literal, with one string per line if one line is too short."""
    spelled = [python_text(value) for value in values]
    one_line = f"[{', '.join(spelled)}]"
    if len(one_line) < _LINE - len("NUMBERS = "):
        return one_line
    return "[\n" + "".join(f"    {value},\n" for value in spelled) + "]"


def yaml_flow(value: str | dict[str, str]) -> str:
    """Return a string or a mapping as YAML on one line, quoted if YAML would otherwise read it differently.

    Args:
        value: Names of columns or files from the user's data.
    """
    texts = [value] if isinstance(value, str) else [*value, *value.values()]
    # PyYAML escapes a line break only in double quotes; in any other style it starts a new line.
    style = None if all(text.isprintable() for text in texts) else '"'
    spelled: str = yaml.safe_dump(
        [value],
        default_flow_style=True,
        default_style=style,
        allow_unicode=True,
        width=float("inf"),
    )
    return spelled.strip()[1:-1]
