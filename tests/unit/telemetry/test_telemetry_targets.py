"""Files by which Prometheus finds runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from stoker.telemetry.targets import FOLDER, JOB, live_targets, published

HOLD = """\
import sys
from pathlib import Path
from stoker.telemetry.targets import published
with published(Path(sys.argv[1]), "other", "127.0.0.1:2"):
    print("there", flush=True)
    sys.stdin.read()
"""


def test_a_target_is_there_while_its_run_is(tmp_path: Path) -> None:
    with published(tmp_path, "run", "127.0.0.1:1"):
        (group,) = json.loads((tmp_path / FOLDER / "run.json").read_text())
        assert live_targets(tmp_path) == [group]

    assert group["targets"] == ["127.0.0.1:1"]
    assert group["labels"]["job"] == JOB
    # Prometheus drops these after relabeling: they are not labels of series.
    assert all(name == "job" or name.startswith("__meta_") for name in group["labels"])
    assert list((tmp_path / FOLDER).iterdir()) == []
    assert live_targets(tmp_path / "nowhere") == []


def test_the_target_of_a_killed_run_is_removed_by_the_next_one(tmp_path: Path) -> None:
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with held:
        assert held.stdout is not None
        held.stdout.readline()
        path = tmp_path / FOLDER / "other.json"
        assert [each["targets"] for each in live_targets(tmp_path)] == [["127.0.0.1:2"]]
        os.kill(held.pid, signal.SIGKILL)
        held.wait()
    assert path.exists()

    with published(tmp_path, "run", "127.0.0.1:1"):
        assert not path.exists()


def edited(tmp_path: Path, **labels: str) -> list[str]:
    """The targets that are live where this process's own file says something else."""
    path = tmp_path / FOLDER / "run.json"
    with published(tmp_path, "run", "127.0.0.1:1"):
        (group,) = json.loads(path.read_text())
        group["labels"] |= {f"__meta_stoker_{key}": value for key, value in labels.items()}
        path.write_text(json.dumps([group]))
        return [address for each in live_targets(tmp_path) for address in each["targets"]]


def test_a_process_of_an_earlier_boot_or_with_the_same_number_is_not_the_runs(
    tmp_path: Path,
) -> None:
    assert edited(tmp_path) == ["127.0.0.1:1"]
    assert edited(tmp_path, boot="another") == []
    assert edited(tmp_path, started="1") == []


def test_another_machines_file_stays_and_its_loopback_address_is_not_a_target_here(
    tmp_path: Path,
) -> None:
    with published(tmp_path, "run", "10.0.0.1:1"):
        path = tmp_path / FOLDER / "run.json"
        text = path.read_text().replace('host": "', 'host": "not-')
        path.write_text(text)
        assert len(live_targets(tmp_path)) == 1
        path.write_text(text.replace("10.0.0.1", "127.0.0.1"))

        assert live_targets(tmp_path) == []
        assert path.exists()


def test_a_damaged_file_hides_no_other_run(tmp_path: Path) -> None:
    with published(tmp_path, "run", "127.0.0.1:1"):
        for name, text in (("a", "{"), ("b", "[1]"), ("c", '[{"targets": 1}]'), ("d", "{}")):
            (tmp_path / FOLDER / f"{name}.json").write_text(text)

        assert [each["targets"] for each in live_targets(tmp_path)] == [["127.0.0.1:1"]]
