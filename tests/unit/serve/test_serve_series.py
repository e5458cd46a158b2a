"""The series of all models are bounded over all workers, and reading them is linear in their number."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stoker.serve.errors import Code
from stoker.serve.observability import counters
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.observability.version_metrics import VersionMetrics
from stoker.serve.runtime.series_limit import SHARED_FILE, SeriesLimit

OF_MODELS = ("model_name=", "model=")


def series_of_models(text: str) -> set[str]:
    """Series with a model's name; the buckets of a histogram are one."""
    return {
        line.split(" ")[0].replace("_sum{", "{")
        for line in text.splitlines()
        if any(label in line for label in OF_MODELS)
        and not line.startswith("#")
        and "_bucket{" not in line
        and "_count{model_name" not in line.replace("request_count{", "{")
    }


def count(metrics: ServeMetrics, model: str) -> None:
    """What one request for a model counts."""
    metrics.request_count.add(model_name=model, status="OK")
    metrics.request_latency.observe(30.0, model_name=model, API="Predict", entrypoint="REST")
    metrics.queued_requests.add(0.0, model_name=model)
    VersionMetrics(metrics).count(model, 1, Code.OK, took_s=1e-3)


def test_ten_thousand_names_of_several_workers_stay_within_the_limit(tmp_path: Path) -> None:
    workers = [ServeMetrics(tmp_path, worker=number, max_series=200) for number in range(3)]

    for number in range(3_334):
        for at, worker in enumerate(workers):
            count(worker, f"model-{number}-{at}")
    text = workers[0].exposition()

    own = {line for line in series_of_models(text) if 'model_name="other"' not in line}
    assert len(own) == 200
    others = series_of_models(text) - own
    assert len(others) == 5, "one for each metric"
    total = sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(":tensorflow:serving:request_count{")
    )
    assert total == 3 * 3_334, "no request is lost"


def test_a_series_stays_once_it_was_there_whichever_worker_answers(tmp_path: Path) -> None:
    first, second = (ServeMetrics(tmp_path, worker=n, max_series=6) for n in range(2))
    count(first, "a")
    shown = series_of_models(first.exposition())
    for name in ("b", "c", "d"):
        count(second, name)
        count(first, name)

    for worker in (first, second, ServeMetrics(tmp_path, worker=5, max_series=6)):
        assert shown < series_of_models(worker.exposition())
    again = ServeMetrics(tmp_path, worker=0, max_series=6)  # the next worker of this number
    count(again, "a")
    assert shown < series_of_models(again.exposition())


def test_a_line_that_a_killed_worker_left_unfinished_harms_no_other(tmp_path: Path) -> None:
    one = SeriesLimit(tmp_path, max_series=3)
    assert one.admits("a")
    with (tmp_path / SHARED_FILE).open("ab") as file:
        file.write(b"half")

    other = SeriesLimit(tmp_path, max_series=3)
    assert (other.admits("b"), one.admits("b"), one.admits("a")) == (True, True, True)
    assert SeriesLimit(tmp_path, max_series=3).admits("a")
    for limit in (one, other):
        limit.close()


ADMITS = """
import sys
from pathlib import Path
from stoker.serve.runtime.series_limit import SeriesLimit
limit = SeriesLimit(Path(sys.argv[1]), max_series=500)
print(sum(limit.admits(f"{sys.argv[2]}-{number}") for number in range(400)))
"""


def test_processes_that_count_at_once_admit_the_limit_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ADMITS, str(tmp_path)]
    running = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]

    admitted = [int(each.communicate(timeout=120)[0]) for each in running]

    assert sum(admitted) == 500
    assert len((tmp_path / SHARED_FILE).read_bytes().splitlines()) == 500


def test_names_beyond_the_limit_take_no_memory_of_their_own_in_the_file(tmp_path: Path) -> None:
    metrics = ServeMetrics(tmp_path, max_series=20)
    for number in range(200):
        count(metrics, f"{number}" + "x" * 1_000)

    assert (tmp_path / "0.metrics").stat().st_size == 1 << 20, "one chunk"
    assert len(metrics.exposition()) < 500_000


def test_labels_that_the_catalogue_does_not_list_are_refused() -> None:
    metrics = ServeMetrics()
    with pytest.raises(ValueError, match="request_count has model_name, status, not model"):
        metrics.request_count.add(model="m")
    with pytest.raises(ValueError, match="has no label, not model"):
        metrics.wrapped_run_count.add(model="m")


def test_every_key_is_read_once_for_a_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = ServeMetrics(tmp_path)
    for number in range(100):
        count(metrics, f"model-{number}")
    rows = len(metrics._cells.rows())
    read: Counter[str] = Counter()

    def loads(text: str) -> Any:
        read[text] += 1
        return json.loads(text)

    class Json:
        dumps = staticmethod(json.dumps)

    Json.loads = staticmethod(loads)  # type: ignore[attr-defined] # a module's stand-in that counts
    monkeypatch.setattr(counters, "json", Json)
    metrics.exposition()

    assert (len(read), set(read.values())) == (rows, {1})


def test_a_scrape_of_200_models_with_2_versions_is_small_and_quick() -> None:
    metrics = ServeMetrics()
    versions = VersionMetrics(metrics)
    for number in range(200):
        count(metrics, f"model-{number}")
        metrics.runtime_latency.observe(
            9.0, model_name=f"model-{number}", API="Predict", runtime="TF1"
        )
        versions.count(f"model-{number}", 2, Code.OK, took_s=1e-3)

    took_s = []
    for _ in range(3):
        began_s = time.thread_time()
        text = metrics.exposition()
        took_s.append(time.thread_time() - began_s)

    assert len(text) < 5_000_000
    assert min(took_s) < 0.3  # CPU time of this thread: another process's load does not count


def test_a_level_is_the_largest_of_the_living_workers_and_can_be_beyond_the_limit(
    tmp_path: Path,
) -> None:
    one, other = (ServeMetrics(tmp_path, worker=n, max_series=2) for n in range(2))
    name = 'stoker_prediction_skew_ratio{model_name="m",column="fare"}'
    assert name not in one.exposition()

    one.prediction_skew.set(0.25, model_name="m", column="fare")
    other.prediction_skew.set(0.0, model_name="m", column="fare")
    assert f"{name} 0.25\n" in other.exposition()
    one.prediction_skew.set(0.0, model_name="m", column="fare")
    assert f"{name} 0\n" in other.exposition()

    for each in (one, other):
        each.prediction_skew.unset(column="fare", model_name="m")
        each.prediction_skew.unset(column="none", model_name="m")
    assert "stoker_prediction_skew_ratio{" not in other.exposition()

    other.prediction_skew.set(0.5, model_name="m", column="kind")
    other.prediction_skew.set(0.5, model_name="m", column="third")
    text = one.exposition()
    assert 'column="kind"' in text
    assert "third" not in text
    assert "other" not in "".join(line for line in text.splitlines() if "skew" in line)
