"""The ledger on a full disk."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from stoker.core.files import FullDisk
from stoker.tune.ledger import Ledger, events


def test_a_full_disk_is_named_and_what_was_written_is_kept(small_disk: Path) -> None:
    ledger = Ledger(small_disk / "ledger.jsonl")
    ledger.write("begin", {"text": "x"})
    with suppress(OSError):
        (small_disk / "fill").write_bytes(b"0" * (1 << 20))

    with pytest.raises(FullDisk, match="must have room for it"):
        ledger.write("decision", {"text": "x" * (1 << 20)})
    ledger.close()

    assert [event["event"] for event in events(ledger.path)] == ["begin"]
