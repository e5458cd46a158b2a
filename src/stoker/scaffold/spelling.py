"""The text of the files that `stoker init` writes, and how values get into it safely."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from string import Template

import yaml

_LINE = 100
"""Width that a list of names may have before it is written one name a line."""


def fill(template: str, **values: object) -> str:
    """One of the texts in `templates/`, its `$name` places filled in.

    Args:
        template: Its file name without `.txt`.
        values: What goes where, as it is to stand there.
    """
    text = (resources.files(__package__) / "templates" / f"{template}.txt").read_text(
        encoding="utf-8"
    )
    return Template(text).substitute(values)


def python_text(value: str) -> str:
    """A string as Python spells it, in double quotes where that needs no escape."""
    spelled = repr(value)
    return f'"{spelled[1:-1]}"' if spelled[0] == "'" and '"' not in spelled else spelled


def python_list(values: Sequence[str]) -> str:
    """A list of strings as Python spells it, one a line where they do not fit in one."""
    spelled = [python_text(value) for value in values]
    one_line = f"[{', '.join(spelled)}]"
    if len(one_line) < _LINE - len("NUMBERS = "):
        return one_line
    return "[\n" + "".join(f"    {value},\n" for value in spelled) + "]"


def yaml_flow(value: str | dict[str, str]) -> str:
    """A text or a mapping as YAML spells it in one line, quoted where it would read back as other.

    Args:
        value: Whatever the user's data calls its columns and files.
    """
    texts = [value] if isinstance(value, str) else [*value, *value.values()]
    # Left to itself PyYAML writes a line's end as a line's end.
    style = None if all(text.isprintable() for text in texts) else '"'
    spelled: str = yaml.safe_dump(
        [value],
        default_flow_style=True,
        default_style=style,
        allow_unicode=True,
        width=float("inf"),
    )
    return spelled.strip()[1:-1]
