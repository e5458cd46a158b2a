"""Each option changes the pipeline that TensorFlow really runs: the finalised graph is looked at."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import dataset_options_pb2, graph_pb2

from stoker.data.feed.options import RAM_SHARE, as_written, free_memory_bytes, tuned


def incremented(x: tf.Tensor) -> tf.Tensor:
    return x + 1


def plain() -> tf.data.Dataset[Any]:
    """A pipeline written without regard to speed, with TensorFlow's own rewriting turned off."""
    written = tf.data.Dataset.range(64).map(incremented).batch(4)
    none = tf.data.Options()
    none.experimental_optimization.apply_default_optimizations = False
    none.experimental_optimization.inject_prefetch = False
    return written.with_options(none)


def run_graph(dataset: tf.data.Dataset[Any]) -> dict[str, Any]:
    """Operation -> its node, of the graph that an iterator over this dataset runs."""
    final = tf.raw_ops.FinalizeDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        has_captured_ref=False,
        output_types=[tf.int64],
        output_shapes=[None],
    )
    serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=final).numpy()
    return {node.op: node for node in graph_pb2.GraphDef.FromString(serialized).node}


def test_without_the_options_the_pipeline_runs_as_it_was_written() -> None:
    operations = run_graph(plain())

    assert {"MapDataset", "BatchDatasetV2"} <= set(operations)
    assert not operations["BatchDatasetV2"].attr["parallel_copy"].b
    assert "PrefetchDataset" not in operations


def test_map_and_batch_become_one_parallel_operation() -> None:
    operations = run_graph(tuned(plain()))

    assert "MapAndBatchDataset" in operations
    assert not {"MapDataset", "BatchDatasetV2"} & set(operations)


def test_a_map_becomes_parallel_and_a_prefetch_stands_at_the_end() -> None:
    operations = run_graph(tuned(plain().map(incremented).take(8)))

    assert {"ParallelMapDatasetV2", "PrefetchDataset"} <= set(operations)
    assert "MapDataset" not in operations


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_order_is_kept_or_not_as_the_caller_says(deterministic: bool) -> None:
    parallel = tf.data.Dataset.range(64).map(incremented, num_parallel_calls=2)

    node = run_graph(tuned(parallel, deterministic=deterministic))["ParallelMapDatasetV2"]

    assert (node.attr["deterministic"].s == b"false") is not deterministic


def test_threads_of_its_own_are_really_its_own() -> None:
    seen: set[int] = set()

    def note(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen.add(threading.get_ident())
        time.sleep(0.01)  # so that several threads get work
        return x

    def noted(x: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(note, [x], tf.int64, stateful=False)

    source = tf.data.Dataset.range(24).map(noted, num_parallel_calls=12)
    for _ in tuned(source, threads=3):
        pass

    assert "PrivateThreadPoolDataset" in run_graph(tuned(source, threads=3))
    assert len(seen) <= 3


def test_the_memory_budget_arrives_as_a_share_of_what_is_free() -> None:
    free = free_memory_bytes()

    node = run_graph(tuned(plain()))["OptionsDataset"]
    options = dataset_options_pb2.Options.FromString(node.attr["serialized_options"].s)

    assert options.autotune_options.enabled
    assert options.autotune_options.ram_budget == pytest.approx(RAM_SHARE * free, rel=0.2)


def test_autotune_can_be_turned_off() -> None:
    assert "ModelDataset" in run_graph(tuned(plain()))
    assert "ModelDataset" not in run_graph(tuned(plain(), autotune=False))
    assert "ModelDataset" not in run_graph(as_written(plain()))


@pytest.mark.parametrize("slack", [True, False])
def test_slack_reaches_the_last_prefetch(slack: bool) -> None:
    last = run_graph(tuned(plain(), slack=slack, ahead=1))["PrefetchDataset"]

    assert last.attr["slack_period"].i == int(slack)


def test_elements_and_order_stay_and_a_slow_map_runs_side_by_side() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def slow(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        # The earlier, the slower: an order that is not kept would show.
        time.sleep(0.02 if int(x) % 4 == 0 else 0.002)
        with lock:
            running -= 1
        return x * 2

    def mapped(x: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(slow, [x], tf.int64, stateful=False)

    off = tf.data.Options()
    off.experimental_optimization.apply_default_optimizations = False
    written = tf.data.Dataset.range(64).map(mapped).with_options(off)

    before, one_at_a_time = [int(x) for x in written], most
    after = [int(x) for x in tuned(written)]

    assert one_at_a_time == 1
    assert most > 1
    assert after == before == [2 * x for x in range(64)]


def test_a_container_with_less_memory_than_the_machine_counts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr("stoker.data.feed.options.CGROUP", tmp_path)

    assert free_memory_bytes() == 600_000
