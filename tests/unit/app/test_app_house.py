"""Rules for all source files: what a type check cannot see, and what is forbidden."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
import tensorflow as tf

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "recipes").glob("*/*.py"))
KNOWN = {"tf": tf, "keras": keras, "layers": keras.layers}


def chain(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        below = chain(node.value)
        return [*below, node.attr] if below else []
    return []


def chains(path: Path) -> Iterator[list[str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names = chain(node)
            if names and names[0] in KNOWN:
                yield names


def test_every_name_of_tensorflow_and_keras_in_the_source_exists() -> None:
    seen = 0
    for path in SOURCES:
        for first, *rest in chains(path):
            where = KNOWN[first]
            for name in rest:
                assert hasattr(where, name), f"{path}: {first}.{'.'.join(rest)}"
                where = getattr(where, name)
            seen += 1
    assert seen > 200


BETWEEN_OWN_PROCESSES = {"sources/worker_process.py", "shadow/channel.py"}
"""A worker process of this program (a reader of `data/sources`, a shadow's copy), over a socket pair that only the
two hold, as `multiprocessing` does it. No file is read by it, and only the parent's messages are unpickled."""


@pytest.mark.parametrize(
    "word", ["import pickle", "pickle.load", "joblib", "allow_pickle=True", "yaml.unsafe_load"]
)
def test_nothing_in_the_source_unpickles(word: str) -> None:
    allowed: set[str] = set()
    if word.startswith(("import", "pickle")):
        allowed |= BETWEEN_OWN_PROCESSES
    users = [
        path
        for path in SOURCES
        if word in path.read_text() and "/".join(path.parts[-2:]) not in allowed
    ]

    assert users == []


def test_the_page_of_long_tests_names_each_file_of_chain_and_server_that_has_some() -> None:
    page = (ROOT / "docs" / "soak.md").read_text()
    folders = [
        ROOT / "tests" / kind / room
        for kind in ("unit", "integration")
        for room in ("app", "serve", "rollout")
    ]
    found = [path for folder in folders for path in folder.glob("test_*.py")]

    long = {path.name for path in found if re.search(r"mark\.soak", path.read_text())}

    assert {"test_app_workers.py", "test_rollout_answers.py"} <= long
    assert [name for name in sorted(long) if f"{name}`" not in page] == []
