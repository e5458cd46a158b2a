"""The tf.data service as its users run it: a dispatcher and two workers, real processes by the CLI.

What is promised and what is not, when nothing dies, when a worker dies, when the dispatcher dies.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from tests.datasets import write_dataset
from tests.integration.app.conftest import Recorder

import stoker.transform as tft
from stoker.app.chain import run_chain
from stoker.app.experiment import load_experiment
from stoker.cli.main import invoke
from stoker.core.errors import ConfigError, DataError
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.feed.calls import Calls
from stoker.data.feed.service.reading import ServiceFeed, distributed
from stoker.data.feed.service.records import RecordCopy, copied
from stoker.data.feed.service.status import service_status, wait_until_ready
from stoker.data.ingest import ServiceConfig

ROWS = 3000
COLUMNS = (
    Column(name="number", dtype="int64"),
    Column(name="ratio", dtype="float32"),
    Column(name="word", dtype="string"),
    Column(name="y", dtype="int64"),
)


@dataclass
class Running:
    """`stoker data-service start` as a process, and what it said."""

    process: subprocess.Popen[str]
    said: dict[str, Any]

    @property
    def config(self) -> ServiceConfig:
        return ServiceConfig(address=self.said["address"], workers=2, timeout_s=60)

    def kill(self, member: str) -> None:
        os.kill(self.said["pids"][member], signal.SIGKILL)


@contextlib.contextmanager
def started(log: Path, *flags: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "stoker", "data-service", "start", "--port", "0", "--json"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield Running(process, json.loads(line))
        finally:
            process.terminate()
            process.wait(300)
            process.communicate()


def left_of(running: Running) -> list[int]:
    """The processes that it started and that are still there when they have had time to end."""
    end_s = time.monotonic() + 120
    while True:
        left = [pid for pid in running.said["pids"].values() if Path(f"/proc/{pid}").exists()]
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two workers; SIGTERM at the end leaves no process behind."""
    with started(tmp_path_factory.mktemp("log") / "stderr", "--workers", "2") as running:
        yield running
    assert (left_of(running), running.process.returncode) == ([], 0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("dataset")
    number = np.arange(ROWS)
    table = pa.table(
        {
            "number": number,
            "ratio": (number / 7).astype(np.float32),
            "word": [f"w{n % 11}" for n in number],
            "y": (number % 2).astype(np.int64),
        }
    )
    return write_dataset(root, COLUMNS, {"train": [table]})


def preprocessing_fn(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {
        "number": inputs["number"],
        "scaled": tft.scale_to_z_score(inputs["ratio"]),
        "word": tft.compute_and_apply_vocabulary(inputs["word"]),
        "y": inputs["y"],
    }


@pytest.fixture(scope="module")
def transform(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Transform:
    folder = tmp_path_factory.mktemp("t") / "transform"
    return build_transform(dataset, preprocessing_fn, folder, label="y")


@pytest.fixture(scope="module")
def copy(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> RecordCopy:
    return copied(dataset, "train", tmp_path_factory.mktemp("c") / "copy", columns=COLUMNS)


def to_batch(transform: Transform) -> Callable[[dict[str, tf.Tensor]], Any]:
    return lambda raw: (transform.apply_features(raw), transform.apply_label(raw))


def slowly(transform: Transform) -> Callable[[dict[str, tf.Tensor]], Any]:
    """So much work a batch that a kill finds both workers in the middle of it."""

    def work(raw: dict[str, tf.Tensor]) -> Any:
        square = tf.random.stateless_uniform([700, 700], seed=(1, 2))
        with tf.control_dependencies([square @ square]):
            return to_batch(transform)({name: tf.identity(raw[name]) for name in raw})

    return work


def test_each_record_comes_once_an_epoch_transformed_as_here(
    service: Running, copy: RecordCopy, transform: Transform, dataset: Dataset
) -> None:
    feed = ServiceFeed(copy, to_batch(transform), service=service.config)

    batches = list(feed.epochs(0, 2, batch_size=128, seed=3))

    table = dataset.table("train")
    raw = {c.name: tf.constant(table[c.name].to_numpy(), c.tensor_dtype) for c in COLUMNS}
    features, labels = to_batch(transform)(raw)
    steps = -(-ROWS // 128)
    orders = []
    for epoch in (batches[:steps], batches[steps:]):
        assert [len(y) for _, y in epoch] == [128] * (steps - 1) + [ROWS % 128]
        read = {name: np.concatenate([x[name] for x, _ in epoch]) for name in features}
        order = np.argsort(read["number"])
        for name, wanted in features.items():
            np.testing.assert_array_equal(read[name][order], wanted)
        np.testing.assert_array_equal(np.concatenate([y for _, y in epoch])[order], labels)
        orders.append(read["number"].tolist())
    assert len(batches) == 2 * steps
    assert orders[0] != orders[1]


def test_the_shuffle_leaves_no_trace_of_the_order_on_the_disk(
    service: Running, copy: RecordCopy, transform: Transform
) -> None:
    feed = ServiceFeed(copy, to_batch(transform), service=service.config)

    read = [x["number"] for x, _ in feed.epochs(0, 1, batch_size=100, seed=0)]

    # 100 numbers drawn of 0 to 2999 have a mean of 1500 with a deviation of 87.
    assert max(abs(np.mean(batch) - (ROWS - 1) / 2) for batch in read) < 5 * 87


def test_orders_come_again_after_the_last_of_them(
    service: Running, copy: RecordCopy, transform: Transform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.data.feed.service.reading.ORDERS", 2)
    feed = ServiceFeed(copy, to_batch(transform), service=service.config)

    numbers = [x["number"].numpy() for x, _ in feed.epochs(3, 6, batch_size=1000, seed=0)]

    assert len(numbers) == 9
    for epoch in range(3):
        together = np.concatenate(numbers[3 * epoch : 3 * epoch + 3])
        np.testing.assert_array_equal(np.sort(together), np.arange(ROWS))


def doubled_in_python(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values * 2


def with_numpy_function(x: tf.Tensor) -> tf.Tensor:
    return tf.numpy_function(doubled_in_python, [x], tf.int64)


def with_py_function(x: tf.Tensor) -> tf.Tensor:
    return tf.py_function(doubled_in_python, [x], tf.int64)


def inside_an_interleave(x: tf.Tensor) -> tf.data.Dataset[Any]:
    return tf.data.Dataset.range(x).map(with_numpy_function)


def generated() -> Iterator[int]:
    yield 1


numbers = tf.data.Dataset.range(4)
PYTHON: dict[str, Callable[[], tf.data.Dataset[Any]]] = {
    "PyFunc (doubled_in_python)": lambda: numbers.map(with_numpy_function),
    "EagerPyFunc (doubled_in_python)": lambda: numbers.map(with_py_function),
    "PyFunc (doubled_in_python).": lambda: numbers.interleave(inside_an_interleave),
    "PyFunc (Dataset.from_generator)": lambda: tf.data.Dataset.from_generator(
        generated, output_signature=tf.TensorSpec([], tf.int64)
    ),
}


@pytest.mark.parametrize("named", PYTHON)
def test_a_pipeline_that_calls_python_is_refused_by_name(named: str) -> None:
    nowhere = ServiceConfig(address="127.0.0.1:1", timeout_s=0.1)

    with pytest.raises(ConfigError, match="must not have a Python function") as refused:
        distributed(PYTHON[named](), nowhere)

    assert named in str(refused.value)


def test_a_transform_that_calls_python_is_refused_by_name(copy: RecordCopy) -> None:
    nowhere = ServiceConfig(address="127.0.0.1:1", timeout_s=0.1)

    with pytest.raises(ConfigError, match="doubled_in_python"):
        ServiceFeed(copy, lambda raw: with_numpy_function(raw["number"]), service=nowhere)


def test_a_pipeline_that_reads_a_variable_is_refused() -> None:
    weight = tf.Variable(tf.constant(2.0))
    nowhere = ServiceConfig(address="127.0.0.1:1", timeout_s=0.1)

    def weighted(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, tf.float32) * weight

    with pytest.raises(ConfigError, match=r"must not read a variable.*ReadVariableOp"):
        distributed(numbers.map(weighted), nowhere)


def test_any_pipeline_of_tensorflows_own_operations_can_be_sent(service: Running) -> None:
    def squared(x: tf.Tensor) -> tf.Tensor:
        return x * x

    sent = distributed(tf.data.Dataset.range(50).map(squared), service.config)

    assert sorted(int(x) for x in sent) == [n * n for n in range(50)]


def test_a_killed_worker_costs_no_record_twice_and_the_next_epoch_is_whole(
    service: Running, copy: RecordCopy, transform: Transform
) -> None:
    feed = ServiceFeed(copy, slowly(transform), service=service.config)
    read: list[int] = []
    for step, (x, _) in enumerate(feed.epochs(0, 2, batch_size=25, seed=0)):
        read += x["number"].numpy().tolist()
        if step == 20:
            service.kill("worker 1")
    back = wait_until_ready(service.said["address"], workers=2, timeout_s=60)

    first, second = read[:-ROWS], read[-ROWS:]
    assert sorted(second) == list(range(ROWS))
    assert len(first) == len(set(first))
    # What is lost is what one worker held: its open files, its shuffle, its finished batches.
    assert len(first) >= 0.75 * ROWS
    assert sorted(worker.address for worker in back.workers) == sorted(service.said["workers"])


def test_a_killed_dispatcher_goes_on_from_its_journal_and_costs_each_worker_one_file_at_most(
    service: Running, copy: RecordCopy, transform: Transform
) -> None:
    feed = ServiceFeed(copy, slowly(transform), service=service.config)
    read: list[int] = []
    for step, (x, _) in enumerate(feed.epochs(0, 1, batch_size=25, seed=0)):
        read += x["number"].numpy().tolist()
        if step == 20:
            service.kill("dispatcher")

    assert len(read) == len(set(read))
    # A file is in the journal before its worker hears of it: if it is killed between the two, no worker reads that file.
    most_lost = service.config.workers * max(file.rows for file in copy.files)
    assert ROWS - most_lost <= len(read) <= ROWS


def stoker(*arguments: str) -> int:
    """The command in this process: one of its own would import TensorFlow first."""
    return invoke(["data-service", *arguments], debug=False)


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals, as they were before a command set its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_port_in_use_is_one_line_and_exit_2(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        assert stoker("start", "--port", str(holder.getsockname()[1])) == 2

    (line,) = capfd.readouterr().err.splitlines()
    assert "must be free for the tf.data service" in line


def test_a_dispatcher_that_is_not_there_is_one_line_and_exit_2(
    copy: RecordCopy, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        assert stoker("status", address, "--timeout-s", "0.5") == 2
        (line,) = capfd.readouterr().err.splitlines()
        with pytest.raises(ConfigError, match=r"must answer at .* within 0"):
            ServiceFeed(
                copy,
                lambda raw: raw["number"],
                service=ServiceConfig(address=address, timeout_s=0.5),
            )

    assert "within 0.5 s" in line
    assert "nothing listens there" in line


def test_a_listener_that_never_answers_is_given_up_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ConfigError, match="no answer"):
            service_status(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5)


def test_too_few_workers_are_waited_for_and_then_named(service: Running) -> None:
    with pytest.raises(ConfigError, match=r"must have 3 worker\(s\).*2 of 2 known"):
        wait_until_ready(service.said["address"], workers=3, timeout_s=1)


def test_status_names_the_processes_that_answer(
    service: Running, capfd: pytest.CaptureFixture[str]
) -> None:
    assert stoker("status", service.said["address"], "--json") == 0

    found = json.loads(capfd.readouterr().out)
    assert found["answering"] == 2
    assert [w["address"] for w in found["workers"]] == sorted(service.said["workers"])


@pytest.mark.soak
def test_workers_can_join_a_dispatcher_and_are_missed_when_they_are_gone_and_none_remains(
    tmp_path: Path,
    copy: RecordCopy,
    transform: Transform,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The workers that joined end by SIGINT, the first service by SIGKILL, which none can handle."""
    monkeypatch.setattr("stoker.data.feed.service.reading.CHECK_WORKERS_S", 0.2)
    with started(tmp_path / "first", "--workers", "1") as service:
        address = service.said["address"]
        config = ServiceConfig(address=address, workers=1, timeout_s=3)
        with started(tmp_path / "second", "--dispatcher", address, "--workers", "1") as joined:
            both = wait_until_ready(address, workers=2, timeout_s=30)
            feed = ServiceFeed(copy, to_batch(transform), service=config)
            joined.process.send_signal(signal.SIGINT)
            joined.process.wait(300)
        gone = joined.said["workers"][0]

        with feed.shuffled(
            Calls(rows=feed.rows, batch_size=8, steps_per_call=1, seed=0, first=0, last=1)
        ):
            deadline_s = time.monotonic() + 300
            while gone not in caplog.text and time.monotonic() < deadline_s:
                time.sleep(0.1)
        with pytest.raises(ConfigError, match=rf"no answer from {gone}.*--worker-port"):
            ServiceFeed(copy, to_batch(transform), service=config)
        assert len(service.said["pids"]) == 2
        service.process.kill()
        service.process.wait(300)

    assert (left_of(joined), joined.process.returncode) == ([], 0)
    assert (left_of(service), service.process.returncode) == ([], -signal.SIGKILL)
    assert gone in [worker.address for worker in both.workers]
    assert f"workers that do not answer: {gone}" in caplog.text


def test_nothing_listens_on_another_address_than_loopback(service: Running) -> None:
    mine = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    outside = [address for address in mine if ":" not in address]
    if not outside:
        pytest.skip("this machine has no address but loopback")
    ports = [service.said["address"], *service.said["workers"]]
    for port in (int(address.rpartition(":")[2]) for address in ports):
        with socket.socket() as inside:
            assert inside.connect_ex(("127.0.0.1", port)) == 0
        with socket.socket() as other:
            assert other.connect_ex((outside[0], port)) == errno.ECONNREFUSED


def test_a_file_that_changes_between_epochs_is_named(
    service: Running, dataset: Dataset, tmp_path: Path
) -> None:
    own = copied(dataset, "train", tmp_path / "copy", columns=COLUMNS)
    feed = ServiceFeed(own, lambda raw: raw["number"], service=service.config)
    with (own.root / own.files[1].file).open("ab") as stream:
        stream.write(b"\0")

    with pytest.raises(DataError, match=r"00001\.tfrecord must not change"):
        feed.epochs(1, 2, batch_size=10, seed=0)


@pytest.mark.parametrize("wrong", ["nowhere", "127.0.0.1:", ":5050", "http://h:1/x", "h:70000"])
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port"):
        ServiceConfig(address=wrong)


RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.fixture(scope="module")
def cancer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The common folder of the runs: the stages before training are done once."""
    folder = tmp_path_factory.mktemp("cancer")
    return [f"runs={folder}/runs", f"models={folder}/models"]


def test_a_run_trains_on_what_the_workers_make(
    service: Running, cancer: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    # Few epochs of many steps: each epoch waits for the service to begin it.
    experiment = load_experiment(
        RECIPES / "cancer",
        overrides=[
            *cancer,
            f"data.service.address={service.config.address}",
            "data.service.workers=2",
            "train.epochs=4",
            "train.batch_size=8",
        ],
    )

    result = run_chain(experiment, Recorder())

    assert "the order of records is not fixed, and an epoch cannot be resumed" in caplog.text
    rows = result.results["ingest"]["rows"]["train"]
    batch_size = result.results["train"]["resolved"]["batch_size"]
    assert result.results["train"]["steps"] == 4 * -(-rows // batch_size)
    assert result.results["evaluate"]["metrics"]["auc"] > 0.97


@pytest.mark.parametrize(
    ("setting", "named"),
    [("train.deterministic=true", "train.deterministic"), ("train.augment.flip=0.5", "augment")],
)
def test_what_a_service_cannot_do_is_refused(
    service: Running, cancer: list[str], setting: str, named: str
) -> None:
    experiment = load_experiment(
        RECIPES / "cancer",
        overrides=[
            *cancer,
            f"data.service.address={service.config.address}",
            setting,
        ],
    )

    with pytest.raises(ConfigError, match=named):
        run_chain(experiment, Recorder(), until="train")
