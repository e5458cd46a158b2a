"""What a sample costs in each stage: of tables, and of pipelines that others wrote."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.core.framework import model_pb2

from stoker.core.errors import UserError
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.feed.pipeline import Feed, Raw, as_it_is
from stoker.data.feed.stages import (
    StageCost,
    bottleneck,
    dataset_stages,
    measure_stages,
    model_stages,
)
from stoker.data.feed.tables.rows import TableRows

CutTable = Callable[[pa.Table, Sequence[Column], Sequence[Sequence[int]]], Dataset]

COLUMNS = (Column(name="number", dtype="float32"), Column(name="word", dtype="string"))
ROWS = 3000
SLEEP_S = 0.02


def shares_add_up(stages: Sequence[StageCost]) -> bool:
    total = sum(stage.cpu_s_per_sample for stage in stages)
    held = [stage.share == pytest.approx(stage.cpu_s_per_sample / total) for stage in stages]
    return all(held) and sum(stage.share for stage in stages) == pytest.approx(1.0)


def table_feed(cut_table: CutTable, prepare: Callable[[Raw], Any]) -> Feed:
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "number": pa.array(rng.normal(size=ROWS).astype(np.float32)),
            "word": pa.array(rng.choice(["a", "b", "c"], ROWS).tolist()),
        }
    )
    dataset = cut_table(table, COLUMNS, [[500, 500, 500], [500, 500, 500]])
    rows = TableRows(dataset, "train", columns=COLUMNS)
    return Feed(rows, prepare=prepare, finish=as_it_is, memory_bytes=0)


def test_the_stages_of_a_table_in_their_order(cut_table: CutTable) -> None:
    feed = table_feed(cut_table, tf.function(lambda raw: tf.strings.length(raw["word"])))

    stages = measure_stages(feed.stages(batch_size=64, samples=ROWS, seed=0))

    assert [stage.name for stage in stages] == ["read", "shuffle", "batch", "transform"]
    assert all(stage.cpu_s_per_sample > 0 for stage in stages)
    assert shares_add_up(stages)


def test_what_burns_the_cpu_costs_and_what_waits_does_not(cut_table: CutTable) -> None:
    def burn(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        begun_s = time.thread_time()
        while time.thread_time() - begun_s < SLEEP_S:
            pass
        return numbers

    def wait(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        time.sleep(SLEEP_S)  # what is measured here: waiting costs no CPU
        return numbers

    cost = {}
    for work in (burn, wait):

        def prepare(raw: Raw, work: Any = work) -> Any:
            return tf.numpy_function(work, [raw["number"]], tf.float32)

        feed = table_feed(cut_table, tf.function(prepare))
        stages = measure_stages(feed.stages(batch_size=100, samples=ROWS, seed=0))
        cost[work] = stages[-1].cpu_s_per_sample
        if work is burn:
            assert bottleneck(stages).name == "transform"

    assert cost[burn] >= SLEEP_S / 100
    assert cost[wait] < cost[burn] / 4


def node(key: int, name: str, **given: Any) -> model_pb2.ModelProto.Node:
    at_once = given.pop("parallelism", None)
    made = model_pb2.ModelProto.Node(id=key, name=name, **given)
    if at_once is not None:
        made.parameters.add(name="parallelism", state_value=at_once)
    return made


def model(*nodes: model_pb2.ModelProto.Node) -> model_pb2.ModelProto:
    made = model_pb2.ModelProto(output=1)
    for each in nodes:
        made.nodes[each.id].CopyFrom(each)
    return made


KNOWN, UNKNOWN, INTERLEAVE = 3, 5, 1
SECOND = 1_000_000_000


def test_costs_are_by_sample_whatever_a_stages_elements_are() -> None:
    described = model(
        node(1, "Root", inputs=[2], num_elements=10, processing_time=99, node_class=KNOWN, ratio=1),
        # 10 batches of 4 have left it, and 2 are on their way.
        node(
            2,
            "ParallelMap",
            inputs=[3],
            num_elements=12,
            processing_time=12 * SECOND,
            node_class=KNOWN,
            ratio=1,
            parallelism=2,
        ),
        node(3, "Batch", inputs=[4], num_elements=12, node_class=KNOWN, ratio=4),
        # One in two is left out.
        node(
            4,
            "Filter",
            inputs=[5],
            num_elements=48,
            processing_time=48 * SECOND,
            node_class=UNKNOWN,
        ),
        node(5, "Range", num_elements=96, processing_time=96 * SECOND, node_class=KNOWN),
    )

    stages = model_stages(described, samples_per_element=4)

    assert [stage.name for stage in stages] == ["Range", "Filter", "Batch", "ParallelMap"]
    assert [stage.cpu_s_per_sample for stage in stages] == pytest.approx([2.0, 1.0, 0.0, 0.25])
    assert [stage.parallelism for stage in stages] == [1, 1, 1, 2]
    assert shares_add_up(stages)
    assert bottleneck(stages).name == "Range"


def test_pipelines_that_are_taken_in_turn_are_one_stage_and_equal_names_are_numbered() -> None:
    described = model(
        node(1, "Root", inputs=[2], num_elements=12, node_class=KNOWN, ratio=1),
        node(2, "Map", inputs=[3], num_elements=12, processing_time=12 * SECOND, node_class=KNOWN),
        node(3, "Interleave", inputs=[4, 5, 6, 7], num_elements=12, node_class=INTERLEAVE),
        node(4, "Files", num_elements=3, processing_time=3 * SECOND, node_class=KNOWN),
        node(5, "Map", num_elements=9, processing_time=18 * SECOND, node_class=KNOWN),
        node(6, "Map", num_elements=3, processing_time=18 * SECOND, node_class=KNOWN),
        node(7, "Map", num_elements=0, node_class=KNOWN),
    )

    stages = model_stages(described, samples_per_element=1)

    assert [stage.name for stage in stages] == ["Files", "Map", "Interleave", "Map 2"]
    # A file is four samples; of two pipelines one gave three samples of four, at 2 s, the other at 6.
    assert [stage.cpu_s_per_sample for stage in stages] == pytest.approx([0.25, 3.0, 0.0, 1.0])


def test_tensorflows_own_model_names_the_generator_that_holds_a_pipeline_up() -> None:
    def generate() -> Iterator[float]:
        for number in range(200):
            yield float(sum(range(20_000 + number)))

    spec = tf.TensorSpec([], tf.float32)
    made = tf.data.Dataset.from_generator(generate, output_signature=spec).batch(4)
    stages = dataset_stages(made.map(lambda x: x + 1.0).prefetch(2), elements=60)

    names = [stage.name for stage in stages]
    assert bottleneck(stages).name == "Generator"
    assert names.index("Generator") < names.index("FlatMap") < names.index("Prefetch")
    assert shares_add_up(stages)


def test_without_the_autotuner_there_is_no_model() -> None:
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.range(3).with_options(options)

    with pytest.raises(UserError, match="autotuner is on"):
        dataset_stages(dataset, elements=1)


def test_an_empty_dataset_has_no_stages() -> None:
    with pytest.raises(UserError, match="at least one element"):
        dataset_stages(tf.data.Dataset.range(0), elements=2)
