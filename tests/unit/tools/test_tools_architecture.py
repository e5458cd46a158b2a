"""The picture of the rooms in docs/architecture.md is the one that the import contract enforces."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ENTRY = re.compile(r"(\| )?([a-z]+) {2,}(.*)")


def entries() -> list[tuple[str, bool, str]]:
    """Each room of the picture: name, whether it is on the line of the room before it, text."""
    found: list[tuple[str, bool, str]] = []
    for line in (ROOT / "docs/architecture.md").read_text().split("```\n")[1].splitlines():
        if match := ENTRY.fullmatch(line):
            found.append((match[2], bool(match[1]), match[3]))
        else:
            name, joined, text = found[-1]
            found[-1] = name, joined, f"{text} {line.strip()}"
    return found


def test_the_rooms_stand_on_each_other_as_the_contract_says() -> None:
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    layers = contract["importlinter:contract:rooms"]["layers"].split("\n")
    drawn: list[set[str]] = []
    for name, joined, _ in entries():
        if joined:
            drawn[-1].add(name)
        else:
            drawn.append({name})

    assert drawn == [{name.strip() for name in line.split("|")} for line in layers if line]


def test_every_folder_of_a_room_is_named() -> None:
    unnamed = [
        f"{name}/{folder.name}"
        for name, _, text in entries()
        for folder in sorted((ROOT / "src/stoker" / name).iterdir())
        if (folder / "__init__.py").is_file() and f"{folder.name}/" not in text
    ]

    assert unnamed == []
