"""Converts the state of a callback to JSON and arrays and back, so that a resumed run continues with it."""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain

Arrays = MutableMapping[str, NDArray[Any]]
"""Key -> array; JSON values refer to arrays by these keys."""

_OF_THE_RUN = frozenset({"_model", "params"})
"""Attributes that `set_model` and `set_params` set in every process."""

_TENSORBOARD = frozenset(
    {"_writers", "_prev_summary_state", "_summary_module", "_should_write_train_graph"}
    | {"_is_tracing", "_should_trace", "_profiler_started", "_batch_trace_context"}
    | {"_previous_epoch_iterations", "_log_write_dir", "_train_dir", "_val_dir"}
    | {"_train_step", "_val_step"}
)
"""Attributes of TensorBoard's callback that belong to the process: open files and a running profile."""

_CSV = frozenset({"csv_file", "writer", "append", "append_header"})


def settings_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return the scalar attributes that a new callback has after its constructor, as JSON.

    A resumed run does not restore an attribute for which the user has changed this initial value.
    """
    return {
        name: encode(value, key="", arrays={})
        for name, value in vars(callback).items()
        if type(value) in (bool, int, float, str)
    }


def capture(
    callback: keras.callbacks.Callback, *, settings: Mapping[str, Any], key: str, arrays: Arrays
) -> tuple[dict[str, Any], list[str]]:
    """Return the state of a callback, and the names of attributes that cannot be stored.

    Args:
        callback: The callback; its own `get_state` and `set_state` are used, if it has both.
        settings: The result of `settings_of` for the new callback.
        key: Prefix of the keys of its arrays.
        arrays: Receives copies of its arrays, which can be written while training continues.

    Raises:
        ConfigError: Its `get_state` returned something other than numbers, strings, arrays, and lists
            and dicts of these.
    """
    if _has_own(callback):
        return {"own": _own_state(callback, key=key, arrays=arrays)}, []
    attributes, lost = {}, []
    for name, value in _remembered(callback).items():
        try:
            attributes[name] = encode(_plain(value), key=f"{key}/{name}", arrays=arrays)
        except TypeError:
            if not callable(value):
                lost.append(name)
    facts: dict[str, Any] = {"settings": dict(settings), "attributes": attributes}
    written = getattr(callback, "csv_file", None)
    if isinstance(callback, keras.callbacks.CSVLogger) and isinstance(written, io.TextIOBase):
        # A closed file is complete. Of an open one, store the length, to remove later rows in `restore`.
        facts |= {} if written.closed else {"written": written.tell()}
    return facts, [] if _is_builtin(callback) else lost


def restore(
    callback: keras.callbacks.Callback,
    facts: Mapping[str, Any],
    *,
    settings: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
) -> None:
    """Restore the result of `capture`; call it after `on_train_begin`."""
    if "own" in facts:
        callback.set_state(decode(facts["own"], arrays))
        return
    for name, stored in facts["attributes"].items():
        was = facts["settings"].get(name)
        if name not in settings or settings[name] == was:
            _put(callback, name, decode(stored, arrays))
    written = getattr(callback, "csv_file", None)
    if "written" in facts and isinstance(written, io.TextIOBase):
        # Remove the rows after the checkpoint: they will be written again.
        written.seek(min(facts["written"], written.seek(0, io.SEEK_END)))
        written.truncate()


def encode(value: Any, *, key: str, arrays: Arrays) -> Any:
    """Convert a value to JSON; its arrays go to `arrays`, with keys that start with `key`.

    Raises:
        TypeError: It contains something other than None, numbers, strings, arrays, functions of
            keras.ops, and lists, tuples, sets and dicts of these.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(np.array(value), key=key, arrays=arrays) | (
            {"scalar": True} if isinstance(value, np.generic) else {}
        )
    if kind is dict:
        pairs = [[name, part] for name, part in value.items()]
        return {"$dict": encode(pairs, key=key, arrays=arrays)}
    if kind in (list, tuple, set):
        parts = [encode(v, key=f"{key}/{i}", arrays=arrays) for i, v in enumerate(value)]
        return parts if kind is list else {f"${kind.__name__}": parts}
    name = getattr(value, "__name__", "")
    if callable(value) and getattr(keras.ops, name, None) is value:
        return {"$ops": name}
    raise TypeError(f"{key}: {kind.__name__}")


def decode(stored: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Convert the result of `encode` back to the value."""
    if isinstance(stored, list):
        return [decode(part, arrays) for part in stored]
    if not isinstance(stored, dict):
        return stored
    if "$array" in stored:
        array = np.array(arrays[stored["$array"]]).astype(np.dtype(stored["dtype"]))
        return array[()] if "scalar" in stored else array
    ((kind, inner),) = stored.items()
    if kind == "$float":
        return float(inner)
    if kind == "$ops":
        return getattr(keras.ops, inner)
    made: Any = {"$dict": dict, "$tuple": tuple, "$set": set}[kind]
    return made(decode(inner, arrays))


def _encode_array(array: NDArray[Any], *, key: str, arrays: Arrays) -> dict[str, Any]:
    if array.dtype.hasobject:
        raise TypeError(f"{key}: an array of objects")
    # NumPy's file format supports only its own dtypes; bfloat16 and float8 fit into float32.
    own = array.dtype.isbuiltin == 1 or array.dtype.kind in "USMm"
    arrays[key] = array if own else array.astype(np.float32)
    return {"$array": key, "dtype": array.dtype.str if own else array.dtype.name}


def _remembered(callback: keras.callbacks.Callback) -> dict[str, Any]:
    excluded = _OF_THE_RUN
    if isinstance(callback, keras.callbacks.TensorBoard):
        excluded |= _TENSORBOARD
    if isinstance(callback, keras.callbacks.CSVLogger):
        excluded |= _CSV
    return {name: value for name, value in vars(callback).items() if name not in excluded}


def _plain(value: Any) -> Any:
    # A defaultdict or a bounded deque is filled in place, so its type need not be stored.
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, deque) else value


def _put(callback: keras.callbacks.Callback, name: str, value: Any) -> None:
    present = vars(callback).get(name)
    if isinstance(present, dict) and isinstance(value, dict):
        present.clear()
        present.update(value)
    elif isinstance(present, list | deque) and isinstance(value, list):
        present.clear()
        present.extend(value)
    else:
        setattr(callback, name, value)


def _has_own(callback: keras.callbacks.Callback) -> bool:
    return all(callable(getattr(callback, name, None)) for name in ("get_state", "set_state"))


def _own_state(callback: keras.callbacks.Callback, *, key: str, arrays: Arrays) -> Any:
    try:
        return encode(callback.get_state(), key=key, arrays=arrays)
    except TypeError as error:
        raise ConfigError(
            f"{type(callback).__name__}.get_state must return numbers, text, arrays, and lists and"
            " dicts of these",
            got=Plain(str(error)),
        ) from None


def _is_builtin(callback: keras.callbacks.Callback) -> bool:
    return type(callback).__module__.partition(".")[0] == "keras"
