"""The pages on serving name flags that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.main import app

PAGES = Path(__file__).parents[3] / "docs" / "how-to"


@pytest.mark.parametrize("page", ["serve.md", "move-from-tensorflow-serving.md"])
def test_every_flag_on_the_page_is_one_of_stoker_serve(page: str) -> None:
    text = (PAGES / page).read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text))
    help_text = CliRunner().invoke(app, ["serve", "--help"], terminal_width=400).output

    known = set(re.findall(r"--[a-z][a-z_-]+", help_text))

    assert named - known == set()
    assert len(named) > 8
