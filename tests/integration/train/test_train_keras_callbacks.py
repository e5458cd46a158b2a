"""The same calls in the same order with the same logs as `Model.fit`, and again after a kill."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import ConfigError
from stoker.train.callbacks.callbacks import Callbacks, load_callbacks

# Keras 3.15 reads its variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

BATCH = 4
Call = tuple[str, int | None, dict[str, float] | None]


def data(steps: int) -> tuple[NDArray[Any], NDArray[Any]]:
    x = np.random.default_rng(0).normal(size=(steps * BATCH, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def model(learning_rate: Any = 0.05, steps_per_execution: int = 1) -> keras.Model:
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile(
        keras.optimizers.SGD(learning_rate),
        "mse",
        metrics=["mae"],
        steps_per_execution=steps_per_execution,
        jit_compile=False,
    )
    return made


class Recorder(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Every hook, with what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def _record(self, hook: str, at: int | None, logs: dict[str, float] | None) -> None:
        self.calls.append((hook, at, None if logs is None else dict(logs)))


for hook in ("train", "test"):
    for end in ("begin", "end"):

        def whole(self: Any, logs: Any = None, *, name: str = f"on_{hook}_{end}") -> None:
            self._record(name, None, logs)

        def batch(
            self: Any, batch: int, logs: Any = None, *, name: str = f"on_{hook}_batch_{end}"
        ) -> None:
            self._record(name, batch, logs)

        def epoch(
            self: Any, epoch: int, logs: Any = None, *, name: str = f"on_epoch_{end}"
        ) -> None:
            self._record(name, epoch, logs)

        setattr(Recorder, f"on_{hook}_{end}", whole)
        setattr(Recorder, f"on_{hook}_batch_{end}", batch)
        setattr(Recorder, f"on_epoch_{end}", epoch)


class Killed(BaseException):
    """The process has gone."""


def loop(
    built: keras.Model,
    hooks: Callbacks,
    *,
    steps: int,
    epochs: int,
    per_call: int = 1,
    first: tuple[int, int] = (0, 0),
    kill_at: tuple[int, int] | None = None,
) -> None:
    """The order of `stoker.train.loop.loop`, with Keras's own step."""
    x, y = data(steps)
    train_step = tf.function(built.train_step)
    hooks.on_train_begin()
    for epoch in range(first[0], epochs):
        start = first[1] if epoch == first[0] else 0
        if start == 0:
            built.reset_metrics()
            hooks.on_epoch_begin(epoch)
        for begin in range(start, steps, per_call):
            end = min(begin + per_call, steps)
            hooks.on_train_batch_begin(begin)
            for step in range(begin, end):
                rows = slice(step * BATCH, (step + 1) * BATCH)
                logs = train_step((x[rows], y[rows]))
            hooks.on_train_batch_end(end - 1, logs)
            if kill_at == (epoch, end):
                raise Killed
            if hooks.stop_training:
                break
        logs = built.get_metrics_result()
        logs = logs | {f"val_{k}": v for k, v in validate(built, hooks, per_call).items()}
        hooks.on_epoch_end(epoch, logs)
        if hooks.stop_training:
            break
    hooks.on_train_end(logs)


def validate(built: keras.Model, hooks: Callbacks, per_call: int) -> dict[str, float]:
    x, y = data(3)
    test_step = tf.function(built.test_step)
    built.reset_metrics()
    hooks.on_test_begin()
    for begin in range(0, 3, per_call):
        hooks.on_test_batch_begin(begin)
        for step in range(begin, begin + per_call):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            logs = test_step((x[rows], y[rows]))
        hooks.on_test_batch_end(begin + per_call - 1, logs)
    hooks.on_test_end(logs)
    return dict(logs)


def by_fit(callbacks: list[Any], *, steps: int, epochs: int, per_call: int = 1) -> keras.Model:
    built = model(steps_per_execution=per_call)
    x, y = data(steps)
    built.fit(
        *(x, y),
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        validation_data=data(3),
        callbacks=callbacks,
        verbose=0,
    )
    return built


def by_loop(callbacks: list[Any], *, steps: int, epochs: int, per_call: int = 1) -> keras.Model:
    built = model()
    hooks = Callbacks(built, callbacks, steps=steps, epochs=epochs)
    loop(built, hooks, steps=steps, epochs=epochs, per_call=per_call)
    return built


def all_of_keras(folder: Path) -> list[Any]:
    """Keras's callbacks that change the course of training or write what it was."""
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping(patience=2, min_delta=0.2, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.TerminateOnNaN(),
        Recorder(),
    ]


def close(calls: list[Call]) -> list[Any]:
    return [
        (hook, at, logs if logs is None else pytest.approx(logs, rel=1e-5))
        for hook, at, logs in calls
    ]


@pytest.mark.parametrize("per_call", [1, 3])
def test_every_hook_is_called_as_fit_calls_it(per_call: int) -> None:
    fitted, looped = Recorder(), Recorder()
    by_fit([fitted], steps=6, epochs=2, per_call=per_call)

    by_loop([looped], steps=6, epochs=2, per_call=per_call)

    assert looped.calls == close(fitted.calls)
    assert len(looped.calls) == 2 + 2 * (2 + 2 * 6 // per_call + 2 + 2 * 3 // per_call)


def test_a_short_last_call_is_reported_with_its_own_last_step() -> None:
    fitted, looped = Recorder(), Recorder()
    by_fit([fitted], steps=7, epochs=1, per_call=3)
    by_loop([looped], steps=7, epochs=1, per_call=3)

    ends = [
        [at for hook, at, _ in calls if hook == "on_train_batch_end"]
        for calls in (fitted.calls, looped.calls)
    ]

    assert ends == [[2, 5, 8], [2, 5, 6]]


def test_kerass_callbacks_act_as_in_fit(tmp_path: Path) -> None:
    made = {}
    for way, run in {"fit": by_fit, "loop": by_loop}.items():
        (tmp_path / way).mkdir()
        callbacks = all_of_keras(tmp_path / way)
        made[way] = run(callbacks, steps=6, epochs=12), callbacks

    (fitted, by_keras), (looped, by_us) = made["fit"], made["loop"]
    assert looped.history.history == {
        name: pytest.approx(values, rel=1e-4) for name, values in fitted.history.history.items()
    }
    assert looped.history.epoch == fitted.history.epoch
    assert 2 < len(looped.history.epoch) < 12, "EarlyStopping must have stopped"
    assert by_us[2].stopped_epoch == by_keras[2].stopped_epoch
    for ours, keras_own in zip(looped.get_weights(), fitted.get_weights(), strict=True):
        np.testing.assert_allclose(ours, keras_own, rtol=1e-5)
    assert by_us[-1].calls == close(by_keras[-1].calls)
    files = [sorted(p.name for p in (tmp_path / way).iterdir()) for way in made]
    assert files[0] == files[1]
    heads = [(tmp_path / way / "log.csv").read_text().splitlines()[0] for way in made]
    assert heads[0] == heads[1]


@pytest.mark.parametrize(
    "kill_at", [(1, 4), *(pytest.param(at, marks=pytest.mark.soak) for at in ((2, 6), (0, 1)))]
)
def test_callbacks_go_on_after_a_kill_as_if_there_had_been_none(
    tmp_path: Path, kill_at: tuple[int, int]
) -> None:
    (tmp_path / "whole").mkdir()
    whole = all_of_keras(tmp_path / "whole")
    uninterrupted = by_loop(whole, steps=6, epochs=5)

    (tmp_path / "killed").mkdir()
    killed = model()
    before = Callbacks(killed, all_of_keras(tmp_path / "killed"), steps=6, epochs=5)
    with pytest.raises(Killed):
        loop(killed, before, steps=6, epochs=5, kill_at=kill_at)
    facts, arrays = before.state()
    before.close()
    facts = json.loads(json.dumps(facts, allow_nan=False))
    variables = [
        v.numpy()
        for v in [*killed.variables, *killed.optimizer.variables, *killed.metrics_variables]
    ]

    resumed = model()
    x, y = data(6)
    resumed.train_on_batch(x[:BATCH], y[:BATCH])  # makes its variables
    every = [*resumed.variables, *resumed.optimizer.variables, *resumed.metrics_variables]
    for variable, value in zip(every, variables, strict=True):
        variable.assign(value)
    again = all_of_keras(tmp_path / "killed")
    after = Callbacks(resumed, again, steps=6, epochs=5)
    after.set_state(facts, arrays)
    loop(resumed, after, steps=6, epochs=5, first=kill_at)

    assert resumed.history.history == uninterrupted.history.history
    for ours, theirs in zip(resumed.get_weights(), uninterrupted.get_weights(), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    logs = [(tmp_path / name / "log.csv").read_text() for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    # The resumed process begins training once more; all else is one uninterrupted sequence.
    calls = [call for call in again[-1].calls if call[0] != "on_train_begin"]
    assert calls == [call for call in whole[-1].calls if call[0] != "on_train_begin"]


def test_rows_written_after_the_checkpoint_are_not_there_twice(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    built = model()
    first = Callbacks(built, [keras.callbacks.CSVLogger(log)], steps=6, epochs=4)
    first.on_train_begin()
    first.on_epoch_end(0, {"loss": 0.5})
    facts, arrays = first.state()
    first.on_epoch_end(1, {"loss": 0.4})
    first.close()

    second = Callbacks(built, [keras.callbacks.CSVLogger(log)], steps=6, epochs=4)
    second.set_state(facts, arrays)
    second.on_train_begin()
    for epoch, loss in enumerate([0.3, 0.2], start=1):
        second.on_epoch_end(epoch, {"loss": loss})
    second.on_train_end({})

    rows = log.read_text().splitlines()
    assert [row.split(",")[:2] for row in rows[1:]] == [["0", "0.5"], ["1", "0.3"], ["2", "0.2"]]


class OwnCsv(keras.callbacks.CSVLogger):  # type: ignore[misc]  # Keras has no types
    """Keras's, with another name."""


class Database(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Reads its state from a file that it closes at the end."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = path.open("a+")

    def get_state(self) -> dict[str, Any]:
        return {"rows": self.file.tell()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.file.write(f"{epoch}\n")

    def on_train_end(self, logs: Any = None) -> None:
        self.file.close()


class Emptied(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Forgets at the end what it has counted."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1

    def on_train_end(self, logs: Any = None) -> None:
        del self.epochs


class Broken(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Has no state to give once an epoch is over."""

    def __init__(self) -> None:
        super().__init__()
        self.over = False

    def get_state(self) -> dict[str, Any]:
        if self.over:
            raise RuntimeError("the connection is closed")
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.over = True


AT_THE_END: dict[str, Callable[[Path], Any]] = {
    "CSVLogger": lambda folder: keras.callbacks.CSVLogger(folder / "log.csv"),
    "of its class": lambda folder: OwnCsv(folder / "log.csv"),
    "TensorBoard": keras.callbacks.TensorBoard,
    "a file of its own": lambda folder: Database(folder / "rows"),
    "what is dropped": lambda _: Emptied(),
    "EarlyStopping": lambda _: keras.callbacks.EarlyStopping(
        monitor="loss", patience=1, restore_best_weights=True
    ),
}


@pytest.mark.parametrize("make", AT_THE_END.values(), ids=AT_THE_END)
def test_a_finished_training_has_the_state_from_before_its_end(
    tmp_path: Path, make: Callable[[Path], Any]
) -> None:
    def train_from(state: Any) -> tuple[Any, Callbacks]:
        built = model()
        hooks = Callbacks(built, [make(tmp_path)], steps=6, epochs=3)
        if state is not None:
            hooks.set_state(*state)
        hooks.on_train_begin()
        if state is None:
            for epoch, loss in enumerate((0.3, 0.2, 0.4)):
                hooks.on_epoch_begin(epoch)
                hooks.on_epoch_end(epoch, {"loss": loss})
        before = hooks.state()
        hooks.on_train_end({"loss": 0.4})
        after = hooks.state()
        assert json.dumps(before[0], allow_nan=False) == json.dumps(after[0], allow_nan=False)
        assert before[1].keys() == after[1].keys()
        return after, hooks

    state, _ = train_from(None)
    files = {path: path.read_bytes() for path in tmp_path.glob("*") if path.is_file()}
    # As a process does that finds the training finished.
    again, _ = train_from(state)

    if make is not AT_THE_END["a file of its own"]:
        assert json.dumps(again[0]) == json.dumps(state[0])
    assert {path: path.read_bytes() for path in files} == files


def test_a_state_that_cannot_be_taken_fails_no_training_that_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = Callbacks(model(), [Broken(), keras.callbacks.TerminateOnNaN()], steps=6, epochs=1)
    hooks.on_train_begin()
    hooks.on_epoch_end(0, {"loss": 0.5})
    with pytest.raises(ConfigError, match=r"Broken\.get_state failed"):
        hooks.state()
    hooks.on_train_end({})

    facts, _ = hooks.state()
    assert "Broken" not in facts
    assert "TerminateOnNaN" in facts
    assert "training has ended, but the state of a callback is missing" in caplog.text
    assert "the connection is closed" in caplog.text


def test_tensorboard_writes_the_epochs(tmp_path: Path) -> None:
    by_loop([keras.callbacks.TensorBoard(tmp_path)], steps=3, epochs=2)

    assert list((tmp_path / "train").glob("events*"))
    assert list((tmp_path / "validation").glob("events*"))


def test_the_state_of_tensorboard_can_be_stored_and_put_back(tmp_path: Path) -> None:
    built = model()
    before = Callbacks(built, [keras.callbacks.TensorBoard(tmp_path)], steps=6, epochs=2)
    with pytest.raises(Killed):
        loop(built, before, steps=6, epochs=2, kill_at=(1, 3))
    facts, arrays = before.state()
    before.close()

    again = keras.callbacks.TensorBoard(tmp_path)
    after = Callbacks(built, [again], steps=6, epochs=2)
    after.set_state(json.loads(json.dumps(facts)), arrays)
    loop(built, after, steps=6, epochs=2, first=(1, 3))

    assert again._global_train_batch == 12


MODEL_PY = """
import keras

class Own(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.fail(logs["loss"])

    def fail(self, loss):
        raise ValueError(f"loss was {type(loss).__name__}")

def halve(epoch, rate):
    return rate / epoch

def own():
    return [Own()]

def scheduled():
    return [keras.callbacks.LearningRateScheduler(halve)]

def by_lambda():
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs["acc"])

def a_class():
    return [keras.callbacks.EarlyStopping]

def numbers():
    return [1]

def nothing():
    pass

def failing():
    raise OSError("no disk")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_callbacks.py").write_text(MODEL_PY)
    return tmp_path


OWN = "Own.on_train_batch_end failed (own_callbacks.py, line 10, in fail). Received: ValueE"
SCHEDULED = "(own_callbacks.py, line 13, in halve). Received: ZeroDivisionError: float division by"
LAMBDA = "LambdaCallback.on_epoch_end failed (own_callbacks.py, line 22, in <lambda>). Received"


@pytest.mark.parametrize(
    ("function", "said"), [("own", OWN), ("scheduled", SCHEDULED), ("by_lambda", LAMBDA)]
)
def test_the_error_of_a_callback_names_the_users_line(
    folder: Path, function: str, said: str
) -> None:
    callbacks = load_callbacks(folder, f"own_callbacks:{function}")()
    built = model()

    with pytest.raises(ConfigError, match=re.escape(said)):
        loop(built, Callbacks(built, callbacks, steps=6, epochs=1), steps=6, epochs=1)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("a_class", "Received: the class EarlyStopping. Call it."),
        ("numbers", "must return a list of keras.callbacks.Callback. Received: a list with int."),
        ("nothing", "Received: NoneType."),
        ("failing", "train.callbacks: own_callbacks:failing failed (own_callbacks.py"),
    ],
)
def test_callbacks_that_are_not_a_list_are_refused(folder: Path, function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_callbacks(folder, f"own_callbacks:{function}")()


def test_a_rate_that_follows_a_schedule_cannot_be_set_by_a_callback() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    built = model(learning_rate=schedule)
    setter = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1)

    with pytest.raises(ConfigError, match="created with a `LearningRateSchedule` object"):
        loop(built, Callbacks(built, [setter], steps=6, epochs=1), steps=6, epochs=1)


def test_backup_and_restore_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must not contain BackupAndRestore"):
        Callbacks(model(), [keras.callbacks.BackupAndRestore(tmp_path)], steps=1, epochs=1)


def test_workers_that_are_not_the_chief_write_nothing(tmp_path: Path) -> None:
    built = model()
    callbacks = [keras.callbacks.TensorBoard(tmp_path / "board"), *all_of_keras(tmp_path)]
    hooks = Callbacks(built, callbacks, steps=6, epochs=2, is_chief=False)

    loop(built, hooks, steps=6, epochs=2)

    assert list(tmp_path.iterdir()) == []
    assert len(built.history.epoch) == 2
    assert "learning_rate" in built.history.history


@pytest.mark.parametrize(
    ("callback", "every_step"),
    [
        (keras.callbacks.EarlyStopping(), False),
        (keras.callbacks.TerminateOnNaN(), False),
        (keras.callbacks.ModelCheckpoint("a.keras"), False),
        (keras.callbacks.ModelCheckpoint("a.keras", save_freq=5), True),
        (keras.callbacks.TensorBoard("board"), False),
        (keras.callbacks.TensorBoard("board", update_freq=5), True),
        (keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: None), True),
        (Recorder(), True),
    ],
)
def test_only_callbacks_that_need_it_get_one_step_a_call(
    callback: Any, every_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    hooks = Callbacks(model(), [callback], steps=6, epochs=1)

    assert hooks.has_batch_hooks is every_step


def test_state_of_a_callback_that_cannot_be_stored_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Own(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_begin(self, logs: Any = None) -> None:
            self.connection = object()
            self.seen = 3

    hooks = Callbacks(model(), [Own()], steps=1, epochs=1)
    hooks.on_train_begin()
    facts, _ = hooks.state()
    hooks.state()

    assert facts["Own"]["attributes"]["seen"] == 3
    said = [r.getMessage() for r in caplog.records if "connection" in r.getMessage()]
    assert len(said) == 1
    assert "a resumed run resets connection of Own" in said[0]


def test_two_callbacks_of_one_class_keep_their_own_state() -> None:
    def two() -> list[Any]:
        return [keras.callbacks.EarlyStopping(m, mode="min") for m in ("val_loss", "val_mae")]

    hooks = Callbacks(model(), two(), steps=1, epochs=3)
    hooks.on_train_begin()
    hooks.on_epoch_end(0, {"val_loss": 1.0, "val_mae": 2.0})
    facts, arrays = hooks.state()
    after = two()
    resumed = Callbacks(model(), after, steps=1, epochs=3)
    resumed.set_state(facts, arrays)
    resumed.on_train_begin()

    assert [callback.best for callback in after] == [1.0, 2.0]


def test_a_state_can_be_put_back_within_a_run() -> None:
    stopping = keras.callbacks.EarlyStopping(mode="min")
    hooks = Callbacks(model(), [stopping], steps=1, epochs=3)
    hooks.on_train_begin()
    hooks.on_epoch_end(0, {"val_loss": 1.0})
    state = hooks.state()
    hooks.on_epoch_end(1, {"val_loss": 0.5})

    hooks.set_state(*state)

    assert stopping.best == 1.0
    assert hooks.history.history == {"val_loss": [1.0]}
