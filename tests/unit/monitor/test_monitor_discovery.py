"""What `GET /sd` answers, whatever lies among the files of the runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.core.errors import ConfigError
from stoker.monitor.discovery import Discovery

GOOD = [{"targets": ["127.0.0.1:4100"], "labels": {"run": "flowers/1"}}]


def announce(runs: Path, name: str, text: str | bytes) -> None:
    folder = runs / ".targets"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def answer(runs: Path, *servers: str) -> object:
    return json.loads(Discovery(runs, servers).content())


def test_runs_and_servers_are_the_targets(tmp_path: Path) -> None:
    announce(tmp_path, "b.json", json.dumps([{"targets": ["127.0.0.1:4200"]}]))
    announce(tmp_path, "a.json", json.dumps(GOOD))
    announce(tmp_path, "a.json.part", "half")

    assert answer(tmp_path, "127.0.0.1:8501", "[::1]:8501") == [
        *GOOD,
        {"targets": ["127.0.0.1:4200"], "labels": {}},
        {
            "targets": ["127.0.0.1:8501", "[::1]:8501"],
            "labels": {"__metrics_path__": "/monitoring/prometheus/metrics"},
        },
    ]


def test_a_run_that_begins_or_ends_is_there_or_gone_at_the_next_call(tmp_path: Path) -> None:
    discovery = Discovery(tmp_path / "runs", ())
    assert json.loads(discovery.content()) == []  # no run has been here yet

    (tmp_path / "runs").mkdir()
    announce(tmp_path / "runs", "a.json", json.dumps(GOOD))
    assert json.loads(discovery.content()) == GOOD

    (tmp_path / "runs" / ".targets" / "a.json").unlink()
    assert json.loads(discovery.content()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        b"\xff\xfe",
        "{}",
        "[1]",
        '[{"targets": "127.0.0.1:1"}]',
        '[{"targets": [1]}]',
        '[{"labels": {}}]',
        '[{"targets": [], "labels": {"a b": "x"}}]',
        '[{"targets": [], "labels": {"a": 1}}]',
        "[" * 100_000,
        " " * (1 << 20) + "[]",
    ],
)
def test_a_bad_file_hides_no_other_run_and_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | bytes
) -> None:
    announce(tmp_path, "bad.json", text)
    announce(tmp_path, "good.json", json.dumps(GOOD))
    discovery = Discovery(tmp_path, ())

    assert json.loads(discovery.content()) == GOOD
    assert json.loads(discovery.content()) == GOOD
    (record,) = caplog.records
    assert "bad.json contains no valid targets" in record.getMessage()


@pytest.mark.parametrize("address", ["8501", "127.0.0.1", ":8501", "a:b", "a:0", "a:65536", ""])
def test_a_malformed_address_of_a_server_is_one_line(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="--server must be HOST:PORT"):
        Discovery(tmp_path, (address,))
