"""Copies everything that a training step can change to named arrays on the host, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.train.checkpoints.seeds import keras_seeds

Arrays = Mapping[str, NDArray[Any]]
"""Name -> values."""

ROWS = "@replicas"
"""Suffix of the name of an array that contains one row per replica."""

_WORD_BYTES = 4
"""Size of an integer type that every implementation of collectives can gather, bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    variable: Any
    """A TensorFlow variable, on one device or with a copy on each replica."""

    by_replica: bool
    """Whether the replicas can have different values."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.variable.dtype.as_numpy_dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.variable.shape)

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def is_sum(self) -> bool:
        """Whether the variable's value is the sum of the replicas' values."""
        on_read = self.variable.synchronization is tf.VariableSynchronization.ON_READ
        return on_read and self.variable.aggregation is tf.VariableAggregation.SUM


class TrainingState:
    """The variables of a training run, with stable names.

    A name starts with its group: `model/`, `optimizer/`, `metrics/`, `seeds/`, or a group of `extras`.
    Create the object once, after model, optimizer and metrics are built. With several workers, all
    of them must call `capture` and `restore` in the same order.
    """

    def __init__(
        self, model: keras.Model, *, extras: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """Collect the variables.

        Args:
            model: The compiled model; the model and its optimizer are built.
            extras: Group -> additional variables: moving averages, sums, counters.
        """
        self.strategy = _strategy(model)
        self.seeds = keras_seeds(self.strategy)
        groups: dict[str, Sequence[Any]] = {
            "model": model.variables,
            "optimizer": model.optimizer.variables,
            "metrics": model.metrics_variables,
            "seeds": [self.seeds.state],
            **(extras or {}),
        }
        self._groups = tuple(groups)
        self._slots = _slots(groups)
        self._gathered = {
            name: slot
            for name, slot in self._slots.items()
            if slot.by_replica and self.strategy.num_replicas_in_sync > 1
        }
        # A TPU runs only graphs, so the values are gathered in a `tf.function`.
        self._gather = tf.function(self._gather_rows, autograph=False)
        self._ids = tf.function(lambda: self.strategy.run(_replica_id), autograph=False)

    def capture(self) -> dict[str, NDArray[Any]]:
        """Copy every value to the host.

        Returns:
            Name -> value. If the values of the replicas differ: name + `@replicas` -> [replicas, ...].
        """
        return dict(self._rows()) | {
            name: self._components(slot)[0].numpy()
            for name, slot in self._slots.items()
            if name not in self._gathered
        }

    def restore(self, arrays: Arrays) -> None:
        """Restore captured values on every replica of this worker.

        Args:
            arrays: The result of `capture`; arrays of other groups are ignored. The number of replicas
                may differ from now: then sums keep their total, and other values are those of the first
                replica.

        Raises:
            DataError: The arrays belong to another model; nothing was changed.
        """
        self._refuse_another_model(arrays)
        replicas = self.strategy.num_replicas_in_sync
        mine = _local(self.strategy, self._ids())
        for name, slot in self._slots.items():
            rows = arrays.get(name + ROWS)
            values = _spread(arrays[name][None] if rows is None else rows, slot, replicas)
            components = self._components(slot)
            for replica, component in zip(mine, components, strict=False):
                component.assign(values[int(replica)])

    def _components(self, slot: _Slot) -> tuple[Any, ...]:
        return _local(self.strategy, slot.variable)

    def _rows(self) -> Iterator[tuple[str, NDArray[Any]]]:
        if not self._gathered:
            return
        packed = _local(self.strategy, self._gather())[0].numpy()
        raw, at = packed.view(np.uint8), 0
        for name, slot in self._gathered.items():
            part = np.ascontiguousarray(raw[:, at : at + slot.nbytes])
            rows = part.view(slot.dtype).reshape(len(raw), *slot.shape)
            at += slot.nbytes
            same = not slot.is_sum and all(np.array_equal(part[0], other) for other in part[1:])
            yield (name, rows[0]) if same else (name + ROWS, rows)

    def _gather_rows(self) -> Any:
        return self.strategy.run(self._gather_row)

    def _gather_row(self) -> tf.Tensor:
        # Gather all values with one collective, as bytes, so that no arithmetic changes them.
        row = tf.concat([_bytes(slot.variable) for slot in self._gathered.values()], axis=0)
        size = sum(slot.nbytes for slot in self._gathered.values())
        row = tf.pad(row, [[0, -size % _WORD_BYTES]])
        words = tf.bitcast(tf.reshape(row, [1, -1, _WORD_BYTES]), tf.int32)
        return tf.distribute.get_replica_context().all_gather(words, axis=0)

    def _refuse_another_model(self, arrays: Arrays) -> None:
        wrong = list(_differences(self._slots, arrays, self._groups))
        if wrong:
            raise DataError(
                "a checkpoint can be restored only into the model that it was written from",
                got=Plain("; ".join(wrong[:3]) + f" ({len(wrong)} in all)"),
                fix="Restore the old model, or train the new one in a new run.",
            )


def _differences(
    slots: Mapping[str, _Slot], arrays: Arrays, groups: Sequence[str]
) -> Iterator[str]:
    stored = {
        name.removesuffix(ROWS): array.shape[1:] if name.endswith(ROWS) else array.shape
        for name, array in arrays.items()
        if name.partition("/")[0] in groups
    }
    dtypes = {name.removesuffix(ROWS): array.dtype for name, array in arrays.items()}
    for name, slot in slots.items():
        now = f"{name} is {slot.dtype.name} {list(slot.shape)}"
        if name not in stored:
            yield f"{now} and the checkpoint has none"
        elif (stored[name], dtypes[name]) != (slot.shape, slot.dtype):
            yield f"{now} and the checkpoint's is {dtypes[name].name} {list(stored[name])}"
    yield from (f"the model has no {name}" for name in stored if name not in slots)


def _strategy(model: keras.Model) -> tf.distribute.Strategy:
    for variable in model.variables:
        if isinstance(variable.value, tf.distribute.DistributedValues):
            return variable.value.distribute_strategy
    return tf.distribute.get_strategy()


def _slots(groups: Mapping[str, Sequence[Any]]) -> dict[str, _Slot]:
    slots: dict[str, _Slot] = {}
    seen: set[int] = set()
    for group, variables in groups.items():
        for variable in variables:
            value = variable.value if isinstance(variable, keras.Variable) else variable
            if id(value) in seen:
                continue
            seen.add(id(value))
            name = _free(f"{group}/{_path(variable, group)}", slots)
            slots[name] = _Slot(variable=value, by_replica=_can_differ(value, group))
    return slots


def _path(variable: Any, group: str) -> str:
    if group == "seeds":
        # Keras names its seed generator after the code that first used it, so use a fixed name.
        return "keras"
    path = getattr(variable, "path", None) or variable.name
    return str(path).removesuffix(":0")


def _free(name: str, used: Mapping[str, Any]) -> str:
    number = 1
    while (free := name if number == 1 else f"{name}#{number}") in used:
        number += 1
    return free


def _can_differ(value: Any, group: str) -> bool:
    if not isinstance(value, tf.distribute.DistributedValues):
        return False
    if value.synchronization is tf.VariableSynchronization.ON_READ:
        return True
    # Keras lets each replica write its own copy of non-trainable variables, such as BatchNorm's means
    # and seeds.
    return group in ("model", "metrics", "seeds") and not value.trainable


def _spread(rows: NDArray[Any], slot: _Slot, replicas: int) -> Sequence[NDArray[Any]]:
    if len(rows) == replicas:
        return list(rows)
    if slot.is_sum:
        total = rows.sum(axis=0, dtype=rows.dtype)
        return [total, *[np.zeros_like(total)] * (replicas - 1)]
    return [rows[0]] * replicas


def _replica_id() -> tf.Tensor:
    return tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)


def _local(strategy: tf.distribute.Strategy, value: Any) -> tuple[Any, ...]:
    return tuple(strategy.experimental_local_results(value))


def _bytes(variable: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(variable)
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    return tf.reshape(tf.bitcast(value, tf.uint8), [-1])


def restore_model(model: keras.Model, arrays: Arrays, *, average: str) -> None:
    """Put the weights of a checkpoint into a model that will be exported.

    Args:
        model: A built model; it need not be compiled.
        arrays: The arrays of a checkpoint.
        average: Group of the moving average of the trainable weights; the average is used if it exists.

    Raises:
        DataError: The arrays belong to another model; nothing was changed.
    """
    slots = _slots({"model": model.variables})
    wrong = list(_differences(slots, arrays, ["model"]))
    if wrong:
        raise DataError(
            "a checkpoint can be restored only into the model that it was written from",
            got=Plain("; ".join(wrong[:3]) + f" ({len(wrong)} in all)"),
            fix="Run `stoker train` again.",
        )
    for name, slot in slots.items():
        rows = arrays.get(name + ROWS)
        slot.variable.assign(arrays[name] if rows is None else rows[0])
    for index, variable in enumerate(model.trainable_variables):
        averaged = arrays.get(f"{average}/{average}_{index}")
        if averaged is not None:
            variable.assign(averaged)
