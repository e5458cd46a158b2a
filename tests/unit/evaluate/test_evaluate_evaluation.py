from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.core.errors import ConfigError, DataError
from stoker.core.multi_output import ONLY
from stoker.evaluate.config import EvaluateConfig, Gate, SliceGate
from stoker.evaluate.evaluation import (
    Evaluation,
    evaluate,
    evaluation_from_json,
    evaluation_to_json,
    measure_baseline,
    read_evaluation,
    write_evaluation,
)
from stoker.evaluate.gates import BaselineMetrics
from stoker.evaluate.metrics import Undefined
from stoker.evaluate.report import report_html, write_report
from stoker.evaluate.task import Examples, Task, infer_task, pair

BINARY = Task(kind="binary", classes=2)
HOSTILE = "<script>alert('x')</script>\n\"&"


def taxi(rows: int = 400) -> dict[str, Any]:
    """Labels, scores that say something about them, and two columns to slice by."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 2, rows)
    scores = np.clip(0.5 + 0.3 * (labels - 0.5) + rng.normal(0, 0.2, rows), 0, 1)
    payment = rng.choice(np.array([b"Cash", b"Credit Card", b""], dtype=object), rows)
    labels[payment == b"Cash"] = 0
    return {
        "labels": labels,
        "predictions": scores[:, None].astype(np.float32),
        "slice_columns": {"payment": payment, "fare": rng.normal(10, 3, rows)},
    }


def run(config: EvaluateConfig, **changes: Any) -> Evaluation:
    given = {"task": BINARY, "baseline": None} | taxi() | changes
    examples = pair(given["labels"], given["predictions"], task=given["task"])
    return evaluate(
        {ONLY: examples},
        slice_columns=given["slice_columns"],
        config=config,
        baseline=given["baseline"],
    )


def numbers(labels: Any, predictions: Any) -> dict[str, Examples]:
    """A regression."""
    return {ONLY: pair(labels, predictions, task=Task(kind="regression", classes=0))}


SLICED = EvaluateConfig(
    slices=("payment", "fare", "payment*fare"),
    gates={"auc": Gate(min=0.6, max_drop=0.01), "log_loss": Gate(max=5.0)},
    slice_gates={"accuracy": SliceGate(slices=("payment",), min=0.1, min_rows=20)},
)


def evaluations() -> list[Evaluation]:
    """One of every shape that an evaluation can have."""
    rng = np.random.default_rng(3)
    many = rng.dirichlet(np.ones(7), 50)
    return [
        run(SLICED),
        run(SLICED, baseline=BaselineMetrics(version="version 2", error="no signature")),
        run(
            EvaluateConfig(slices=("payment", "fare", "payment*payment")),
            labels=np.empty(0),
            predictions=np.empty((0, 1)),
            slice_columns={"payment": np.empty(0, dtype=object), "fare": np.empty(0)},
        ),
        run(EvaluateConfig(), predictions=np.full((400, 1), np.nan)),
        evaluate(
            {ONLY: pair(rng.integers(0, 7, 50), many, task=Task(kind="multiclass", classes=7))},
            slice_columns={HOSTILE: np.array([HOSTILE.encode(), b""] * 25, dtype=object)},
            config=EvaluateConfig(slices=(HOSTILE,)),
            baseline=None,
        ),
        evaluate(
            numbers(rng.normal(size=50), rng.normal(size=50)),
            slice_columns={},
            config=EvaluateConfig(gates={"rmse": Gate(max=0.1)}),
            baseline=None,
        ),
        evaluate(
            numbers(np.array([1e308, 1e308]), np.array([1e308, -1e308])),
            slice_columns={},
            config=EvaluateConfig(),
            baseline=None,
        ),
        two_outputs(SLICED_OUTPUTS),
        several_labels(EvaluateConfig(slices=("day",))),
    ]


SLICED_OUTPUTS = EvaluateConfig(
    slices=("payment",),
    gates={"tip_auc": Gate(min=0.6), HOSTILE + "_rmse": Gate(max=0.1)},
    slice_gates={"tip_accuracy": SliceGate(slices=("payment",), min=0.1, min_rows=20)},
)


def two_outputs(config: EvaluateConfig, **changes: Any) -> Evaluation:
    """A yes or no, and a number by a hostile name."""
    data, rng = taxi(), np.random.default_rng(5)
    tip = pair(data["labels"], data["predictions"], task=BINARY)
    amount = rng.normal(size=400)
    outputs = {"tip": tip, HOSTILE: numbers(amount, amount + 0.5)[ONLY]}
    return evaluate(
        outputs | changes, slice_columns=data["slice_columns"], config=config, baseline=None
    )


def several_labels(config: EvaluateConfig, labels: int = 3) -> Evaluation:
    """Photos with any number of tags, 100 a day, none of them on day c."""
    rng = np.random.default_rng(11)
    day = np.repeat(np.array([b"a", b"b", b"c"], dtype=object), 100)
    tags = rng.integers(0, 2, (300, labels)) * (day != b"c")[:, None]
    said = np.clip(0.5 * tags + rng.uniform(0, 0.6, tags.shape), 0, 1)
    examples = pair(tags, said, task=infer_task(tags, said.shape))
    return evaluate({ONLY: examples}, slice_columns={"day": day}, config=config, baseline=None)


EVERY = evaluations()
SHAPES = ["sliced", "bad baseline", "empty", "NaN", "hostile", "regression", "huge", "two outputs"]
SHAPES += ["several labels"]


def test_a_good_model_is_blessed_and_the_gates_metrics_are_measured() -> None:
    evaluation = run(SLICED)

    assert evaluation.blessed
    assert {"auc", "log_loss", "accuracy"} <= set(evaluation.metrics)
    assert evaluation.rows == 400
    assert [verdict.key for verdict in evaluation.verdicts][:3] == [
        "evaluate.gates.auc.min",
        "evaluate.gates.auc.max_drop",
        "evaluate.gates.log_loss.max",
    ]


def test_only_the_chosen_metrics_are_measured_in_their_order() -> None:
    evaluation = run(EvaluateConfig(metrics=("f1", "auc"), gates={"recall": Gate(min=0.0)}))

    assert list(evaluation.metrics) == ["f1", "auc", "recall"]
    assert evaluation.main_metric == "f1"


def test_a_slice_of_one_class_prints_as_undefined_with_its_reason() -> None:
    evaluation = run(EvaluateConfig(metrics=("auc",), slices=("payment",)))
    cash = next(piece for piece in evaluation.slices if piece.value == "Cash")

    assert cash.metrics["auc"] == Undefined(reason=f"all {cash.rows} rows have the label 0")
    assert evaluation.blessed


def test_the_metrics_of_slices_add_up_to_the_whole() -> None:
    evaluation = run(EvaluateConfig(metrics=("accuracy",), slices=("payment",)))
    parts = [(piece.rows, piece.metrics["accuracy"]) for piece in evaluation.slices]

    right = sum(rows * share for rows, share in parts if isinstance(share, float))

    assert right / evaluation.rows == pytest.approx(evaluation.metrics["accuracy"])


def test_the_same_model_again_has_dropped_by_nothing() -> None:
    config = EvaluateConfig(gates={"auc": Gate(max_drop=0.0)})
    data = taxi()
    baseline = measure_baseline(
        {ONLY: pair(data["labels"], data["predictions"], task=BINARY)},
        config=config,
        version="version 4",
    )

    evaluation = run(config, baseline=baseline)

    assert evaluation.blessed
    assert "no change" in evaluation.verdicts[0].reason


def test_a_worse_model_than_the_one_served_is_refused() -> None:
    config = EvaluateConfig(gates={"auc": Gate(max_drop=0.05)})
    data = taxi()
    baseline = measure_baseline(
        {ONLY: pair(data["labels"], data["predictions"], task=BINARY)},
        config=config,
        version="version 4",
    )

    evaluation = run(config, predictions=data["predictions"][::-1].copy(), baseline=baseline)

    assert not evaluation.blessed


def test_each_output_has_its_own_task_metrics_and_pictures() -> None:
    evaluation = two_outputs(EvaluateConfig())

    assert [found.task.kind for found in evaluation.outputs.values()] == ["binary", "regression"]
    assert evaluation.metrics["tip_auc"] == run(EvaluateConfig()).metrics["auc"]
    assert evaluation.metrics[HOSTILE + "_rmse"] == pytest.approx(0.5)
    assert evaluation.main_metric == "tip_auc"
    assert len(evaluation.outputs["tip"].confusion) == 2
    assert not evaluation.outputs[HOSTILE].confusion


def test_a_gate_of_one_output_refuses_the_model_whatever_the_other_says() -> None:
    evaluation = two_outputs(SLICED_OUTPUTS)

    wrong = [verdict for verdict in evaluation.verdicts if not verdict.passed]
    assert [verdict.key for verdict in wrong] == [f"evaluate.gates.{HOSTILE}_rmse.max"]
    assert wrong[0].reason == "0.5"


def test_several_labels_are_measured_together_and_one_by_one() -> None:
    evaluation = EVERY[SHAPES.index("several labels")]

    metrics: Any = evaluation.metrics
    each = [metrics[f"label_{label}_auc"] for label in range(3)]
    assert evaluation.outputs[ONLY].task == Task(kind="multilabel", classes=3)
    assert metrics["macro_auc"] == pytest.approx(np.mean(each))
    assert isinstance(metrics["subset_accuracy"], float)
    assert evaluation.main_metric == "macro_auc"
    by_day: Any = {piece.value: piece.metrics for piece in evaluation.slices}
    assert by_day["a"]["label_2_recall"] > 0.5
    assert isinstance(by_day["c"]["macro_auc"], Undefined)
    assert not evaluation.outputs[ONLY].confusion


def test_a_gate_can_ask_for_one_label_and_a_slice_of_it() -> None:
    config = EvaluateConfig(
        metrics=("micro_f1",),
        gates={"label_1_recall": Gate(min=0.1), "label_0_auc": Gate(min=0.999)},
        slice_gates={"label_2_precision": SliceGate(slices=("day",), values=("a",), min=0.2)},
    )

    evaluation = several_labels(config)

    assert [verdict.passed for verdict in evaluation.verdicts] == [True, False, True]
    assert list(evaluation.metrics) == [
        "micro_f1", "label_1_recall", "label_0_auc", "label_2_precision",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"'label_3_auc'. Did you mean 'label_\d_auc'"):
        several_labels(EvaluateConfig(metrics=("label_3_auc",)))
    assert len(several_labels(EvaluateConfig(), labels=21).metrics) == 12


def test_nan_of_one_output_is_never_blessed_and_the_output_is_named() -> None:
    broken = numbers(np.zeros(400), np.full(400, np.nan))[ONLY]

    evaluation = two_outputs(EvaluateConfig(), tip=broken)

    assert not evaluation.blessed
    assert evaluation.verdicts[0].subject == "tip_predictions"


def test_a_metric_of_no_output_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"OUTPUT_METRIC.* Received: 'auc'.* Known|Did you mean"):
        two_outputs(EvaluateConfig(metrics=("auc",)))
    with pytest.raises(ConfigError, match=r"gates .*'tap_auc'. Did you mean 'tip_auc'\?"):
        two_outputs(EvaluateConfig(gates={"tap_auc": Gate(min=0.1)}))
    with pytest.raises(ConfigError, match=r"'tip_log_loss'. Did you mean 'log_loss'\?"):
        run(EvaluateConfig(metrics=("tip_log_loss",)))


def test_an_empty_split_is_never_blessed_even_without_gates() -> None:
    evaluation = EVERY[SHAPES.index("empty")]

    assert not evaluation.blessed
    assert evaluation.verdicts[0].key == "evaluate.rows"


def test_one_nan_prediction_is_never_blessed_even_without_gates() -> None:
    data = taxi()
    data["predictions"][17] = np.nan

    evaluation = run(EvaluateConfig(), predictions=data["predictions"])

    assert not evaluation.blessed
    assert evaluation.verdicts[0].reason.endswith("in 1 of 400 rows")


@pytest.mark.parametrize("evaluation", EVERY, ids=SHAPES)
def test_json_holds_no_nan_and_comes_back_equal(evaluation: Evaluation, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"

    write_evaluation(evaluation, path)

    back = read_evaluation(path)
    assert back == evaluation
    assert list(back.metrics) == list(evaluation.metrics)
    json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("broken", ["{}", "[]", "null", '{"baseline": null}', "{"])
def test_a_damaged_evaluation_is_named(broken: str, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text(broken)

    with pytest.raises(DataError, match=r"evaluation\.json"):
        read_evaluation(path)


def test_a_refusal_cannot_be_edited_into_a_blessing() -> None:
    raw = evaluation_to_json(EVERY[SHAPES.index("NaN")])
    raw["blessed"] = True

    with pytest.raises(ValueError, match="blessed"):
        evaluation_from_json(raw)


def test_confusion_counts_every_row_by_label_and_prediction() -> None:
    labels, said = np.array([0, 0, 1, 2]), np.eye(3)[[0, 1, 1, 0]]
    task = infer_task(labels, said.shape)

    evaluation = evaluate(
        {ONLY: pair(labels, said, task=task)},
        slice_columns={},
        config=EvaluateConfig(),
        baseline=None,
    )

    assert evaluation.outputs[ONLY].confusion == ((1, 1, 0), (0, 1, 0), (1, 0, 0))
    assert not evaluation.outputs[ONLY].calibration


def test_calibration_bins_hold_every_row_and_rise() -> None:
    bins = run(EvaluateConfig()).outputs[ONLY].calibration

    assert sum(part.rows for part in bins) == 400
    means = [part.mean_prediction for part in bins]
    assert means == sorted(means)
    assert len(bins) == 10


class _Page(HTMLParser):
    """Checks that tags nest, and collects what a page holds."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("evaluation", EVERY, ids=SHAPES)
def test_the_report_is_one_whole_page_that_runs_and_loads_nothing(
    evaluation: Evaluation, tmp_path: Path
) -> None:
    path = tmp_path / "evaluation.html"

    names = {name: [HOSTILE] * found.task.classes for name, found in evaluation.outputs.items()}
    write_report(evaluation, path, title=HOSTILE, classes=names)

    page = _Page()
    page.feed(path.read_text())
    assert not page.open
    assert "script" not in page.tags
    assert not page.links
    assert ("blessed" if evaluation.blessed else "refused") in page.text
    assert not re.search(r"\bnan\b", page.text)
    for verdict in evaluation.verdicts:
        assert verdict.key in page.text


def test_the_report_shows_hostile_names_as_text() -> None:
    page = _Page()
    page.feed(report_html(EVERY[SHAPES.index("hostile")]))

    assert HOSTILE in page.text


def test_the_report_draws_slices_calibration_and_undefined_reasons() -> None:
    page = report_html(run(SLICED))

    assert page.count('class="meter"') >= 2
    assert "<polyline" in page
    assert "undefined" in page
    assert "rows have the label 0" in page
