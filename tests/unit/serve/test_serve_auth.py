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
def test_a_file_of_keys_that_is_no_yaml_is_named_with_its_line_and_not_quoted(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=r"keys\.yaml must be YAML \(line \d, column \d+\)") as e:
        read_keys(file)

    said = "".join(traceback.format_exception(e.value))
    assert "text that is not YAML" in said
    assert not any(secret in said for secret in (SECRET, "7777"))
