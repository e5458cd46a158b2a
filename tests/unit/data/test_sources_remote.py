"""A glob finds in a bucket what it finds in a folder that holds the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import DataError
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.stores.local import list_local
from stoker.data.sources.stores.remote import matches

NAMES = ("a.csv", "b.csv", "d/a.csv", "d/e/b.csv", "d/e/f/a.csv", "e/e/a.csv")

parts = st.sampled_from(["**", "*", "?", "d", "e", "[de]", "a.csv", "*.csv", "[ab].csv"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x\n1\n")
    return root


@settings(max_examples=300)
@given(pattern=st.lists(parts, min_size=1, max_size=4))
def test_names_match_as_files_do(folder: Path, pattern: list[str]) -> None:
    first = next((i for i, part in enumerate(pattern) if set(part) & set("*?[")), None)
    if first is None:
        return
    fixed = "".join(f"{part}/" for part in pattern[:first])
    try:
        source = str(folder.joinpath(*pattern))
        found = {f.location for f in list_local(IngestConfig(source=source, format="csv")).files}
    except DataError as error:
        # A glob may also name a folder, which a bucket has none of.
        found = set() if "must match" in str(error) else {"a folder"}

    below = [name.removeprefix(fixed) for name in NAMES if name.startswith(fixed)]
    matching = {name for name in below if matches(name, pattern[first:])}
    if found != {"a folder"}:
        assert {str(folder / fixed / name) for name in matching} == found
