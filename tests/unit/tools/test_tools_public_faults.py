"""The page of public faults: every report has a test, and every test that it names exists."""

from __future__ import annotations

import ast
import re
import string
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "public-faults.md"
NOT_A_FAULT = "11"
ROW = re.compile(r"\| (\w+) \| [^|]+ \| `([^`]+)::([^`]+)` \|")


def rows() -> list[tuple[str, str, str]]:
    """Report, file and function of each row."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    found = [ROW.fullmatch(line) for line in lines]
    assert all(found), [line for line, row in zip(lines, found, strict=True) if row is None]
    return [(row[1], row[2], row[3]) for row in found if row is not None]


def functions_in(file: str) -> set[str]:
    """Names of the test functions of a file."""
    path = ROOT / file
    body = ast.parse(path.read_text()).body if path.is_file() else []
    return {each.name for each in body if isinstance(each, ast.FunctionDef)}


def test_every_test_on_the_page_of_public_faults_exists() -> None:
    known = {file: functions_in(file) for _, file, _ in rows()}

    missing = [f"{file}::{name}" for _, file, name in rows() if name not in known[file]]

    assert missing == []
    assert all(name.startswith("test_") for _, _, name in rows())


def test_every_report_has_a_test() -> None:
    reports = {*string.ascii_uppercase[:18], *map(str, range(1, 14))} - {NOT_A_FAULT}

    assert {report for report, _, _ in rows()} == reports
