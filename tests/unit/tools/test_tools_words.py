"""The language of source and documentation: words that `house.md` replaces do not come back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLACES = ("src", "docs", "recipes", "packaging", "README.md", "Makefile")
ENDINGS = {".py", ".md", ".txt", ".yaml", ".c", ".html", ""}

WORDS = {
    # "There is no tensor" is English; "it is no tensor" is not.
    r"(?<!here )\b(is|are|was|were) no (?!longer\b|more\b|such\b|different\b|better\b|worse\b|less\b|fewer\b)\w+": (
        "is not a ..."
    ),
    r"\b(un)?mend(s|ed|ing)?\b": "fix",
    r"\banew\b": "again",
    r"\bbeside\b": "next to, besides, while",
    r"\bwh(o|om|at|ich)ever (?!else\b)(waits?|asks?|is told|has)\b": "name it: requests in the queue",
    r"\bwhoever\b": "name it: requests in the queue",
    r"\bwho (has|have) none\b": "name it: models without a label",
    r"\b(is|are|was|were|be|been) told\b(?! apart| from)": "gets, is reported, is passed",
    r"\bof one's own\b": "your own, its own",
    r"\b(hold|holds|held) (it|them|each|every \w+) against\b": "compares with",
    r"\bby way of\b": "through, by",
    r"\w*(colour|behaviour|neighbour|favour|honour|labour)\w*": "American spelling: -or",
    r"\w*(tilis|nitialis|erialis|ormalis|ptimis|uantis|ummaris|eterialis|rganis)(e|es|ed|ing|er|ation)\w*": (
        "American spelling: -ize"
    ),
    r"\b(labell|modell|travell|signall)(ed|ing)\b": "American spelling: one l",
    r"\b(grey|centre|catalogues)\b": "American spelling",
}
"""Regular expression -> what to write instead."""

QUOTED: dict[str, tuple[str, ...]] = {}
"""File -> text that it must contain although it matches: names and words of other projects."""

NOT_YET = ("src/stoker/serve",)
"""Folders and files that are not yet clean; to be empty at the end."""


def texts() -> Iterator[tuple[str, str]]:
    """Path relative to the repository, and text, of every file to check."""
    for place in PLACES:
        for path in sorted([ROOT / place, *(ROOT / place).rglob("*")]):
            if path.is_file() and path.suffix in ENDINGS and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def findings(name: str, text: str) -> list[str]:
    """Each use of a replaced word: file, line, the words, what to write instead."""
    for quoted in QUOTED.get(name, ()):
        text = text.replace(quoted, " " * len(quoted))
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group(0)!r}: {instead}"
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def is_excused(name: str) -> bool:
    return any(name == entry or name.startswith(f"{entry}/") for entry in NOT_YET)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("the value is no tensor", 1),
        ("it is no longer read; there is no tensor, and where there are no rows", 0),
        ("Fixed next to it, again", 0),
        ("mended anew beside it", 3),
        ("whoever waits is told", 3),
        ("the colour is initialised", 2),
    ],
)
def test_the_words_are_found(text: str, count: int) -> None:
    assert len({finding.split(": ")[1] for finding in findings("text", text)}) == count


def test_no_file_uses_a_word_that_was_replaced() -> None:
    rooms: Counter[str] = Counter()
    found: list[str] = []
    for name, text in texts():
        lines = findings(name, text)
        if is_excused(name):
            rooms["/".join(name.split("/")[:3])] += len(lines)
        else:
            found += lines
    for room, hits in rooms.most_common():
        print(f"{hits:5} {room}")

    assert found == []


def test_every_excuse_is_still_needed() -> None:
    for entry in NOT_YET:
        assert any(
            findings(name, text)
            for name, text in texts()
            if name == entry or name.startswith(f"{entry}/")
        ), f"{entry} is clean: remove it from NOT_YET"
    for name, quotes in QUOTED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert all(quote in text for quote in quotes), name
