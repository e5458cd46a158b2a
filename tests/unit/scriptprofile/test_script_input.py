"""What the input costs: stages that are another's, caches, shuffles, and batches that Python makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.scriptprofile.watched import at, fit, loop, node, stage, watched

from stoker.scriptprofile.input_stages import stages_of
from stoker.scriptprofile.loops import OVERLAPPED, UNPARTED, CallLoop, Loop, OwnLoop
from stoker.scriptprofile.observations import Feed
from stoker.scriptprofile.rules.diagnose import diagnose
from stoker.scriptprofile.rules.finding import ScriptFinding
from stoker.scriptprofile.rules.input_rules import Machine, map_share

MACHINE = Machine(cores=4, memory_bytes=8 << 30)


def findings(each: Loop, **changes: Any) -> dict[str, ScriptFinding]:
    found = diagnose([watched(each, **changes)], MACHINE).findings
    assert len({finding.kind for finding in found}) == len(found)
    return {finding.kind: finding for finding in found}


def minor(each: Loop) -> dict[str, ScriptFinding]:
    return {found.kind: found for found in diagnose([watched(each)], MACHINE).minor}


def test_a_prefetch_that_tensorflow_added_takes_no_other_stage() -> None:
    stages = (
        stage("batch", 9),
        stage("map", 8),
        stage("prefetch", 7),
        stage("from_tensor_slices", 6),
    )
    nodes = (
        node("Root"),
        node("Prefetch"),
        node("BatchV2"),
        node("Map", 2.0),
        node("Prefetch"),
        node("TensorSlice"),
    )
    waits = loop(stages=stages, nodes=nodes)

    assert stages_of(waits.nodes, waits.stages) == [
        None,
        None,
        stages[0],
        stages[1],
        stages[2],
        stages[3],
    ]
    share = map_share(waits, stages[1])
    assert share is not None
    assert share > 0.9
    assert findings(waits)["sequential_map"].sure == "measured"


def test_of_two_that_fit_the_last_one_is_taken_and_the_other_is_not_known() -> None:
    stages = (stage("map", 9), stage("map", 8), stage("range", 7))
    one = loop(stages=stages, nodes=(node("Root"), node("Map", 2.0), node("Range")))

    assert stages_of(one.nodes, one.stages) == [None, stages[0], stages[2]]
    assert map_share(one, stages[1]) is None
    found = [
        finding
        for finding in diagnose([watched(one)], MACHINE).findings
        if finding.kind == "sequential_map"
    ]
    assert {(finding.place, finding.sure) for finding in found} == {
        (at(9), "measured"),
        (at(8), "possible"),
    }


def test_cached_elements_are_not_the_work_of_a_later_pass() -> None:
    mapped = stage("map", 7)
    stages = (stage("batch", 9), stage("cache", 8), mapped)
    cached = loop(stages=stages, nodes=(), passes=3)

    assert set(findings(cached)) == {"missing_prefetch"}
    assert set(minor(cached)) == {"small_batch"}
    above = loop(stages=(stage("batch", 9), mapped, stage("cache", 6)), nodes=(), passes=3)
    assert "sequential_map" in findings(above)
    assert "sequential_map" in findings(replace(cached, passes=1))


def test_a_shuffle_of_batches_holds_no_more_than_there_are() -> None:
    def found(*above: str) -> set[str]:
        shuffle = stage(
            "shuffle", 8, arguments={"buffer_size": 10**6}, element_bytes=10**6, cardinality=-2
        )
        chain = (*(stage(kind, 9) for kind in above), shuffle)
        # A pass of 102 steps of 32 rows, 1 MB an element: 0.1 GB of batches, 3.3 GB of rows.
        return set(findings(loop(stages=chain, nodes=(), passes=1, wait_s=0.0, call_s=1.0)))

    assert found("batch") == {"shuffle_memory"}
    assert found() == set()
    assert found("prefetch") == set()


def test_a_shuffle_that_had_read_everything_is_named_with_what_it_read() -> None:
    chain = (stage("batch", 9), stage("shuffle", 8), stage("map", 7), stage("from_generator", 6))
    whole = loop(stages=chain, nodes=(node("Root"), node("BatchV2"), node("ShuffleV3", 2.0)))
    parted = loop(
        stages=chain,
        nodes=(*whole.nodes, node("Map", 1.0), node("Generator", 1.0)),
    )

    names = {cost.name for cost in whole.costs}
    assert names == {"BatchV2", "ShuffleV3, and all that it reads (map, from_generator)"}
    assert {cost.name for cost in parted.costs} == {
        "BatchV2",
        "ShuffleV3",
        "Map",
        "Generator",
    }


def test_a_wait_before_epochs_that_the_inputs_work_is_too_little_for_is_not_the_inputs() -> None:
    chain = (stage("batch", 9), stage("shuffle", 8), stage("from_tensor_slices", 7))

    def found(cpu_s: float) -> set[str]:
        nodes = (node("Root"), node("BatchV2"), node("ShuffleV3", cpu_s), node("TensorSlice"))
        # 100 batches of 32 rows a pass, each node's CPU time for 1,000 elements.
        return set(
            findings(fit(stages=chain, nodes=nodes, passes=4, steps=400, starts=(2.0, 2.0, 2.0)))
        )

    assert "slow_epoch_start" in found(10.0)
    assert "slow_epoch_start" not in found(0.01)


MAP_ASKED = {"num_parallel_calls": -1}
DEAR = (node("Root"), node("Prefetch"), node("ParallelMapV2", 2.0), node("BatchV2"))


def test_a_map_over_batches_of_unknown_rows_can_be_cached_too() -> None:
    mapped = stage("map", 9, arguments=MAP_ASKED, element_bytes=None, row_bytes=500, cardinality=10)
    each = loop(stages=(stage("prefetch", 10), mapped, stage("batch", 8)), nodes=DEAR, passes=3)

    found = findings(each)["uncached"]

    # 10 batches of 32 rows of 500 bytes.
    assert "its results take 0.16 MB" in found.observation
    assert found.change.startswith(".map(...).cache().shuffle(...).batch(...)")
    unknown = replace(mapped, row_bytes=None)
    unsized = replace(each, stages=(stage("prefetch", 10), unknown))
    assert set(findings(unsized)) == {"input_bound"}


def test_the_finding_on_a_map_after_a_shuffle_advises_to_move_it_first() -> None:
    mapped = stage("map", 9, arguments=MAP_ASKED)
    nodes = (node("Root"), node("Prefetch"), node("BatchV2"), node("ParallelMapV2", 2.0))
    chain = (stage("prefetch", 11), stage("batch", 10), mapped, stage("shuffle", 8))

    found = findings(loop(stages=chain, nodes=nodes, passes=3))["uncached"]

    assert "this map first: before shuffle and batch" in found.change


def test_a_call_that_makes_the_stages_is_the_line_to_change() -> None:
    """As `keras.utils.image_dataset_from_directory` does."""
    mapped = stage("map", 7, in_user_code=False, arguments=MAP_ASKED)
    chain = (
        stage("prefetch", 7, in_user_code=False),
        stage("batch", 7, in_user_code=False),
        mapped,
    )
    nodes = (node("Root"), node("Prefetch"), node("BatchV2"), node("ParallelMapV2", 2.0))
    each = fit(stages=chain, nodes=nodes, passes=5, wait=0.5, starts=(0.2,) * 4)

    found = findings(each)

    assert found["uncached"].place == at(7)
    assert "dataset.cache().shuffle(1_000)" in found["uncached"].change
    slow = findings(replace(each, rounds=fit().rounds))["slow_epoch_start"]
    assert slow.place == at(7)
    # The user cannot change those that `fit` makes of arrays, in its own line.
    own = tuple(replace(every, place=each.place) for every in chain)
    arrays = fit(stages=own, nodes=nodes, passes=5, starts=(0.2,) * 4)
    [(kind, begun)] = findings(arrays).items()
    assert (kind, begun.place) == ("slow_epoch_start", each.place)
    assert "Keras creates the iterator over the arrays again" in begun.observation
    assert "from_tensor_slices((x, y))" in begun.change
    assert findings(replace(arrays, starts=(0.3, 0.3))) == {}, "two may be the machine's"


def test_short_waits_before_epochs_are_a_finding_if_they_are_much_of_the_time() -> None:
    chain = (stage("batch", 9), stage("shuffle", 8))

    def found(*starts: float) -> set[str]:
        # A second of steps; epochs that begin after 0.2 s.
        return set(findings(fit(stages=chain, passes=9, starts=starts)))

    assert found(*(0.21,) * 4) == {"slow_epoch_start"}
    assert found(0.21, 0.21) == set()
    assert found(*(0.03,) * 4) == set()


def pydataset(**changes: Any) -> Feed:
    made = Feed(kind="PyDataset", name="Images", place=at(5), workers=1, processes=False)
    return replace(made, **changes)


def test_batches_that_python_makes_are_a_finding_if_steps_wait_for_them() -> None:
    found = findings(fit(wait=0.85, feed=pydataset(), ceiling_s=0.001))["python_feed"]

    assert found.place == at(5)
    assert "the PyDataset Images (workers=1) makes the batches in Python" in found.observation
    assert "the step waits 85% of its time" in found.observation
    assert "workers=4, use_multiprocessing=True" in found.change
    assert findings(fit(wait=0.01, feed=pydataset())) == {}
    assert findings(fit(wait=0.01, feed=None)) == {}
    processes = pydataset(workers=2, processes=True)
    again = findings(fit(wait=0.5, feed=processes, ceiling_s=0.001))["python_feed"]
    assert "(workers=2, use_multiprocessing=True)" in again.observation
    assert again.change.startswith("tf.data")
    generator = Feed(kind="generator", name="", place=None, workers=1, processes=False)
    anywhere = findings(fit(wait=0.5, feed=generator, ceiling_s=0.001))["python_feed"]
    assert anywhere.place == at(40)
    assert "the generator makes the batches" in anywhere.observation


def without_gaps(**changes: Any) -> Loop:
    """A fit of steps of 1 ms of which 0.3 ms are the compiled step."""
    each = fit(real_s=0.001, ceiling_s=0.0003, **changes)
    rounds = tuple(
        {name: value for name, value in one.items() if not name.startswith("gap")}
        for one in each.rounds
    )
    return replace(each, rounds=rounds)


def test_time_that_is_not_known_to_be_pythons_is_not_reported_as_pythons() -> None:
    split = without_gaps().split

    assert split is not None
    assert split.input_wait is None
    assert split.python is None
    assert split.parts == pytest.approx({"compiled step": 0.0003, UNPARTED: 0.0007})
    assert "did not record the times" in split.no_wait
    assert split.busy == pytest.approx(0.3)
    assert findings(without_gaps()) == {}, "neither steps_per_execution nor a small batch"
    [(kind, found)] = findings(without_gaps(feed=pydataset(workers=4))).items()
    assert kind == "python_feed"
    assert "70% of the step is input and Python, which cannot be separated" in found.observation


def test_a_step_that_waits_is_a_finding_even_if_no_rule_knows_why() -> None:
    dear = (node("Root"), node("Prefetch"), node("BatchV2", 1.0), node("TensorSlice"))
    waits = loop(nodes=dear)

    found = findings(waits)["input_bound"]

    assert (found.place, found.sure) == (at(8), "possible")
    assert "waits 30% of its time (3 ms); BatchV2 takes" in found.observation
    assert found.change.startswith(".batch(..., num_parallel_calls=tf.data.AUTOTUNE)")
    assert findings(replace(waits, wait_s=0.05, call_s=0.9)) == {}
    unknown = findings(replace(waits, nodes=()))["input_bound"]
    assert unknown.place == waits.place
    assert "the cost of its stages is unknown" in unknown.observation
    handed_out = replace(waits, nodes=(), model={"replicas": 1, "distributed": True})
    assert "for batch in dataset:" in findings(handed_out)["input_bound"].change
    arrays = fit(
        wait=0.5, ceiling_s=0.004, stages=(stage("map", 40, in_user_code=False),), nodes=()
    )
    assert findings(arrays) == {}
    bare = replace(waits, stages=waits.stages[1:], nodes=())
    assert set(findings(bare)) == {"missing_prefetch"}, "that is why"


def test_time_of_the_input_on_the_cores_is_not_reported_as_pythons() -> None:
    # 10 ms a step, of which 3 are neither waited for nor the step; the input takes 10 ms of CPU for it.
    busy = fit(ceiling_s=0.007, cores=4, nodes=(node("Root"), node("Map", 100 * 0.010)))

    split = busy.split

    assert split is not None
    assert split.python is None
    assert split.parts[OVERLAPPED] == pytest.approx(0.003)
    for idle in (
        replace(busy, nodes=(node("Root"), node("Map", 1e-6))),
        replace(busy, cores=64),  # it takes nothing from anybody there
    ):
        split = idle.split
        assert split is not None
        assert split.python == pytest.approx(0.3)


def test_the_finding_on_train_on_batch_says_what_each_call_costs() -> None:
    calls = loop(CallLoop, wait_s=0.0, call_s=0.6, stages=(), nodes=(), rows=0)

    found = findings(calls, on_batches=((at(41), 102),))["train_on_batch"]

    assert found.place == at(41)
    assert "102 calls of train_on_batch; Python takes 40% of a step of 10 ms" in found.observation
    assert findings(calls) == {}
    assert findings(calls, on_batches=((at(41), 3),)) == {}
    busy = replace(calls, call_s=0.95)
    assert findings(busy, on_batches=((at(41), 102),)) == {}


def test_what_other_programs_took_of_a_call_hides_no_python() -> None:
    """Of 1 s other programs had 0.9 s, nearly all of it in the calls: of the rest Python is 40%."""
    load = {"wall_s": 1.0, "away_s": 0.9, "wait_s": 0.8, "python_s": 0.05, "python_run_s": 0.04}
    calls = loop(CallLoop, wait_s=0.0, call_s=0.95, stages=(), nodes=(), rows=0, load=load)

    [found] = findings(calls, on_batches=((at(41), 102),), waited=0.8).values()

    assert found.kind == "train_on_batch"
    assert "Python takes 40%" in found.observation
    assert found.sure == "possible"
    quiet = replace(calls, load={**load, "away_s": 0.0, "wait_s": 0.0})
    assert findings(quiet, on_batches=((at(41), 102),)) == {}


DECODES = stage(
    "map",
    7,
    operations=("ReadFile", "DecodeJpeg", "ResizeBilinear"),
    arguments={"num_parallel_calls": -1},
)


def fed_by(mapped: Any, *, cpu_s: float) -> Loop:
    """A fit without W, of steps of 1 ms, whose map took so much CPU time for each batch of 32."""
    nodes = (node("Root"), node("Prefetch"), node("MapAndBatch", 100 * cpu_s), node("TensorSlice"))
    stages = (stage("prefetch", 9), stage("batch", 8), mapped, stage("from_tensor_slices", 6))
    return without_gaps(stages=stages, nodes=nodes)


def test_where_w_is_missing_u_and_the_stages_say_what_the_step_waits_for() -> None:
    found = findings(fed_by(DECODES, cpu_s=0.002))["input_bound"]

    assert found.place == at(7)
    assert "70% of the step is not computation" in found.observation
    assert "W was not measured" in found.observation
    assert "a batch costs 2" in found.observation
    assert found.change.startswith("tf.io.decode_jpeg(data, ratio=4)")
    # Python may be the cause if the input costs almost nothing, or if its cost is unknown.
    assert findings(fed_by(DECODES, cpu_s=1e-5)) == {}
    assert findings(without_gaps(stages=fed_by(DECODES, cpu_s=1.0).stages, nodes=())) == {}


def test_without_w_a_rule_that_knows_why_speaks_too() -> None:
    alone = stage("map", 7)
    each = fed_by(alone, cpu_s=0.002)
    nodes = (each.nodes[0], each.nodes[1], node("BatchV2"), node("Map", 0.2), each.nodes[3])

    found = findings(replace(each, nodes=nodes))

    assert set(found) == {"sequential_map"}
    assert "W was not measured" in found["sequential_map"].observation


def parsed(*operations: str, **changes: Any) -> OwnLoop:
    """A loop that waits 30 % of its time for a map below its batch."""
    mapped = stage("map", 7, operations=operations, arguments={"num_parallel_calls": 2}, **changes)
    nodes = (node("Root"), node("Prefetch"), node("MapAndBatch", 1.0), node("TFRecord"))
    stages = (stage("prefetch", 9), stage("batch", 8), mapped, stage("TFRecordDataset", 6))
    return loop(stages=stages, nodes=nodes)


@pytest.mark.parametrize(
    ("operations", "change"),
    [
        (("ParseExampleV2", "Placeholder"), "tf.io.parse_example(serialized, features)"),
        (("DecodeCSV",), "tf.io.decode_csv(lines, ...)"),
        (("StringSplitV2", "StringToNumber"), "tf.strings.to_number(texts)"),
        (("LookupTableFindV2",), "table.lookup(ids)"),
        (("Cast", "Mul"), "tf.cast(rows, ...)"),
    ],
)
def test_work_that_has_a_form_for_batches_is_named_where_it_is_done_row_by_row(
    operations: tuple[str, ...], change: str
) -> None:
    found = findings(parsed(*operations))["row_by_row"]

    assert found.place == at(7)
    assert change in found.change
    assert "for one row at a time" in found.observation
    assert found.gain is not None
    assert found.gain[1] < 1 / 0.69


@pytest.mark.parametrize(
    "changed",
    [
        parsed("Mul"),
        parsed("DecodeJpeg", "Cast"),
        parsed("EagerPyFunc", "Cast"),
        parsed("Cast", random=True),
        replace(parsed("ParseExampleV2"), rows=1),
        replace(parsed("ParseExampleV2"), wait_s=0.01, call_s=0.9),
        replace(parsed("ParseExampleV2"), stages=parsed("ParseExampleV2").stages[2:]),
    ],
)
def test_what_has_no_such_form_or_does_not_matter_is_not_named(changed: Loop) -> None:
    assert "row_by_row" not in findings(changed)
