"""The rules, on what a watcher might have seen: each speaks of its case, and of no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scriptprofile.watched import at, fit, loop, node, stage, watched

from stoker.scriptprofile.loops import InnerLoop, Loop
from stoker.scriptprofile.observations import BatchHook, Function, Place, Reached, Stage
from stoker.scriptprofile.rules.diagnose import diagnose
from stoker.scriptprofile.rules.finding import MAX_GAIN, ScriptFinding, gain_of
from stoker.scriptprofile.rules.input_rules import Machine

MACHINE = Machine(cores=4, memory_bytes=8 << 30)


def findings(*loops: Loop, machine: Machine = MACHINE, **changes: Any) -> list[ScriptFinding]:
    return list(diagnose([watched(*loops, **changes)], machine).findings)


def minor(*loops: Loop, **changes: Any) -> dict[str, ScriptFinding]:
    """The findings of low impact, by kind."""
    said = diagnose([watched(*loops, **changes)], MACHINE).minor
    assert len({each.kind for each in said}) == len(said)
    return {each.kind: each for each in said}


def kinds(*loops: Loop, **changes: Any) -> list[str]:
    """The findings except the one that the step waits, which is made if no rule knows why."""
    found = [finding.kind for finding in findings(*loops, **changes)]
    return [kind for kind in found if kind != "input_bound"]


def test_a_healthy_loop_and_a_healthy_fit_are_left_alone() -> None:
    assert kinds(loop(wait_s=0.01, call_s=0.95), fit()) == []


def test_the_parts_of_a_step_are_the_step() -> None:
    for each in (loop(), fit(wait=0.2), fit(rounds=())):
        split = each.split

        assert split is not None
        assert sum(split.parts.values()) == pytest.approx(split.step_s)


def test_u_and_w_are_what_the_rounds_say() -> None:
    split = fit(real_s=0.010, ceiling_s=0.004, wait=0.5).split

    assert split is not None
    assert split.busy == pytest.approx(0.4)
    assert split.input_wait == pytest.approx(0.5)
    assert split.python == pytest.approx(0.1)


def test_what_other_programs_took_of_a_window_is_none_of_its_figures() -> None:
    """The step on a resident batch took 1.8 times as long as a real one: for 0.9 of it others ran."""
    one = {"real_away": 0.5, "ceiling_away": 0.75}
    shown = fit(real_s=0.010, ceiling_s=0.018, wait=0.3)
    split = replace(shown, rounds=tuple({**each, **one} for each in shown.rounds)).split

    assert split is not None
    assert split.busy == pytest.approx(0.9)
    assert split.input_wait == pytest.approx(0.1), "waits for a core are none for input"
    assert split.parts["compiled step"] == pytest.approx(0.009)
    without = shown.split
    assert without is not None
    assert without.busy is None


def test_on_a_busy_machine_what_follows_from_times_is_possible() -> None:
    waits = loop(stages=BARE, nodes=(node("Root"), node("BatchV2"), node("Map", 2.0)))
    eager = loop(eager_gradients=((at(41), 102),), wait_s=0.0)

    quiet = {each.kind: each.sure for each in findings(waits, eager, waited=0.1)}
    busy = {each.kind: each.sure for each in findings(waits, eager, waited=0.5)}

    assert quiet["sequential_map"] == "measured"
    assert busy["sequential_map"] == "possible"
    assert quiet["eager_loop"] == busy["eager_loop"] == "likely"
    assert quiet.keys() == busy.keys()


def test_a_loop_inside_of_a_function_has_u_by_its_calls_and_no_w() -> None:
    one: Mapping[str, float] = {"calls": 50, "real_s": 1.0, "ceiling_s": 0.6}
    inside = loop(InnerLoop, steps=5, measured_steps=3, rounds=(one,) * 3, batches=50)

    split = inside.split

    assert split is not None
    assert split.busy == pytest.approx(0.6)
    assert split.parts == pytest.approx({"compiled step": 0.012, "its input": 0.008})
    assert split.input_wait is None
    assert "one call contains many steps" in split.no_wait
    assert inside.counted() == "5 calls of 50 steps"
    seldom = loop(InnerLoop, steps=3, measured_steps=1).split
    assert seldom is not None
    assert seldom.busy is None
    assert "called too few times" in seldom.no_busy


def test_what_an_input_inside_of_a_function_costs_as_a_whole_bounds_every_gain() -> None:
    one: Mapping[str, float] = {"calls": 50, "real_s": 1.0, "ceiling_s": 0.6}

    said = minor(loop(InnerLoop, rounds=(one,) * 3, batches=50, stages=BARE, nodes=()))

    assert set(said) == {"missing_prefetch", "sequential_map"}
    for each in said.values():
        assert "the whole input costs 40% of a step, so at most 1.67x" in each.observation
        assert each.gain == pytest.approx((1.0, 1 / 0.6))
        assert each.sure == "possible"


def test_a_shuffle_inside_of_a_function_is_filled_by_a_call() -> None:
    chain = (
        stage("batch", 9),
        stage(
            "shuffle",
            8,
            arguments={"buffer_size": 10**6},
            element_bytes=10**6,
            cardinality=-2,
        ),
    )

    def found_in(batches: int) -> list[str]:
        changes: dict[str, Any] = {"nodes": (), "passes": 5, "steps": 5, "batches": batches}
        return kinds(loop(InnerLoop, stages=chain, **changes))

    # Batches of 32 elements of 1 MB, on 8 GiB.
    assert found_in(100) == ["shuffle_memory"]
    assert found_in(10) == []


def test_too_few_steps_are_not_measured() -> None:
    assert loop(measured_steps=4).split is None


def test_noise_in_one_round_is_not_pythons() -> None:
    quiet = {"calls": 10, "real_s": 0.01, "ceiling_s": 0.0098}
    noisy = {"calls": 10, "real_s": 0.05, "ceiling_s": 0.01}

    assert kinds(fit(rounds=(noisy, quiet, noisy))) == []


def test_cpu_time_is_by_sample_on_both_sides_of_a_batch() -> None:
    nodes = (
        node("Root"),
        node("Prefetch", 0.32, elements=10),
        node("BatchV2", 0.64, elements=10),
        node("Map", 3.2, elements=320),
    )

    costs = loop(stages=(stage("batch", 8), stage("map", 7)), nodes=nodes).costs

    assert [(cost.name, cost.place) for cost in costs] == [
        ("Prefetch", None),
        ("BatchV2", at(8)),
        ("Map", at(7)),
    ]
    assert [cost.cpu_s_per_sample for cost in costs] == pytest.approx([0.001, 0.002, 0.01])
    assert sum(cost.share for cost in costs) == pytest.approx(1.0)


def test_what_tensorflow_builds_around_a_generator_is_the_generators_and_its_beginning_is_paid_once() -> (
    None
):
    stages = (stage("batch", 8), stage("from_generator", 7))
    nodes = (
        node("Root"),
        node("BatchV2", 0.1, elements=10),
        node("FlatMap", 0.1, elements=320),
        # A busy machine made it wait for 0.1 s.
        node("FromTensor", 0.1, elements=1, per_output=1 / 320),
        node("Generator", 0.4, elements=320),
    )
    # TensorFlow has dropped the Generator at the end of the pass: its time is the FlatMap's.
    dropped = (*nodes[:2], node("FlatMap", 0.5, elements=320), nodes[3])

    for each in (nodes, dropped):
        costs = loop(stages=stages, nodes=each).costs
        assert [(cost.name, cost.place) for cost in costs] == [
            ("BatchV2", at(8)),
            ("Generator", at(7)),
        ]
        # 0.5 s a pass of 320 elements, and 0.1 s / 320 an element.
        assert costs[1].share == pytest.approx(0.6 / 0.7)


def test_a_map_is_sequential_where_tensorflow_ran_it_so() -> None:
    stages = (stage("batch", 8), stage("map", 7), stage("from_tensor_slices", 6))
    dear = (node("Root"), node("Prefetch"), node("BatchV2"), node("Map", 2.0))
    fused = node("MapAndBatch", 2.0, parameters={"parallelism": (1.0, True)})
    fixed = node("MapAndBatch", 2.0, parameters={"parallelism": (1.0, False)})

    [finding] = findings(loop(stages=stages, nodes=dear))

    assert (finding.kind, finding.place) == ("sequential_map", at(7))
    assert kinds(loop(stages=stages, nodes=(node("Root"), fixed))) == ["sequential_map"]
    assert kinds(loop(stages=stages, nodes=(node("Root"), fused))) == []
    tuned = (stage("batch", 8), stage("map", 7, arguments={"num_parallel_calls": -1}))
    assert kinds(loop(stages=tuned, nodes=dear)) == []
    cheap = (node("Root"), node("Prefetch"), node("BatchV2", 3.0), node("Map", 0.001))
    assert kinds(loop(stages=stages, nodes=cheap)) == []
    assert kinds(loop(stages=stages, nodes=dear, wait_s=0.01)) == []


def test_a_map_of_keras_own_is_nobodys_line_to_change() -> None:
    stages = (stage("batch", 8), stage("map", 7, in_user_code=False))

    assert kinds(loop(stages=stages, nodes=(node("Prefetch"), node("Map", 2.0)))) == []


def test_python_in_a_map_is_reported_as_such() -> None:
    stages = (stage("batch", 8), stage("map", 7, python_calls=(at(3),)))

    [finding] = findings(loop(stages=stages, nodes=(node("Prefetch"), node("Map", 2.0))))

    assert finding.kind == "python_map"
    assert "train.py:3" in finding.observation


def test_a_generator_is_recognized_by_its_elements() -> None:
    rows = (stage("prefetch", 9), stage("batch", 8), stage("from_generator", 7))
    batches = (stage("prefetch", 9), stage("from_generator", 7))

    assert kinds(loop(stages=rows)) == ["generator_rows"]
    assert kinds(loop(stages=batches)) == ["generator_batches"]
    assert kinds(loop(stages=rows, wait_s=0.0, call_s=1.0)) == []


def test_prefetch_is_missing_where_nothing_runs_ahead() -> None:
    stages = (stage("batch", 8), stage("from_tensor_slices", 7))
    bare = (node("Root"), node("BatchV2"), node("TensorSlice"))
    injected = (node("Root"), node("Prefetch"), node("BatchV2"), node("TensorSlice"))

    [finding] = findings(loop(stages=stages, nodes=bare))

    assert (finding.kind, finding.place) == ("missing_prefetch", at(8))
    assert finding.gain == pytest.approx((1.0, 1 / 0.7))
    assert kinds(loop(stages=stages, nodes=injected)) == []
    assert kinds(loop(stages=stages, nodes=())) == ["missing_prefetch"]


def test_the_same_expensive_work_in_each_pass_is_a_finding_unless_it_cannot_be_kept() -> None:
    mapped = stage("map", 7, arguments={"num_parallel_calls": -1})
    nodes = (node("Root"), node("Prefetch"), node("BatchV2"), node("ParallelMapV2", 2.0))

    def found_in(*stages: Stage, passes: int = 3) -> list[str]:
        chain = (stage("prefetch", 9), stage("batch", 8), *stages)
        return kinds(loop(stages=chain, nodes=nodes, passes=passes))

    assert found_in(mapped) == ["uncached"]
    assert found_in(mapped, passes=1) == []
    assert found_in(stage("cache", 8), mapped) == []
    assert found_in(replace(mapped, random=True)) == []
    assert found_in(mapped, replace(mapped, place=at(6), random=True)) == []
    assert found_in(replace(mapped, element_bytes=8 << 30)) == []
    assert found_in(replace(mapped, element_bytes=None)) == []


def test_a_shuffle_buffer_that_fills_the_memory_is_a_finding() -> None:
    def found_in(
        count: int, element_bytes: int | None, *, passes: int = 0, **of_node: int
    ) -> list[ScriptFinding]:
        chain = (
            stage("prefetch", 9),
            stage(
                "shuffle",
                8,
                arguments={"buffer_size": count},
                element_bytes=element_bytes,
                cardinality=-2,
            ),
        )
        nodes = (node("Root"), node("Prefetch"), node("Shuffle", **of_node))
        once = loop(stages=chain, nodes=nodes, wait_s=0.0, call_s=1.0, passes=passes)
        return findings(once)

    [finding] = found_in(100_000, 600_000)
    assert (finding.kind, finding.place, finding.gain) == ("shuffle_memory", at(8), None)
    assert "55.9 GiB" in finding.observation
    assert found_in(10**9, 512)[0].change.startswith(".shuffle(1_048_576)")
    assert found_in(1000, 600_000) == []
    # A pass of 102 steps of 32 cannot fill it.
    assert found_in(100_000, 600_000, passes=1) == []
    [observed] = found_in(100_000, None, buffered=10, buffered_bytes=6_000_000)
    assert observed.kind == "shuffle_memory"
    assert found_in(100_000, None) == []


def test_what_epochs_wait_for_before_their_first_step_is_a_finding() -> None:
    chain = (stage("batch", 9), stage("shuffle", 8), stage("from_generator", 7))
    # Steps of 10 ms; each epoch but the first begins after 2 s, and once the machine had a hiccup.
    waits = fit(stages=chain, passes=4, starts=(2.01, 9.0, 2.01))

    said = {each.kind: each for each in findings(waits)}

    assert set(said) == {"slow_epoch_start", "generator_rows"}
    start = said["slow_epoch_start"]
    assert (start.place, start.sure) == (at(8), "measured")
    assert "waits 2 s before its first step, 86% of the training's time" in start.observation
    assert start.gain is not None
    assert start.gain[1] == pytest.approx(7.0)
    assert "training waits 86% of its time" in said["generator_rows"].observation
    assert "slow_epoch_start" not in kinds(
        fit(stages=chain, passes=4, starts=(0.3, 0.3), wait=0.9)
    ), "its steps wait longer"
    for starts in ((0.02, 0.02), (), (3.0,), (3.0, 0.02)):
        assert kinds(fit(stages=chain, passes=3, starts=starts)) == []


def test_a_step_on_one_batch_that_takes_longer_than_a_real_one_is_not_a_measure() -> None:
    for each in (fit(ceiling_s=0.017), loop(rounds=fit(ceiling_s=0.017).rounds)):
        split = each.split
        assert split is not None
        assert split.busy is None
        assert "took 1.7 times as long as a real step" in split.no_busy
    split = fit(ceiling_s=0.0101).split
    assert split is not None
    assert split.busy == pytest.approx(1.01)
    assert split.shown_busy() == "U 100% (101% as measured)"
    quick = fit().split
    assert quick is not None
    assert quick.shown_busy() == "U 95%"


def test_a_dataset_that_a_strategy_hands_out_runs_ahead_by_itself() -> None:
    chain = (stage("batch", 8), stage("from_tensor_slices", 7))

    def found_for(*, distributed: bool) -> set[str]:
        shared = loop(stages=chain, nodes=(), model={"replicas": 1, "distributed": distributed})
        return {*kinds(shared), *minor(shared)}

    assert "missing_prefetch" in found_for(distributed=False)
    assert "missing_prefetch" not in found_for(distributed=True)


def test_the_finding_on_float64_names_the_first_stage_that_gives_it() -> None:
    wide = ("float64",)
    chain = (stage("batch", 9, dtypes=wide), stage("map", 8, dtypes=wide), stage("range", 7))
    cast = (stage("map", 10), *chain)

    [finding] = findings(loop(stages=chain, wait_s=0.0, call_s=1.0))

    assert (finding.kind, finding.place) == ("float64_data", at(8))
    assert finding.gain == pytest.approx((1.0, 1.3))
    label = (stage("batch", 9, dtypes=("float32", "float32", "float64")),)
    [little] = findings(loop(stages=label, wait_s=0.0, call_s=1.0))
    assert "float64 in 1 of their 3 parts" in little.observation
    assert little.gain == pytest.approx((1.0, 1.1))
    assert kinds(loop(stages=cast, wait_s=0.0, call_s=1.0)) == []


def test_the_finding_on_an_eager_loop_names_the_line_of_its_gradients() -> None:
    eager = loop(call_s=0.0, wait_s=0.01, eager_gradients=((at(44), 102),))

    [finding] = findings(eager)

    assert (finding.kind, finding.place) == ("eager_loop", at(44))
    assert finding.gain is not None
    assert finding.gain[0] > 1


def test_the_finding_on_run_eagerly_names_the_line_of_compile() -> None:
    each = fit()
    eager = replace(each, rounds=(), model={**each.model, "run_eagerly": True})

    [finding] = findings(eager)

    assert (finding.kind, finding.place) == ("eager_loop", at(20))


def test_a_value_read_in_each_step_is_a_finding() -> None:
    def found_for(count: int, gpus: int = 0) -> list[ScriptFinding]:
        read = loop(wait_s=0.01, call_s=0.6, sync_s=0.35, syncs=((at(43), count),))
        return findings(read, gpus=gpus)

    [finding] = found_for(102)
    assert (finding.kind, finding.place, finding.sure) == ("host_sync", at(43), "possible")
    [on_gpu] = found_for(102, gpus=1)
    assert on_gpu.sure == "measured"
    assert found_for(10) == []


def test_the_finding_on_tiny_steps_names_compile_and_that_on_small_batches_names_fit() -> None:
    tiny = fit(real_s=0.001, ceiling_s=0.0004)

    places = {finding.kind: finding.place for finding in findings(tiny)}

    assert places == {"steps_per_execution": at(20), "small_batch": at(40)}
    many = replace(tiny, rows=4096, model={**tiny.model, "steps_per_execution": 8})
    assert kinds(many) == []


def test_a_callback_that_takes_much_of_a_step_is_a_finding_and_a_larger_batch_is_not_advised() -> (
    None
):
    def found_for(step_s: float, place: Place | None = None) -> list[tuple[str, Place]]:
        hook = BatchHook(name="Mine", hook="on_batch_end", place=place, step_s=step_s)
        slow = fit(real_s=0.001, ceiling_s=0.0004, hooks=(hook,), period_s=0.1, call_s=0.04)
        return [(finding.kind, finding.place) for finding in findings(slow)]

    assert found_for(0.00055, at(12)) == [("slow_callback", at(12))]
    assert found_for(0.00055) == [("slow_callback", at(40))], (
        "a callback of Keras's own: where fit is called"
    )
    small = ["steps_per_execution", "small_batch"]
    assert sorted(kind for kind, _ in found_for(0.0001)) == sorted(small)


def test_a_tiny_step_that_is_hardly_any_arithmetic_may_be_its_call() -> None:
    """The call is counted with the compiled step: that it is most of it, is likely and not measured."""

    def found_for(mfu: float | None, **changes: Any) -> dict[str, ScriptFinding]:
        peak = None if mfu is None else 1e9
        reached = Reached(operations=(mfu or 0.0) * 1e9 * 0.002, peak_per_s=peak)
        tiny = fit(real_s=0.002, ceiling_s=0.0019, reached=reached, **changes)
        return {finding.kind: finding for finding in findings(tiny)}

    assert set(found_for(0.002)) == {"steps_per_execution", "small_batch"}
    found = found_for(0.002)["steps_per_execution"]
    assert (found.kind, found.place, found.sure) == ("steps_per_execution", at(20), "possible")
    assert "a step takes 2 ms, and its matrix products are 0.20% of what" in found.observation
    assert found.gain == (1.0, 3.0)
    small = found_for(0.002)["small_batch"]
    assert (small.place, small.sure, small.gain) == (at(40), "possible", (1.0, 4.0))
    assert (
        "its matrix products are 0.20% of what the device could compute in that time, with batches of 32"
        in small.observation
    )
    assert set(found_for(0.002, rows=4096)) == {"steps_per_execution"}
    assert found_for(0.3) == {}
    assert found_for(None) == {}
    several = {**fit().model, "steps_per_execution": 8}
    assert found_for(0.002, model=several) == {}


def test_an_output_in_half_precision_is_a_finding_only_under_a_mixed_policy() -> None:
    output = {"name": "dense_1", "dtype": "float16", "place": ["/home/me/train.py", 13]}
    plain = fit()
    mixed = {**plain.model, "policy": "mixed_float16", "half_outputs": [output]}

    [finding] = findings(replace(plain, model=mixed))

    assert (finding.kind, finding.place, finding.gain) == ("half_output", at(13), None)
    assert kinds(replace(plain, model={**mixed, "policy": "float16"})) == []


def test_a_distribution_of_keras_that_does_nothing_is_a_finding() -> None:
    one = fit()
    set_ = replace(one, model={**one.model, "keras_distribution": "DataParallel"})

    [finding] = findings(set_)

    assert (finding.kind, finding.place, finding.gain) == ("keras_distribution", at(10), None)
    assert "a DataParallel, but this model trains on 1 replica" in finding.observation
    assert kinds(replace(one, model={**one.model, "keras_distribution": ""})) == []


def test_what_python_makes_is_reported_where_the_step_hides_it() -> None:
    chain = (
        stage("batch", 9),
        stage("map", 8, python_calls=(at(8),)),
        stage("from_generator", 7),
    )

    said = minor(loop(stages=chain, nodes=(), wait_s=0.03, call_s=0.9))

    assert (said["generator_rows"].place, said["python_map"].place) == (at(7), at(8))
    assert "one sample at a time; little gain here: W is 3.0%" in said["generator_rows"].observation
    assert "sequential_map" not in said
    found = {finding.kind for finding in findings(loop(stages=chain, nodes=()))}
    assert {"generator_rows", "python_map"} <= found
    assert not {"generator_rows", "python_map"} & set(minor(loop(stages=chain, nodes=())))


def test_a_model_outside_of_its_strategy_is_a_finding() -> None:
    strategies = (("MirroredStrategy", at(5), 2),)

    [finding] = findings(fit(), strategies=strategies)

    assert (finding.kind, finding.place, finding.gain) == ("outside_scope", at(10), (1.0, 2.0))
    inside = fit()
    assert (
        kinds(replace(inside, model={**inside.model, "replicas": 2}), strategies=strategies) == []
    )
    assert kinds(fit(), strategies=(("MirroredStrategy", at(5), 1),)) == []


def test_gpus_that_stay_idle_are_a_finding() -> None:
    one = fit()
    one = replace(one, model={**one.model, "devices": ["GPU:0"]})

    [finding] = findings(one, gpus=4)

    assert (finding.kind, finding.place, finding.gain) == ("one_gpu_of_several", at(10), (1.0, 4.0))
    assert "4 GPUs, and every variable of the model is on GPU:0" in finding.observation
    assert kinds(one, gpus=1) == []
    spread = replace(one, model={**one.model, "replicas": 4})
    assert kinds(spread, gpus=4) == []
    by_hand = replace(one, model={**one.model, "devices": ["GPU:0", "GPU:1"]})
    assert kinds(by_hand, gpus=4) == []
    # Outside of its strategy's scope: that is what is wrong.
    outside = (("MirroredStrategy", at(5), 4),)
    assert kinds(one, gpus=4, strategies=outside) == ["outside_scope"]


def test_xla_that_was_requested_and_is_not_used_is_a_finding() -> None:
    jitted = fit()
    jitted = replace(jitted, model={**jitted.model, "jit_requested": True, "jit_compile": False})

    [finding] = findings(jitted)

    assert (finding.kind, finding.place) == ("xla_not_used", at(20))
    assert kinds(replace(jitted, model={**jitted.model, "jit_compile": True})) == []
    assert kinds(replace(jitted, model={**jitted.model, "jit_requested": False})) == []
    eager = replace(jitted, model={**jitted.model, "jit_compile": True, "run_eagerly": True})
    assert sorted(kinds(eager)) == ["eager_loop", "xla_not_used"]


def test_sides_that_miss_the_tensor_cores_are_a_finding_under_a_mixed_policy_on_a_gpu() -> None:
    kernels = [
        {"name": "good", "sides": [64, 128], "place": ["/home/me/train.py", 11]},
        {"name": "bad", "sides": [100, 130], "place": ["/home/me/train.py", 12]},
        {"name": "half", "sides": [128, 9], "place": ["/home/me/train.py", 13]},
    ]
    plain = fit()
    mixed = replace(plain, model={**plain.model, "policy": "mixed_float16", "kernels": kernels})

    [finding] = findings(mixed, gpus=1)

    assert (finding.kind, finding.place) == ("tensor_core_shapes", at(12))
    assert "bad (100, 130), half (9)" in finding.observation
    assert kinds(mixed, gpus=0) == []
    assert kinds(replace(mixed, model={**mixed.model, "policy": "float32"}), gpus=1) == []
    whole = replace(mixed, model={**mixed.model, "kernels": kernels[:1]})
    assert kinds(whole, gpus=1) == []


def function(traces: int, made: int = 1, calls: int = 20, **argument: str) -> Function:
    causes = tuple(
        {"x": "float32(8, 4)", **{name: value.format(n) for name, value in argument.items()}}
        for n in range(traces)
    )
    return Function(
        name="train_step",
        place=at(30),
        calls=calls,
        traces=traces,
        made=made,
        causes=causes,
        trace_s=1.5,
    )


def test_retracing_names_the_argument_that_caused_it() -> None:
    steady = loop(wait_s=0.01, call_s=0.95)

    [python] = findings(steady, functions=(function(9, step="python {}"),))
    [shape] = findings(steady, functions=(function(9, y="float32({}, 4)"),))
    [remade] = findings(steady, functions=(function(9, made=9),))

    assert python.place == shape.place == remade.place == at(30)
    assert "argument step was the Python value 0, 1, 2" in python.observation
    assert "step=tf.constant(step)" in python.change
    assert "argument y was float32(0, 4)" in shape.observation
    assert "9 tf.functions were created" in remade.observation
    [both] = findings(steady, functions=(function(9, step="python {}", y="float32({}, 4)"),))
    assert "argument step was the Python value" in both.observation
    assert "; its argument y was float32(0, 4)" in both.observation
    assert both.change.splitlines() == [python.change, shape.change]
    assert kinds(steady, functions=(function(2, step="python {}"),)) == []
    # Nine models, each with a step of its own.
    assert kinds(steady, functions=(function(9, made=9, calls=900),)) == []


def test_processes_that_run_the_same_lines_say_it_once() -> None:
    eager = loop(call_s=0.0, wait_s=0.01, eager_gradients=((at(44), 102),))

    assert len(diagnose([watched(eager), watched(eager)], MACHINE).findings) == 1


BARE = (stage("batch", 8), stage("map", 7), stage("from_tensor_slices", 6))
"""What a beginner writes: no prefetch, a map of one element at a time."""

BARE_NODES = (node("Root"), node("BatchV2"), node("Map", 2.0), node("TensorSlice"))


def test_what_costs_little_here_is_reported_with_its_reason_and_is_not_a_finding() -> None:
    bare = loop(stages=BARE, nodes=BARE_NODES, wait_s=0.038, call_s=0.9, rows=16)

    said = minor(bare)

    assert kinds(bare) == []
    assert {kind: each.place for kind, each in said.items()} == {
        "missing_prefetch": at(8),
        "sequential_map": at(7),
        "small_batch": at(40),
    }
    for kind in ("missing_prefetch", "sequential_map"):
        assert "little gain here: W is 3.8%, so at most 1.04x" in said[kind].observation
        assert said[kind].gain == pytest.approx((1.0, 1 / 0.962))
        assert said[kind].gain_text() == "hardly any here"
    assert (
        "batches of 16; Python takes 6.2% of a step, outside the call"
        in said["small_batch"].observation
    )
    assert "were not measured" in said["small_batch"].observation
    assert (said["small_batch"].gain, said["small_batch"].sure) == (None, "possible")


def test_a_step_that_python_fills_is_not_the_batchs_fault() -> None:
    eager = loop(call_s=0.0, wait_s=0.01, eager_gradients=((at(44), 102),))

    assert kinds(eager) == ["eager_loop"]
    assert minor(eager) == {}
    half = minor(loop(wait_s=0.01, call_s=0.69))["small_batch"]
    assert "Python takes 30.0% of a step" in half.observation


def test_what_tensorflow_has_fixed_itself_is_reported_too() -> None:
    fused = (node("Root"), node("MapAndBatch", 2.0, parameters={"parallelism": (1.0, True)}))

    said = minor(loop(stages=BARE, nodes=fused, wait_s=0.3))

    assert (
        "TensorFlow itself prepares batches ahead (MapAndBatch)"
        in said["missing_prefetch"].observation
    )
    assert "TensorFlow itself made it parallel (MapAndBatch)" in said["sequential_map"].observation
    assert said["sequential_map"].gain == (1.0, 1.0)


def test_a_cheap_map_of_a_slow_input_is_reported_with_its_share() -> None:
    cheap = (node("Root"), node("BatchV2", 3.0), node("Map", 0.1), node("TensorSlice", 3.0))

    said = minor(loop(stages=BARE, nodes=cheap, wait_s=0.5))

    assert "of the input's CPU time" in said["sequential_map"].observation
    assert said["sequential_map"].gain is not None
    assert said["sequential_map"].gain[1] < 1.02


def test_what_was_found_or_is_not_the_users_is_not_said_again() -> None:
    waits = loop(stages=BARE, nodes=BARE_NODES)
    assert set(kinds(waits)) == {"missing_prefetch", "sequential_map"}
    assert set(minor(waits)) == {"small_batch"}

    tuned = (
        stage("prefetch", 9),
        stage("map", 7, arguments={"num_parallel_calls": -1}),
        stage("batch", 8),
    )
    assert minor(loop(stages=tuned, rows=128)) == {}
    kerass = tuple(replace(each, in_user_code=False) for each in BARE)
    assert minor(loop(stages=kerass, nodes=BARE_NODES, wait_s=0.0, rows=128)) == {}


def test_a_training_too_short_for_w_says_that_it_does_not_know() -> None:
    said = minor(loop(stages=BARE, nodes=(), measured_steps=2))

    assert "W was not measured" in said["missing_prefetch"].observation
    assert {each.gain for each in said.values()} == {None}


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_gain_is_a_range_above_one(share: float, min_saved: float) -> None:
    low, high = gain_of(share, min_saved=min_saved)

    assert 1.0 <= low <= high <= MAX_GAIN * 1.0001
