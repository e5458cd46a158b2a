"""The wall time of a whole script: parts that add up, and the findings about the largest."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.scriptprofile.watched import at, fit, loop, node, stage, watched

from stoker.scriptprofile.facts import WatchedProcess
from stoker.scriptprofile.loops import Loop
from stoker.scriptprofile.observations import NOWHERE, FirstPass, WallPart
from stoker.scriptprofile.rules.diagnose import diagnose
from stoker.scriptprofile.rules.finding import ScriptFinding
from stoker.scriptprofile.rules.input_rules import Machine
from stoker.scriptprofile.rules.wall_rules import parts_json, shown_parts, wall_time
from stoker.scriptprofile.watcher.stoker_watch.wall import Wall

MACHINE = Machine(cores=4, memory_bytes=8 << 30)


def part(kind: str, wall_s: float, line: int = 0, **changes: Any) -> WallPart:
    given = {"cpu_s": wall_s, "calls": 1} | changes
    return WallPart(kind=kind, place=at(line) if line else NOWHERE, wall_s=wall_s, **given)


def script(*parts: WallPart, loops: Any = (), since_start_s: float = 100.0) -> WatchedProcess:
    return watched(*loops, wall_parts=parts, since_start_s=since_start_s)


def findings(each: WatchedProcess) -> dict[str, ScriptFinding]:
    return {found.kind: found for found in diagnose([each], MACHINE).findings}


def test_each_moment_is_the_innermost_parts() -> None:
    wall, outer, inner = Wall(), ("a.py", 1), ("a.py", 2)
    with wall.part("fit", outer):
        time.sleep(0.05)  # the time that is measured
        for _ in range(2):
            with wall.part("validation", inner):
                time.sleep(0.1)  # the time that is measured

    facts = wall.as_json()
    spent = {(kind, tuple(place)): rest for kind, place, *rest in facts["parts"]}
    assert spent["validation", inner][0] >= 0.2
    assert 0.05 <= spent["fit", outer][0] < 0.15
    assert (spent["fit", outer][2], spent["validation", inner][2]) == (1, 2)
    assert facts["total_s"] > sum(rest[0] for rest in spent.values())


def test_what_is_open_counts_up_to_now() -> None:
    wall = Wall()
    with wall.part("fit"), wall.part("predict"):
        time.sleep(0.1)  # the time that is measured
        spent = {kind: rest for kind, _, *rest in wall.as_json()["parts"]}

    assert spent["predict"][0] >= 0.1
    assert spent["fit"][0] < 0.05


def test_other_threads_count_for_nothing_and_an_error_ends_a_part() -> None:
    wall = Wall()

    def predict() -> None:
        with wall.part("predict"):
            pass

    thread = threading.Thread(target=predict)
    thread.start()
    thread.join()
    with pytest.raises(ZeroDivisionError), wall.part("saving"):
        raise ZeroDivisionError
    with wall.part("fit"):
        pass

    assert [kind for kind, *_ in wall.as_json()["parts"]] == ["saving", "fit"]


def test_parts_add_up_to_the_time_since_the_start() -> None:
    parts = wall_time(
        script(part("imports", 6.0), part("fit", 50.0, 30), part("validation", 20.0, 30))
    )

    assert parts == {"training": 50.0, "rest": 24.0, "validation": 20.0, "imports": 6.0}
    assert next(iter(parts)) == "training"


def test_steps_of_a_loop_are_training_and_what_we_took_is_ours() -> None:
    own = loop(measuring_s=3.0)
    fitted = fit(measuring_s=2.0)
    parts = wall_time(script(part("fit", 10.0, 40), loops=(own, fitted)))

    assert parts["measuring"] == 5.0
    assert parts["training"] == pytest.approx(10.0 - 2.0 + own.first_s + own.period_s)


def test_the_largest_part_is_the_first_finding_with_its_line_and_an_upper_bound() -> None:
    run = script(
        part("imports", 10.0),
        part("fit", 20.0, 30),
        part("validation", 15.0, 30, calls=5),
        part("predict", 45.0, 12, calls=300),
    )

    first, second = diagnose([run], MACHINE).findings

    assert (first.kind, first.place) == ("slow_predict", at(12))
    assert "50% of the script's time without imports (45 s in 300 calls)" in first.observation
    assert "Collect the rows" in first.change
    assert first.gain is not None
    assert first.gain[1] == pytest.approx(2.0)
    assert (second.kind, second.place) == ("slow_validation", at(30))
    assert "validation_freq" in second.change


@pytest.mark.parametrize(
    "small",
    [
        part("validation", 5.0, 30),
        part("imports", 90.0),
        part("fit", 90.0, 30),
        part("callbacks", 1.5, 30),
        part("saving", 9.9, 30, cpu_s=0.1),
    ],
)
def test_what_is_small_or_is_training_is_not_a_finding(small: WallPart) -> None:
    assert findings(script(small, since_start_s=60.0 if small.wall_s < 9 else 98.0)) == {}


def test_a_busy_machine_makes_no_short_part_a_finding() -> None:
    # A third of the wall time but almost no CPU time: other processes had the cores.
    assert findings(script(part("validation", 4.0, 30, cpu_s=0.3), since_start_s=12.0)) == {}


def test_of_a_loop_that_takes_next_to_no_time_no_speed_is_advised() -> None:
    waits = loop(wait_s=0.5, call_s=0.4)
    alone = findings(script(loops=(waits,), since_start_s=4.0))

    assert any(found.gain for found in alone.values())
    assert findings(script(loops=(waits,), since_start_s=1000.0)) == {}


def test_without_its_time_a_part_is_not_reported() -> None:
    assert shown_parts(watched()) == []
    assert findings(script(part("predict", 50.0, 12), since_start_s=0.0)).keys() == set()


def test_the_parts_of_a_script_are_shown_and_are_in_the_json() -> None:
    run = script(part("predict", 60.0, 12, calls=3), part("imports", 0.5))

    assert shown_parts(run) == [("predict", 0.6), ("the script's own code and waiting", 0.395)]
    assert parts_json(run)[0] == {
        "kind": "predict",
        "file": "/home/me/train.py",
        "line": 12,
        "wall_s": 60.0,
        "cpu_s": 60.0,
        "calls": 3,
    }


def fills(*, map_s: float, wall_s: float = 41.0, away: float = 0.0, **changes: Any) -> Loop:
    """A fit of 5 passes of 1 s; below its cache stand two maps of which one worked so long."""
    maps = (stage("map", 9, **changes), stage("map", 8, arguments={"num_parallel_calls": -1}))
    dear = {"parameters": {"parallelism": (4.0, True)}} if changes else {}
    nodes = (
        node("Root"),
        node("BatchV2", 3.0),
        node("MemoryCache", 2.0),
        node("ParallelMapV2" if changes else "Map", map_s, **dear),
        node("ParallelMapV2", 4.0, parameters={"parallelism": (4.0, True)}),
        node("TensorSlice", 0.1),
    )
    return fit(
        passes=5,
        stages=(stage("batch", 11), stage("cache", 10), *maps, stage("from_tensor_slices", 7)),
        first_pass=FirstPass(
            longer_s=wall_s - 1.0, wall_s=wall_s, away=away, nodes=nodes, nodes_s=wall_s / 2
        ),
    )


def test_a_first_pass_that_fills_a_cache_is_named_at_the_map_that_takes_the_time() -> None:
    run = script(part("imports", 5.0), part("fit", 50.0, 40), loops=(fills(map_s=20.0),))

    found = findings(run)["slow_first_pass"]

    assert found.place == at(9)
    assert (
        "in the first of 5 passes, which takes 40 s longer than a later pass, 42%"
        in found.observation
    )
    assert "num_parallel_calls=tf.data.AUTOTUNE" in found.change
    # On 4 cores a quarter of it stays.
    assert found.gain == pytest.approx((1.0, 1 / (1 - 0.75 * 40 / 95)))
    parts = wall_time(run)
    assert parts["first_pass"] == 40.0
    assert sum(parts.values()) == pytest.approx(100.0)


def test_of_a_parallel_map_the_results_are_kept_for_the_next_run() -> None:
    parallel = fills(map_s=80.0, arguments={"num_parallel_calls": -1})

    found = findings(script(part("fit", 50.0, 40), loops=(parallel,)))["slow_first_pass"]

    assert found.place == at(9)
    assert "the next run" in found.change
    assert "num_parallel_calls" not in found.change


def test_a_first_pass_that_traces_for_long_or_fills_little_is_not_a_finding() -> None:
    tracing = script(part("fit", 50.0, 40), loops=(fills(map_s=0.5),))
    short = script(part("fit", 3.0, 40), loops=(fills(map_s=1.0, wall_s=2.5),))
    uncached = fit(passes=5, first_pass=None)

    for each in (tracing, short, script(part("fit", 50.0, 40), loops=(uncached,))):
        assert "slow_first_pass" not in findings(each)


def test_a_load_that_makes_all_times_longer_changes_no_verdict_about_a_first_pass() -> None:
    for quiet_s, is_found in ((1.5, False), (3.0, True)):
        for away in (0.0, 0.75):
            slower = 1.0 / (1.0 - away)
            loaded = fills(map_s=quiet_s * slower, wall_s=quiet_s * slower + 1.0, away=away)
            run = script(
                part("fit", 10.0 * slower, 40), loops=(loaded,), since_start_s=12.0 * slower
            )
            assert ("slow_first_pass" in findings(run)) is is_found, (quiet_s, away)


def test_a_cache_that_an_earlier_loop_has_filled_is_not_a_first_pass() -> None:
    own = loop(
        passes=3,
        stages=(stage("batch", 11), stage("cache", 10), stage("map", 9)),
        first_pass=FirstPass(
            longer_s=30.0,
            wall_s=40.0,
            away=0.0,
            nodes=(node("Root"), node("BatchV2"), node("MemoryCache"), node("MemoryCacheImpl")),
            nodes_s=20.0,
        ),
    )

    assert "slow_first_pass" not in findings(script(loops=(own,)))
    assert own.first_pass is not None
    unseen = replace(own, first_pass=replace(own.first_pass, nodes=()))
    found = findings(script(loops=(unseen,)))["slow_first_pass"]
    assert (found.place, found.sure) == (at(9), "likely")


def test_what_saves_most_of_the_script_comes_first() -> None:
    """A loop of a tenth of the script that could be 5 times as quick saves less than a first pass."""
    waits = loop(
        stages=(stage("batch", 3), stage("from_generator", 2)), wait_s=8.0, call_s=1.5, period_s=10
    )
    run = script(part("fit", 50.0, 40), loops=(waits, fills(map_s=20.0)))

    first, *others = (each.kind for each in diagnose([run], MACHINE).findings)

    assert first == "slow_first_pass"
    assert "generator_rows" in others
