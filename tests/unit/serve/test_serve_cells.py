"""What workers count together: no number goes backwards, whoever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.serve.errors import Code
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.observability.version_metrics import MOST_VERSIONS, VersionMetrics
from stoker.serve.runtime.shared_counters import SharedCounters, read_counters

COUNTS_AND_HANGS = """
import sys, time
from pathlib import Path
from stoker.serve.observability.metrics import ServeMetrics
metrics = ServeMetrics(Path(sys.argv[1]), worker=int(sys.argv[2]))
metrics.requests_under_way.add(7, entrypoint="REST")
for _ in range(5):
    metrics.request_count.add(model_name="m", status="OK")
metrics.request_latency.observe(25.0, model_name="m", API="Predict", entrypoint="REST")
print("counted", flush=True)
time.sleep(600)  # until it is killed
"""


def value_of(text: str, start: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(start))


def killed(folder: Path, worker: int) -> None:
    """A process counts, and is killed without a word."""
    command = [sys.executable, "-c", COUNTS_AND_HANGS, str(folder), str(worker)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "counted\n"
        text = ServeMetrics(folder, worker="me").exposition()
        assert value_of(text, "stoker_requests_under_way{") == 7
        assert value_of(text, f'process_resident_memory_bytes{{worker="{worker}"}}') > 1 << 20
        os.kill(running.pid, signal.SIGKILL)


def test_what_a_killed_worker_counted_stays_and_what_was_true_of_it_does_not(
    tmp_path: Path,
) -> None:
    killed(tmp_path, 0)
    me = ServeMetrics(tmp_path, worker=1)
    me.request_count.add(2, model_name="m", status="OK")

    text = me.exposition()

    assert value_of(text, ':tensorflow:serving:request_count{model_name="m",status="OK"}') == 7
    assert value_of(text, "stoker_requests_under_way{") == 0
    assert 'stoker_worker_pid{worker="0"}' not in text
    assert value_of(text, ":tensorflow:serving:request_latency_count{") == 1

    following = ServeMetrics(tmp_path, worker=0)  # the next worker of the same number
    following.request_count.add(model_name="m", status="OK")
    following.request_latency.observe(1e12, model_name="m", API="Predict", entrypoint="REST")
    text = me.exposition()
    counts = [line for line in text.splitlines() if not line.startswith("process_")]
    others = following.exposition().splitlines()
    assert counts == [line for line in others if not line.startswith("process_")]
    assert value_of(text, ":tensorflow:serving:request_count{") == 8
    latency = ':tensorflow:serving:request_latency_bucket{model_name="m"'
    buckets = [float(x.split()[-1]) for x in text.splitlines() if x.startswith(latency)]
    assert buckets == sorted(buckets)
    assert buckets[-1] == value_of(text, ":tensorflow:serving:request_latency_count{") == 2


@pytest.mark.parametrize("value", ["line\nbreak", 'quote"', "\\", "ü" * 50])
def test_labels_of_any_text_come_back(tmp_path: Path, value: str) -> None:
    ServeMetrics(tmp_path, worker=0).request_count.add(model_name=value, status="OK")
    text = ServeMetrics(tmp_path, worker=1).exposition()
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    assert f'request_count{{model_name="{escaped}",status="OK"}} 1' in text


def test_a_file_of_several_chunks_is_read_whole_and_gone_on_from(tmp_path: Path) -> None:
    path = tmp_path / "x.metrics"
    cells = SharedCounters(path)
    for number in range(9000):
        cells.row(f"key {number}", 35)[34] = number
    cells.close()
    assert path.stat().st_size > 2 << 20

    assert read_counters(path) == cells.rows()
    again = SharedCounters(path)
    again.row("key 8999", 35)[34] += 1
    again.row("new", 1)[0] = 5
    found = read_counters(path)
    assert (found["key 8999"][34], found["new"], len(found)) == (9000, [5.0], 9001)
    again.close()


def test_a_row_that_is_being_added_is_not_seen_and_a_file_that_is_gone_is_empty(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.metrics"
    cells = SharedCounters(path)
    cells.row("a", 1)[0] = 3
    raw = bytearray(path.read_bytes())
    place = 8 + 8 + 8  # behind the first row: a key without its head
    raw[place + 8 : place + 9] = b"b"
    path.with_name("half").write_bytes(raw)

    assert read_counters(path.with_name("half")) == {"a": [3.0]}
    assert read_counters(tmp_path / "none") == {}
    cells.close()


def test_versions_are_counted_over_all_workers_and_cannot_fill_the_memory(tmp_path: Path) -> None:
    workers = [ServeMetrics(tmp_path, worker=number) for number in range(2)]
    by_version = [VersionMetrics(each) for each in workers]

    for each in by_version:
        each.count("m", 3, Code.OK, took_s=20e-6)
        each.count("m", 3, Code.INTERNAL, took_s=9.0)
    for version in range(10, 10 + 2 * MOST_VERSIONS):
        by_version[0].count("m", version, Code.OK, took_s=20e-6)

    text = workers[1].exposition()
    assert 'stoker_request_count{model_name="m",version="3",status="OK"} 2\n' in text
    assert 'stoker_request_count{model_name="m",version="3",status="INTERNAL"} 2\n' in text
    assert 'stoker_request_latency_count{model_name="m",version="3"} 2\n' in text
    assert value_of(text, "stoker_request_count{") == 4 + 2 * MOST_VERSIONS
    others = f'{{model_name="m",version="other",status="OK"}} {MOST_VERSIONS + 1}\n'
    assert f"stoker_request_count{others}" in text
    own = {
        line.split('version="')[1].split('"')[0] for line in text.splitlines() if "version=" in line
    }
    assert len(own) == MOST_VERSIONS + 1
