"""A step that XLA compiles as one program: its results, and its state after a batch that is not finite."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray

from stoker.data.user_dataset.features import OwnFeatures
from stoker.data.user_dataset.load_dataset import describe_element
from stoker.train.optimizer.ema import WeightAverage
from stoker.train.optimizer.loss_scaling import all_finite
from stoker.train.setup.build_model import BuiltModel, build_model
from stoker.train.setup.strategy import one_device
from stoker.train.step.multi_step import make_multi_step, make_run_resident
from stoker.train.step.one_program import (
    MAX_PROGRAM_BYTES,
    OneProgram,
    max_steps_per_program,
    steps_within_program_time,
)
from stoker.train.step.program import StepInput, group_batches, takes_batches_inline
from stoker.train.step.step import StepSettings, make_train_step
from stoker.train.step.step_totals import StepResult, StepTotals

ROWS = 16


class Wrapped(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
    """Somebody's own optimizer: another does its work, and weights stand among its variables."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.by = keras.optimizers.Adam(0.05)
        self.last = tf.Variable(tf.constant(0.0), trainable=False)

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.by.build(variables)
        self.seen = list(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.last.assign(tf.reduce_sum(grads[-1]))
        self.by.apply(grads, trainable_variables)


class Nearly(keras.metrics.Metric):  # type: ignore[misc]  # Keras has no types
    """Somebody's own metric, of an operation that XLA does not have."""

    def __init__(self) -> None:
        super().__init__(name="nearly")
        self.count = self.add_variable((), initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        near = tf.abs(tf.cast(y_true, y_pred.dtype) - tf.squeeze(y_pred, -1)) < 0.5
        distinct, _ = tf.unique(tf.strings.as_string(tf.where(near)[:, 0]))
        self.count.assign_add(tf.cast(tf.size(distinct), "float32"))

    def result(self) -> Any:
        return self.count.value


def batch_of(seed: int, *, bad: bool = False) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 3)).astype(np.float32)
    word = rng.integers(0, 9, ROWS)
    label = (x.sum(axis=1) > 0).astype(np.int64)
    if bad:
        x[5, 1] = np.nan
    return {"x": tf.constant(x), "word": tf.constant(word)}, tf.constant(label)


def made(*, optimizer: Any, metrics: list[Any], xla: bool) -> tuple[BuiltModel, Any, WeightAverage]:
    keras.utils.set_random_seed(3)

    def build(features: dict[str, Any]) -> keras.Model:
        seen = layers.Flatten()(layers.Embedding(9, 2)(features["word"]))
        hidden = layers.Concatenate()([features["x"], seen])
        hidden = layers.Dense(4, activation="tanh")(hidden)
        model = keras.Model(features, layers.Dense(1, activation="sigmoid")(hidden))
        model.compile(optimizer=optimizer(), loss="binary_crossentropy", metrics=metrics)
        return model

    example = batch_of(0)
    spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), example)
    built = build_model(build, OwnFeatures(describe_element(spec, what="test")), what="build")
    built.model._symbolic_build(data_batch=(built.adapt(example[0]), example[1]))
    average = WeightAverage(built.model.trainable_variables, momentum=0.9)
    settings = StepSettings(batch_size=ROWS, xla=xla, average=average)
    step = make_train_step(built, lambda e: e, distribution=one_device(), settings=settings)
    return built, tf.function(step), average


def state(built: BuiltModel, average: WeightAverage) -> list[NDArray[Any]]:
    model = built.model
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return [np.array(v.numpy()) for v in [*variables, *average.variables]]


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05, weight_decay=0.01, global_clipnorm=1.0),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(
        keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9), centered=True
    ),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "muon": lambda: keras.optimizers.Muon(0.05),
}


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(make, id=name, marks=[pytest.mark.soak] * (name not in ("adam", "muon")))
        for name, make in OPTIMIZERS.items()
    ],
)
def test_it_learns_what_the_step_without_xla_does_and_a_bad_batch_changes_no_bit(
    optimizer: Any,
) -> None:
    for_xla, plain = (made(optimizer=optimizer, metrics=["accuracy"], xla=x) for x in (True, False))

    for seed in range(4):
        compiled, other = for_xla[1](batch_of(seed)), plain[1](batch_of(seed))
        np.testing.assert_allclose(compiled.loss_sum, other.loss_sum, rtol=1e-4)

    for one, two in zip(state(for_xla[0], for_xla[2]), state(plain[0], plain[2]), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)
    ours, others = (each[0].model.get_metrics_result() for each in (for_xla, plain))
    assert float(ours["accuracy"]) == pytest.approx(float(others["accuracy"]))

    built, step, average = for_xla
    before = state(built, average)
    outcome = step(batch_of(1, bad=True))
    assert not outcome.finite
    assert np.isnan(outcome.loss_sum)
    for kept, value in zip(before, state(built, average), strict=True):
        np.testing.assert_array_equal(value, kept)
    # And the next one changes them again: nothing was left switched off.
    assert step(batch_of(2)).finite
    assert any((a != b).any() for a, b in zip(before, state(built, average), strict=True))


def test_what_an_optimizer_of_ones_own_keeps_is_not_touched_by_a_bad_batch_either() -> None:
    built, step, _ = made(optimizer=Wrapped, metrics=["accuracy"], xla=True)
    step(batch_of(0))
    own = built.model.optimizer
    before = [v.numpy() for v in [own.last, *(v.value for v in own.by.variables)]]

    assert not step(batch_of(1, bad=True)).finite

    after = [v.numpy() for v in [own.last, *(v.value for v in own.by.variables)]]
    for kept, value in zip(before, after, strict=True):
        np.testing.assert_array_equal(value, kept)


def test_a_metric_that_xla_cannot_compile_is_computed_outside_the_program() -> None:
    built, step, _ = made(optimizer=keras.optimizers.Adam, metrics=[Nearly()], xla=True)

    for seed in range(3):
        step(batch_of(seed))

    assert 0 < float(built.model.get_metrics_result()["nearly"]) <= 3 * ROWS


TOGETHER = 8
STEPS = 30


def data_of(steps: int, *, bad: int | None = None) -> Any:
    """Rows of some steps; those of the step `bad` hold a NaN."""
    parts = [batch_of(seed, bad=seed == bad) for seed in range(steps)]
    return tf.nest.map_structure(lambda *tensors: tf.concat(tensors, 0), *parts)


def elements_of(data: Any) -> tf.data.Dataset[Any]:
    """The same as batches of known shapes."""
    batched = tf.nest.map_structure(lambda t: tf.reshape(t, [-1, ROWS, *t.shape[1:]]), data)
    return tf.data.Dataset.from_tensor_slices(batched)


def calls_of(data: Any, at: list[int]) -> tf.data.Dataset[Any]:
    """The same as the rows of some calls, cut before these rows."""
    bounds = itertools.pairwise([0, *at, len(data[1])])
    parts = [tf.nest.map_structure(operator.itemgetter(slice(*ends)), data) for ends in bounds]
    spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), data)
    return tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec)


def made_for(
    steps_per_program: int, *, checks_before_update: bool = True
) -> tuple[BuiltModel, OneProgram, WeightAverage]:
    built, _, average = made(optimizer=OPTIMIZERS["adam"], metrics=["accuracy"], xla=True)
    settings = StepSettings(
        batch_size=ROWS,
        xla=True,
        average=average,
        steps_per_program=steps_per_program,
        checks_before_update=checks_before_update,
    )
    step = make_train_step(built, lambda e: e, distribution=one_device(), settings=settings)
    assert isinstance(step, OneProgram)
    return built, step, average


def called(run: Any, step_input: StepInput, steps: int) -> StepTotals:
    if step_input.ahead:
        step_input.take_first()
    sums = run(step_input.iterator, tf.constant(steps, tf.int64), True, step_input.left)
    step_input.left = sums.left
    return cast("StepTotals", sums)


def trained(steps_per_program: int, elements: Any, calls: list[int], *, rows: int | None) -> Any:
    """Everything that training changes, and the results that the calls reported for their steps."""
    built, step, average = made_for(steps_per_program)
    run = make_multi_step(step, rows_per_step=rows)
    if rows is None and steps_per_program > 1:
        step_input = group_batches(elements.repeat(), steps_per_program)
    elif rows is None:
        step_input = StepInput(iterator=iter(elements.repeat()), ahead=True)
    else:
        step_input = StepInput(iterator=iter(elements))
    sums = [called(run, step_input, steps) for steps in calls]
    metrics = [np.array(v.numpy()) for v in built.model.metrics_variables]
    return state(built, average) + metrics, sums


def test_steps_are_the_same_however_many_are_one_program() -> None:
    data = data_of(STEPS)
    one_by_one, sums = trained(1, elements_of(data), [STEPS], rows=None)

    for elements, calls, rows in (
        (elements_of(data), [20, 7, 3], None),
        (calls_of(data, [13 * ROWS, 14 * ROWS]), [13, 1, 16], ROWS),
    ):
        grouped, parts = trained(TOGETHER, elements, calls, rows=rows)

        for one, other in zip(grouped, one_by_one, strict=True):
            np.testing.assert_array_equal(one, other)
        assert [int(part.steps) for part in parts] == calls
        assert sum(float(part.rows) for part in parts) == STEPS * ROWS
        loss = sum(float(part.loss_sum) for part in parts)
        assert loss == pytest.approx(float(sums[0].loss_sum), rel=1e-6)


@pytest.fixture
def one_operation_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets how many threads run operations, which a process may do only once."""

    def say(one: bool) -> None:
        threads = 1 if one else 2
        monkeypatch.setattr(
            tf.config.threading, "get_inter_op_parallelism_threads", lambda: threads
        )

    return say


def test_steps_outside_of_a_program_are_the_same_however_calls_are_cut(
    one_operation_at_a_time: Callable[[bool], None],
) -> None:
    data, found = data_of(STEPS), []
    for calls, overlap, one in (
        ([1] * STEPS, False, False),
        ([20, 7, 3], False, False),
        ([20, 7, 3], True, False),
        ([20, 7, 3], True, True),
        ([1] * STEPS, False, True),
    ):
        one_operation_at_a_time(one)
        built, _, average = made(optimizer=OPTIMIZERS["adam"], metrics=["accuracy"], xla=False)
        settings = StepSettings(batch_size=ROWS, average=average)
        step = make_train_step(built, lambda e: e, distribution=one_device(), settings=settings)
        run = make_multi_step(
            step, rows_per_step=None, single_step=len(calls) == STEPS, overlap=overlap
        )
        batches = elements_of(data).repeat()
        step_input = StepInput(
            iterator=iter(batches), ahead=not takes_batches_inline(batches.element_spec)
        )
        sums = [called(run, step_input, steps) for steps in calls]
        assert [int(part.steps) for part in sums] == calls
        assert sum(float(part.rows) for part in sums) == STEPS * ROWS
        found.append((state(built, average), [float(part.loss_sum) for part in sums]))

    for one, *others in zip(*(weights for weights, _ in found), strict=True):
        for other in others:
            np.testing.assert_array_equal(one, other)
    assert found[1][1] == found[2][1] == found[3][1]


@pytest.mark.parametrize(
    ("one", "exact"),
    [(False, False), (True, False), (True, True)],
    ids=["ahead", "by the thread that computes", "ahead, with no prefetch left"],
)
@pytest.mark.parametrize("step_s", [0.0, 0.06], ids=["quicker than its input", "slower"])
def test_a_step_waits_for_input_only_where_its_last_write_has_ended(
    step_s: float,
    one: bool,
    exact: bool,
    one_operation_at_a_time: Callable[[bool], None],
    determinism: Any,
) -> None:
    one_operation_at_a_time(one)
    if exact:
        determinism.enable_op_determinism()
    steps, input_s = 10, 0.04
    written = tf.Variable(tf.constant(0.0))

    def slept(seconds: float, value: tf.Tensor) -> tf.Tensor:
        def sleep(seen: Any) -> Any:
            time.sleep(seconds)
            return seen

        return tf.ensure_shape(tf.numpy_function(sleep, [value], tf.float32), [])

    def step(element: tf.Tensor) -> StepResult:
        # Its loss is known long before.
        written.assign_add(slept(step_s, element))
        return StepResult(
            tf.constant(1.0), tf.constant(1.0), tf.constant(True), tf.constant([0, 0])
        )

    run = make_multi_step(step, rows_per_step=None, overlap=True)
    batches = tf.data.Dataset.from_tensors(1.0).repeat().map(partial(slept, input_s)).prefetch(2)
    step_input = StepInput(
        iterator=iter(batches), ahead=not takes_batches_inline(batches.element_spec)
    )
    sums = called(run, step_input, steps)

    assert float(written) == steps
    waited_s = float(sums.wait_s)
    if step_s:
        assert waited_s < steps * input_s / 2
    else:
        assert waited_s > steps * input_s / 2


def taking(run: Any, step_input: StepInput) -> set[str]:
    """The kinds of operations that take an element, of all functions of a traced call."""
    arguments = step_input.iterator, tf.constant(1, tf.int64), True, step_input.left_spec
    graph = run.get_concrete_function(*arguments).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return {node.op for node in nodes if node.op.startswith("IteratorGetNext")}


def test_the_thread_that_computes_takes_the_batch_where_it_is_the_only_one(
    one_operation_at_a_time: Callable[[bool], None],
) -> None:
    def step(element: Any) -> StepResult:
        parts = [getattr(part, "flat_values", part) for part in tf.nest.flatten(element)]
        total = tf.add_n([tf.reduce_sum(part) for part in parts])
        return StepResult(total, tf.constant(1.0), tf.constant(True), tf.constant([0, 0]))

    dense = tf.data.Dataset.from_tensors({"b": 1.0, "a": (2.0, 3.0)}).repeat()
    ragged = tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [2.0, 3.0]])).repeat()
    for one, batches, wanted in (
        (False, dense, "IteratorGetNext"),
        (True, dense, "IteratorGetNextSync"),
        (True, ragged, "IteratorGetNext"),  # no plain tensor
    ):
        one_operation_at_a_time(one)
        run = make_multi_step(step, rows_per_step=None)
        step_input = StepInput(
            iterator=iter(batches), ahead=not takes_batches_inline(batches.element_spec)
        )
        assert taking(run, step_input) == {wanted}
        assert float(called(run, step_input, 3).loss_sum) == 18.0


def test_the_rows_that_fill_no_step_are_trained_on_too() -> None:
    data = tf.nest.map_structure(lambda tensor: tensor[:-5], data_of(STEPS))

    grouped, (sums,) = trained(TOGETHER, calls_of(data, []), [STEPS], rows=ROWS)
    one_by_one, _ = trained(1, calls_of(data, []), [STEPS], rows=ROWS)

    assert (int(sums.steps), float(sums.rows)) == (STEPS, STEPS * ROWS - 5)
    for one, other in zip(grouped, one_by_one, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "rows", [None, pytest.param(ROWS, marks=pytest.mark.soak)], ids=["batches", "calls"]
)
def test_the_program_ends_before_a_step_that_is_not_finite(rows: int | None) -> None:
    data, good = data_of(STEPS, bad=12), data_of(12)
    made_of = elements_of if rows is None else partial(calls_of, at=[])

    found, (sums,) = trained(TOGETHER, made_of(data), [STEPS], rows=rows)
    wanted, _ = trained(TOGETHER, made_of(good), [12], rows=rows)

    assert (int(sums.steps), bool(sums.finite)) == (12, False)
    assert np.isnan(sums.last_loss)
    # Metrics count the bad batch too; a resumed run has restored them.
    weights = slice(0, -2)
    for one, other in zip(found[weights], wanted[weights], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_program_that_updates_at_once_learns_the_same_and_ends_at_a_bad_step() -> None:
    data = data_of(STEPS, bad=21)
    found, sums = {}, {}
    for checks_before_update in (True, False):
        built, step, average = made_for(TOGETHER, checks_before_update=checks_before_update)
        run = make_multi_step(
            step,
            rows_per_step=None,
            check_finite=None if checks_before_update else partial(all_finite, built.model),
        )
        step_input = group_batches(elements_of(data).repeat(), TOGETHER)
        good = called(run, step_input, 20)
        assert (int(good.steps), bool(good.finite)) == (20, True)
        found[checks_before_update] = state(built, average)
        sums[checks_before_update] = called(run, step_input, 10)

    for one, other in zip(found[True], found[False], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    for checks_before_update in (True, False):
        assert (int(sums[checks_before_update].steps), bool(sums[checks_before_update].finite)) == (
            1,
            False,
        )
        assert np.isnan(sums[checks_before_update].last_loss)


def test_the_ceiling_is_that_of_the_same_program() -> None:
    built, step, average = made_for(TOGETHER)
    before = state(built, average)

    make_run_resident(step, batch_of(0))(batch_of(0), tf.constant(19, tf.int64))

    assert built.model.optimizer.iterations.numpy() == 19
    assert any((a != b).any() for a, b in zip(before, state(built, average), strict=True))


def test_little_is_done_together_where_batches_are_large() -> None:
    batch = tf.zeros([MAX_PROGRAM_BYTES // 12], tf.float32)

    assert max_steps_per_program(batch, steps_per_call=50) == 3
    assert max_steps_per_program(tf.zeros([ROWS]), steps_per_call=50) == 50
    assert max_steps_per_program(tf.zeros([ROWS]), steps_per_call=600) == 200, "three of one length"
    assert max_steps_per_program(tf.zeros([ROWS]), steps_per_call=5) == 5
    assert max_steps_per_program(tf.zeros([MAX_PROGRAM_BYTES]), steps_per_call=50) == 1


def test_a_program_takes_a_quarter_of_a_second_at_most() -> None:
    assert steps_within_program_time(200, 0.001) == 200
    assert steps_within_program_time(200, 0.002) == 100, "two of one length"
    assert steps_within_program_time(50, 0.01) == 25
    assert steps_within_program_time(50, 0.02) == 1, "to so long a step a start is nothing"
