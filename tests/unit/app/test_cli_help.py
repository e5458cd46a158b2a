"""The help of each verb: one line in the list of commands, and an example."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from stoker.cli.main import app, invoke


def _help(*verb: str) -> str:
    return CliRunner().invoke(app, [*verb, "--help"], terminal_width=80).output


def test_each_verb_has_a_line_that_is_not_cut_and_an_example() -> None:
    listed = _help().split("Commands:")[1]
    verbs = re.findall(r"^  ([a-z-]+) ", listed, re.MULTILINE)

    assert len(verbs) > 20
    assert "..." not in listed
    for verb in verbs:
        assert f"Example: stoker {verb} " in _help(verb)


def test_a_script_to_profile_without_the_dashes_gets_the_right_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["profile", "python", "train.py"], debug=False) == 2
    assert "stoker profile -- python train.py" in capfd.readouterr().err
