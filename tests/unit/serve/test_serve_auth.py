"""The file of keys: what a message says of it holds no secret."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from stoker.core.errors import ConfigError
from stoker.serve.security.auth import read_keys

SECRET = "s3cret-of-32-characters-and-more"
AROUND = "- name: a\n  role: admin\n"


@pytest.mark.parametrize(
    "text",
    [
        f"{AROUND}  key: !!int {SECRET}",
        f"{AROUND}  key: *{SECRET}",
        f"{AROUND}  key: 1\n  {SECRET}: 1\n  {SECRET}: 2",
        f"{AROUND}  key: !{SECRET} x",
        f"{AROUND}  key: 0{'7' * 32}",
        f"{AROUND}  key: {'7' * 40}",
        f"{AROUND}  key: %{SECRET}",
    ],
)
def test_a_file_of_keys_that_is_not_yaml_is_named_with_its_line_and_not_quoted(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=r"keys\.yaml must be YAML \(line \d, column \d+\)") as e:
        read_keys(file)

    said = "".join(traceback.format_exception(e.value))
    assert "text that is not YAML" in said
    assert not any(secret in said for secret in (SECRET, "7777"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"- name: a\n  role: {SECRET}\n  key: x", "the role of key 1 of"),
        (f"- name: a\n  role: [{SECRET}]\n  key: x", "the role of key 1 of"),
        (f"- name: {SECRET}\n  key: x", "must have name, role, and key or sha256"),
        (f"{AROUND}  {SECRET}: x", "must have name, role, and key or sha256"),
        (f"{AROUND}  key: [{SECRET}]", "must be a string of at least"),
        (f"{AROUND}  sha256: {SECRET}", "must have 64 hexadecimal digits"),
        (f"{AROUND}  sha256: x\n  key: {SECRET}", "must have either key or sha256"),
        (f"{SECRET}: {SECRET}", "must hold a list of keys"),
        (SECRET, "must hold a list of keys"),
    ],
)
def test_a_value_in_the_wrong_field_of_a_file_of_keys_is_not_quoted(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError) as error:
        read_keys(file)

    shown = "".join(traceback.format_exception(error.value))
    assert said in shown
    assert SECRET not in shown
