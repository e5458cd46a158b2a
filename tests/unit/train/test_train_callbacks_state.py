import json
from collections import defaultdict, deque
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.errors import ConfigError
from stoker.train.callbacks.state import capture, decode, encode, restore, settings_of

scalars = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def there_and_back(value: Any) -> Any:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    stored = json.loads(json.dumps(encode(value, key="k", arrays=arrays), allow_nan=False))
    return decode(stored, arrays)


@given(values)
def test_a_value_comes_back_equal_and_of_its_own_type(value: Any) -> None:
    back = there_and_back(value)

    assert back == value
    assert repr(back) == repr(value)


def test_a_nan_comes_back() -> None:
    assert np.isnan(there_and_back({"loss": [float("nan")]})["loss"][0])


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16", "U3", "float16"])
def test_arrays_come_back_bit_by_bit(dtype: str) -> None:
    array = (
        np.arange(6).reshape(2, 3).astype(tf.dtypes.as_dtype(dtype).as_numpy_dtype)
        if dtype != "U3"
        else np.array(["a", "xyz"])
    )

    back = there_and_back([array])[0]

    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


def test_a_numpy_scalar_stays_one() -> None:
    back = there_and_back(np.float32(0.1))

    assert isinstance(back, np.float32)
    assert back == np.float32(0.1)


def test_stored_arrays_are_copies() -> None:
    array, arrays = np.zeros(3), dict[str, Any]()
    encode(array, key="k", arrays=arrays)
    array[:] = 1

    assert not arrays["k"].any()


@pytest.mark.parametrize("value", [object(), [object()], np.array([object()]), b"bytes", print])
def test_what_cannot_be_stored_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode(value, key="k", arrays={})


class Remembering(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def __init__(self, patience: int = 3) -> None:
        super().__init__()
        self.patience = patience
        self.best = float("inf")
        self.window: deque[float] = deque(maxlen=2)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.handle = open  # the constructor creates a function again
        self.worker: object = object()


def moved(
    old: keras.callbacks.Callback, new: keras.callbacks.Callback, *, settings: dict[str, Any]
) -> list[str]:
    arrays: dict[str, Any] = {}
    facts, lost = capture(old, settings=settings, key="C", arrays=arrays)
    restore(new, json.loads(json.dumps(facts)), settings=settings_of(new), arrays=arrays)
    return lost


def test_attributes_come_back_and_containers_keep_their_kind() -> None:
    old, new = Remembering(), Remembering()
    settings = settings_of(old)
    old.best = 0.5
    old.window.extend([1.0, 2.0, 3.0])
    old.counts["a"] += 2

    lost = moved(old, new, settings=settings)

    assert new.best == 0.5
    assert new.window == deque([2.0, 3.0])
    assert new.window.maxlen == 2
    new.counts["b"] += 1
    assert new.counts == {"a": 2, "b": 1}
    assert lost == ["worker"]


def test_a_setting_that_the_user_changed_since_is_the_new_one() -> None:
    old, new = Remembering(patience=3), Remembering(patience=5)
    settings = settings_of(old)
    old.best = 0.5

    moved(old, new, settings=settings)

    assert (new.patience, new.best) == (5, 0.5)


def test_own_get_state_and_set_state_are_used() -> None:
    class Own(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            self.seen = np.zeros(2)

        def get_state(self) -> dict[str, Any]:
            return {"twice": self.seen * 2}

        def set_state(self, state: dict[str, Any]) -> None:
            self.seen = state["twice"] / 2

    old, new = Own(), Own()
    old.seen = np.array([1.0, 2.0])
    moved(old, new, settings={})

    assert new.seen.tolist() == [1.0, 2.0]


def test_an_own_get_state_that_returns_something_else_is_named() -> None:
    class Own(Remembering):
        def get_state(self) -> object:
            return {"model": object()}

        def set_state(self, state: object) -> None:
            pass

    with pytest.raises(ConfigError, match=r"Own\.get_state must return numbers"):
        capture(Own(), settings={}, key="Own", arrays={})


def test_a_direction_that_keras_found_is_not_found_twice() -> None:
    # Keras turns the sign of min_delta when it first learns the direction of the metric.
    old = keras.callbacks.EarlyStopping("val_loss", min_delta=0.1)
    settings = settings_of(old)
    old.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    old.on_train_begin()
    old.on_epoch_end(0, {"val_loss": 1.0})
    new = keras.callbacks.EarlyStopping("val_loss", min_delta=0.1)
    new.set_model(old.model)
    new.on_train_begin()

    moved(old, new, settings=settings)
    for callback in (old, new):
        callback.on_epoch_end(1, {"val_loss": 0.95})

    assert new.min_delta == old.min_delta == -0.1
    assert (new.best, new.wait) == (old.best, old.wait) == (1.0, 1)
