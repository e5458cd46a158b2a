"""Counters that workers share: no number decreases, whichever worker dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.serve.errors import Code
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.observability.version_metrics import MAX_VERSIONS, VersionMetrics
from stoker.serve.runtime.shared_counters import SharedCounters, read_counters
from stoker.serve.runtime.versions_in_use import read_versions_in_use, versions_file

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
    """A process counts, and is killed without warning."""
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
    place = 8 + 8 + 8  # after the first row: a key without its head
    raw[place + 8 : place + 9] = b"b"
    path.with_name("half").write_bytes(raw)

    assert read_counters(path.with_name("half")) == {"a": [3.0]}
    assert read_counters(tmp_path / "none") == {}
    cells.close()


def test_which_versions_a_worker_ran_is_known_after_it_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from stoker.serve.runtime.versions_in_use import *\n"
        "rows = VersionsInUse(Path(sys.argv[1]))\n"
        "rows.row('m', Path('/models/m'), 1)[REQUESTS] = 2\n"
        "rows.row('m', Path('/models/m'), 7)[LOADING] = 1\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = versions_file(tmp_path, 3)
    assert read_versions_in_use(path) == []

    subprocess.run([sys.executable, "-c", code, str(path)], check=False)

    found = [
        (each.model, each.base, each.version, each.requests, each.loading)
        for each in read_versions_in_use(path)
    ]
    base = Path("/models/m")
    assert found == [("m", base, 1, 2, False), ("m", base, 7, 0, True)]


def test_an_age_grows_and_what_has_not_happened_has_none(tmp_path: Path) -> None:
    one = ServeMetrics(tmp_path, worker=1)
    name = "stoker_rollout_state_age_seconds"
    assert f"{name}{{" not in one.exposition()

    one.rollout_state_age.happened(time.monotonic() - 5.0, model_name="m", worker="1")
    ServeMetrics(tmp_path, worker=2).rollout_state_age.happened(
        time.monotonic(), model_name="m", worker="2"
    )

    text = one.exposition()
    assert 5.0 <= value_of(text, f'{name}{{model_name="m",worker="1"}}') < 60.0
    assert value_of(text, f'{name}{{model_name="m",worker="2"}}') < 5.0
    # The next worker of this number has not read it yet.
    assert 'worker="1"' not in "".join(
        line for line in ServeMetrics(tmp_path, worker=1).exposition().splitlines() if name in line
    )


RUNS_AND_STANDS_STILL = """
import time
from stoker.serve.runtime.stuck_call_watchdog import StuckCallWatchdog
watchdog = StuckCallWatchdog(max_run_s=3.0)
with watchdog.watched(lambda: None):
    # Before it may begin, because it may be stopped at once.
    before_s = begun_s = time.monotonic()
    print("begun", flush=True)
    while (now_s := time.monotonic()) - before_s < 3.5 and now_s - begun_s < 60:
        before_s = now_s
        time.sleep(0.05)
    time.sleep(0.5)
    print(watchdog.stuck, flush=True)
"""


def test_time_in_which_a_process_stood_still_is_not_time_of_its_models() -> None:
    command = [sys.executable, "-c", RUNS_AND_STANDS_STILL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        os.kill(running.pid, signal.SIGSTOP)
        time.sleep(4.5)  # longer than max_run_s, which this time must not count for
        os.kill(running.pid, signal.SIGCONT)
        assert running.stdout.readline() == "False\n"


def test_versions_are_counted_over_all_workers_and_cannot_fill_the_memory(tmp_path: Path) -> None:
    workers = [ServeMetrics(tmp_path, worker=number) for number in range(2)]
    by_version = [VersionMetrics(each) for each in workers]

    for each in by_version:
        each.count("m", 3, Code.OK, took_s=20e-6)
        each.count("m", 3, Code.INTERNAL, took_s=9.0)
    for version in range(10, 10 + 2 * MAX_VERSIONS):
        by_version[0].count("m", version, Code.OK, took_s=20e-6)

    text = workers[1].exposition()
    assert 'stoker_request_count{model_name="m",version="3",status="OK"} 2\n' in text
    assert 'stoker_request_count{model_name="m",version="3",status="INTERNAL"} 2\n' in text
    assert 'stoker_request_latency_count{model_name="m",version="3"} 2\n' in text
    assert value_of(text, "stoker_request_count{") == 4 + 2 * MAX_VERSIONS
    others = f'{{model_name="m",version="other",status="OK"}} {MAX_VERSIONS + 1}\n'
    assert f"stoker_request_count{others}" in text
    own = {
        line.split('version="')[1].split('"')[0] for line in text.splitlines() if "version=" in line
    }
    assert len(own) == MAX_VERSIONS + 1
