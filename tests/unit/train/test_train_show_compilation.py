"""A long compilation is shown, and what XLA has tuned so far is kept before it ends."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from stoker.cluster import compile_flags
from stoker.cluster.compile_cache import TUNING, CompileCache
from stoker.train.step import compiled


def test_what_is_tuned_is_in_the_store_while_xla_still_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SILENT_S", "EVERY_S", "PUBLISH_EVERY_S"):
        monkeypatch.setattr(compiled, name, 0.01)
    root = tmp_path / "xla"
    cache = CompileCache(root, {"gpus": ["H200"]})
    monkeypatch.setattr(compile_flags, "_active", cache)
    lines: list[str] = []
    shown = threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        shown.set()

    with compiled.show_compilation(report, "the step"):
        (cache.folder(TUNING) / "one.textproto").write_bytes(b"tuned")
        while not list(root.glob(f"*/store/{TUNING}/one.textproto")):
            shown.clear()
            assert shown.wait(20)

    assert lines[0].startswith("compiling, 0:0")
    # A killed process cannot publish: the next one finds what this one had published.
    with closing(CompileCache(root, {"gpus": ["H200"]})) as other, closing(cache):
        assert (other.folder(TUNING) / "one.textproto").read_bytes() == b"tuned"
