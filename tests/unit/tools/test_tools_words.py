"""The language of source and documentation: words that `house.md` replaces do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLACES = ("src", "tests", "benchmarks", "docs", "recipes", "packaging", "README.md", "Makefile")
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
    r"(colour|behaviour|neighbour|favour|honour|labour)\w*": "American spelling: -or",
    r"(tilis|nitialis|erialis|ormalis|ptimis|uantis|ummaris|eterialis|rganis)(e|es|ed|ing|er|ation)\w*": (
        "American spelling: -ize"
    ),
    r"\b(labell|modell|travell|signall)(ed|ing)\b": "American spelling: one l",
    r"\b(grey|centre|catalogues)\b": "American spelling",
}
"""Regular expression -> what to write instead."""

QUOTED: dict[str, tuple[str, ...]] = {}
"""File -> text that it must contain although it matches: names and words of other projects."""


def texts() -> Iterator[tuple[str, str]]:
    """Path relative to the repository, and text, of every file to check."""
    for place in PLACES:
        for path in sorted([ROOT / place, *(ROOT / place).rglob("*")]):
            if path == Path(__file__):  # it holds the words
                continue
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
    assert [finding for name, text in texts() for finding in findings(name, text)] == []


def test_every_quotation_is_still_there() -> None:
    for name, quotes in QUOTED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert all(quote in text for quote in quotes), name
