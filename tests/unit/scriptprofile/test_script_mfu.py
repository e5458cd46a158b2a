"""MFU and transfer of a loop, on what a watcher and a counting process might have said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tests.unit.scriptprofile.watched import at, watched
from tests.unit.scriptprofile.watched import fit as watched_fit

from stoker.scriptprofile import counting
from stoker.scriptprofile.loops import TRANSFER, Loop
from stoker.scriptprofile.observations import Place, Reached
from stoker.scriptprofile.rules.diagnose import diagnose
from stoker.scriptprofile.rules.input_rules import Machine
from stoker.scriptprofile.utilization import reached_json, reached_rows, with_reached
from stoker.scriptprofile.watcher.stoker_watch.ceiling import copied_s, transfer_s

KNOWN = Reached(operations=2e9, peak_per_s=1e12, peak_of="products of matrices in float32")


def fit(*, transfer_s: float = 0.0, **changes: Any) -> Loop:
    """A fit of 10 ms a step, 8 of them in its compiled step."""
    one: Mapping[str, float] = {
        "calls": 10, "real_s": 0.1, "ceiling_s": 0.08, "transfer_s": 10 * transfer_s,
    }  # fmt: skip
    facts: dict[str, Any] = {
        "place": at(30),
        "steps": 100,
        "call_s": 0.9,
        "stages": (),
        "nodes": (),
        "rounds": (one,) * 3,
        "model": {"made": ["/home/me/train.py", 10]},
    }
    return watched_fit(**(facts | changes))


def test_the_figure_is_operations_by_the_steps_time_and_the_peak() -> None:
    loop = fit(reached=KNOWN)

    as_json = reached_json(loop)

    assert as_json["achieved_flops_per_s"] == pytest.approx(2e9 / 0.01)
    assert as_json["mfu"] == pytest.approx(0.2)
    [(name, figure)] = reached_rows([loop])
    assert name == "MFU in train.py:30"
    assert figure == "20%: 200 of 1,000 GFLOP/s, the peak of products of matrices in float32 here"


@pytest.mark.parametrize(
    ("reached", "why"),
    [
        (replace(KNOWN, operations=None, no_operations="MatMul of a size"), "MatMul of a size"),
        (replace(KNOWN, peak_per_s=None, no_peak="2 GPUs, and here 0"), "2 GPUs, and here 0"),
    ],
)
def test_without_one_of_them_the_reason_is_reported_instead_of_a_figure(
    reached: Reached, why: str
) -> None:
    loop = fit(reached=reached)

    assert (reached_json(loop)["mfu"], reached_json(loop)["mfu_not_measured"]) == (None, why)
    assert [figure for _, figure in reached_rows([loop])] == [f"not measured: {why}"]


def test_a_loop_whose_graph_was_not_kept_says_so_without_any_process(tmp_path: Path) -> None:
    too_large = fit(step={"why": "the step's graph takes more than 256 MiB"})

    [process] = with_reached([watched(fit(), too_large)], tmp_path)

    reasons = [loop.reached.why_none() for loop in process.loops if loop.reached]
    assert reasons == [
        "U was not measured, so the graph of the step was not kept",
        "the step's graph takes more than 256 MiB",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_second_process_is_not_counted(tmp_path: Path) -> None:
    _, second = with_reached([watched(), watched(fit(step={"graph": "step-1-1.pb"}))], tmp_path)

    [loop] = second.loops
    assert loop.reached is not None
    assert loop.reached.why_none() == "it is counted only for the process with most training steps"


def test_counting_says_what_it_cannot_read_and_counts_the_others(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        left = tf.compat.v1.placeholder(tf.float32, [8, 20], name="left")
        tf.linalg.matmul(left, tf.ones([20, 5]), name="product")
        tf.compat.v1.placeholder(tf.float32, [8], name="nothing")
    (tmp_path / "good.pb").write_bytes(graph.as_graph_def(add_shapes=True).SerializeToString())
    alien = graph.as_graph_def(add_shapes=True)
    next(node for node in alien.node if node.op == "MatMul").op = "SomebodysOwn"
    (tmp_path / "alien.pb").write_bytes(alien.SerializeToString())

    def step(name: str, output: str) -> dict[str, Any]:
        named: dict[str, Any] = {"graph": name, "outputs": [output], "runs": [], "given": {}}
        return {**named, "batch": [], "compiled": False, "kind": "dataset", "calls": 1}

    steps = [
        step("good.pb", "product:0"),
        step("alien.pb", "product:0"),
        step("good.pb", "nothing:0"),
    ]
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    # The script saw GPUs, but this TensorFlow has none, so it can measure no peak.
    device = {"gpus": 2, "intra_op_threads": 0}
    request.write_text(json.dumps({"device": device, "steps": steps, "peak_s": 0.1}))

    counting.main(request, answer)

    good, unread, empty = json.loads(answer.read_text())["steps"]
    assert good["operations"] == 2 * 8 * 20 * 5
    assert good["no_peak"] == "the script's TensorFlow saw 2 GPUs, but Stoker's TensorFlow sees 0"
    assert unread["operations"] is None
    assert "SomebodysOwn" in unread["no_operations"]
    assert empty["operations"] is None
    assert "no products of matrices" in empty["no_operations"]


def test_the_transfer_is_a_part_of_the_compiled_step() -> None:
    without, with_it = fit().split, fit(transfer_s=0.003).split
    assert without is not None
    assert with_it is not None

    assert TRANSFER not in without.parts
    assert with_it.parts[TRANSFER] == pytest.approx(0.003)
    assert with_it.parts["compiled step"] == pytest.approx(0.005)
    assert sum(with_it.parts.values()) == pytest.approx(with_it.step_s)
    assert (with_it.busy, with_it.input_wait) == (without.busy, without.input_wait)


def test_a_transfer_that_takes_longer_alone_than_the_step_is_all_of_it() -> None:
    split = fit(transfer_s=0.5).split
    assert split is not None

    assert split.parts[TRANSFER] == pytest.approx(0.008)
    assert split.parts["compiled step"] == 0.0
    assert sum(split.parts.values()) == pytest.approx(split.step_s)


def test_a_batch_is_copied_and_left_as_it_was_and_without_a_gpu_nothing_is() -> None:
    numbers = np.arange(12, dtype=np.float32)
    batch = {"x": tf.constant(numbers), "y": numbers, "name": tf.constant(["a"]), "scale": 1.0}

    assert copied_s(batch, device="CPU:0") > 0
    assert copied_s({"name": tf.constant(["a"])}, device="CPU:0") == 0.0
    assert transfer_s(batch) == 0.0
    np.testing.assert_array_equal(batch["x"], np.arange(12, dtype=np.float32))


def test_operations_on_the_cpu_are_a_finding_on_a_machine_with_a_gpu() -> None:
    on_cpu = "operations of the step run on the CPU while GPU is there: Sin slow"
    loop = fit(reached=replace(KNOWN, on_cpu=on_cpu))
    machine = Machine(cores=4, memory_bytes=8 << 30)

    [finding] = diagnose([watched(loop, gpus=1)], machine).findings

    assert (finding.kind, finding.observation) == ("cpu_op", on_cpu)
    assert finding.place == Place(file="/home/me/train.py", line=10)
    assert diagnose([watched(loop, gpus=0)], machine).findings == ()
    assert diagnose([watched(fit(reached=KNOWN), gpus=1)], machine).findings == ()
