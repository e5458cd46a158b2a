"""Records the stages of every `tf.data.Dataset`: the call that created each, its arguments, and its line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from .places import Place, who_called
from .watch import FACTS, wrap

KEY = "stoker_stage"
"""Attribute of a dataset that holds its last stage."""

METHODS = (
    "map", "batch", "padded_batch", "ragged_batch", "unbatch", "rebatch", "shuffle", "repeat",
    "take", "skip", "take_while", "prefetch", "cache", "interleave", "flat_map", "filter", "shard",
    "concatenate", "window", "group_by_window", "bucket_by_sequence_length", "snapshot", "enumerate",
    "scan", "unique", "apply", "with_options", "ignore_errors", "rejection_resample",
)  # fmt: skip
"""Methods of a dataset that return a new dataset."""

SOURCES = (
    "from_tensor_slices", "from_tensors", "from_generator", "list_files", "range", "zip",
    "random", "sample_from_datasets", "choose_from_datasets", "load", "counter",
)  # fmt: skip
"""Static methods of `tf.data.Dataset` that return a dataset."""

READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset")
"""Classes of `tf.data` whose instances are datasets that read files."""

_KEPT = (
    "num_parallel_calls",
    "buffer_size",
    "batch_size",
    "cycle_length",
    "count",
    "deterministic",
)
"""Names of the arguments that are recorded; of a value that is not a number, only its type."""

_ARGUMENTS = {
    "map": ("map_func", "num_parallel_calls"),
    "shuffle": ("buffer_size",),
    "batch": ("batch_size", "drop_remainder", "num_parallel_calls"),
    "padded_batch": ("batch_size",),
    "prefetch": ("buffer_size",),
    "repeat": ("count",),
    "cache": ("filename",),
    "interleave": ("map_func", "cycle_length", "block_length", "num_parallel_calls"),
}
"""Method -> names of its positional arguments."""

_ids = itertools.count(1)


class Stage:
    """One call that creates a dataset."""

    def __init__(
        self,
        kind: str,
        *,
        at: tuple[Place, str],
        arguments: dict[str, Any],
        inputs: tuple[Stage, ...],
    ) -> None:
        self.id = next(_ids)
        self.kind = kind
        (self.place, self.maker) = at
        self.arguments, self.inputs = arguments, inputs
        self.python_calls: list[Place] = []
        """The lines of `tf.py_function` and `tf.numpy_function` in its function."""
        self.random = False
        """Whether it uses random numbers."""
        self.element_bytes: int | None = None
        self.row_bytes: int | None = None
        """Bytes per row, if the number of rows of an element is unknown but all other dimensions are known."""
        self.dtypes: list[str] = []
        self.operations: list[str] = []
        """Types of the TensorFlow operations in a map's function."""
        self.cardinality = -2

    def as_json(self) -> dict[str, Any]:
        """Return the stage as facts."""
        names = (
            "id", "kind", "place", "maker", "arguments", "python_calls", "random", "element_bytes",
            "row_bytes", "dtypes", "operations", "cardinality",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


_made: list[Stage] = []
_making: list[Stage] = []
"""At most one entry: the stage whose call is running. Datasets that TensorFlow creates inside it are not recorded."""

MAX_STAGES = 500
"""Maximum number of recorded stages (10 times as many for the user's own code): a script may create any number."""


def install(tf: Any) -> None:
    """Watch the creation of datasets."""
    for name in METHODS:
        wrap(tf.data.Dataset, name, partial(_makes, tf, name, is_method=True))
    for name in SOURCES:
        wrap(tf.data.Dataset, name, partial(_makes, tf, name, is_method=False))
    for name in READERS:
        wrap(getattr(tf.data, name, None), "__init__", partial(_makes, tf, name, is_method=True))
    for name in ("py_function", "numpy_function"):
        wrap(tf, name, _python_call)
    _watch_randomness(tf)


def made() -> list[dict[str, Any]]:
    """Return every recorded stage as facts."""
    return [stage.as_json() for stage in list(_made)]


def of(dataset: Any) -> Stage | None:
    """The last stage of a dataset; None if its creation was not watched."""
    return getattr(dataset, KEY, None)


def chain(stage: Stage | None) -> list[Stage]:
    """The stage and all stages that it reads, sources last."""
    found: list[Stage] = []
    waiting = [stage] if stage is not None else []
    while waiting:
        each = waiting.pop(0)
        if each not in found:
            found.append(each)
            waiting.extend(each.inputs)
    return found


def has_cache(chain: list[Stage], *, of_passes: bool = False) -> bool:
    """Whether a dataset has a cache that its first pass fills and later passes read.

    Args:
        chain: The stages of the dataset, last stage first.
        of_passes: Do not count a cache below a `repeat`: a single pass over such a dataset already reads the cache.
    """
    kinds = [stage.kind for stage in chain]
    caches = [number for number, kind in enumerate(kinds) if kind in ("cache", "snapshot")]
    return bool(caches) and not (of_passes and "repeat" in kinds[: caches[-1]])


def mark_random() -> None:
    """Mark the stage that is being created, if any, as a stage that uses random numbers."""
    if _making:
        _making[-1].random = True


def _makes(
    tf: Any, kind: str, original: Callable[..., Any], *, is_method: bool
) -> Callable[..., Any]:
    """Return a wrapper of a function that returns a dataset, or of a constructor of a dataset."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _making or FACTS.measuring or not tf.executing_eagerly():
            return original(*args, **kwargs)
        inputs = [*args, *kwargs.values()]
        stage = _begin(kind, args[1:] if is_method else args, kwargs, datasets=inputs)
        try:
            result = original(*args, **kwargs)
        finally:
            _making.clear()
        _finish(tf, stage, args[0] if result is None else result)
        return result

    return call


def _begin(
    kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, datasets: list[Any]
) -> Stage | None:
    stage = None
    with FACTS.guarded():
        known = dict(zip(_ARGUMENTS.get(kind, ()), args, strict=False)) | kwargs
        kept = {name: _number(known[name]) for name in _KEPT if known.get(name) is not None}
        if kind == "cache":
            kept["in_memory"] = not known.get("filename")
        inputs = tuple(
            stage
            for each in _spread(datasets)
            if isinstance(stage := getattr(each, KEY, None), Stage)
        )
        stage = Stage(kind, at=who_called(), arguments=kept, inputs=inputs)
        _making.append(stage)
    return stage


def _spread(values: list[Any]) -> list[Any]:
    """The values; tuples, lists and dicts among them are replaced by their items, one level deep."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            found.extend(value.values())
        elif isinstance(value, (list, tuple)):
            # A list may contain a million paths, so only its first items are searched: a list of datasets is short.
            found.extend(value[:64])
        else:
            found.append(value)
    return found


def _number(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    try:
        return int(value)
    except (TypeError, ValueError):
        return str(type(value).__name__)


def _finish(tf: Any, stage: Stage | None, result: Any) -> None:
    if stage is None:
        return
    with FACTS.guarded():
        # Keras creates a dozen stages for each call of fit: they must not displace the user's stages.
        if len(_made) < (10 * MAX_STAGES if stage.maker == "user" else MAX_STAGES):
            _made.append(stage)
        FACTS.changes += 1
        setattr(result, KEY, stage)
        parts = [each for each in tf.nest.flatten(result.element_spec) if hasattr(each, "dtype")]
        stage.dtypes = [part.dtype.name for part in parts]
        if len(parts) == len(tf.nest.flatten(result.element_spec)):
            stage.element_bytes = _bytes(parts, lambda shape: shape)
            stage.row_bytes = _bytes(parts, _row)
        stage.operations = _operations(result)
        if stage.kind != "from_generator":
            stage.cardinality = int(result.cardinality().numpy())


def _operations(dataset: Any) -> list[str]:
    """Types of the operations in a map's function; empty if they cannot be found."""
    function = getattr(getattr(dataset, "_map_func", None), "function", None)
    graph = getattr(function, "graph", None)
    return [] if graph is None else sorted({each.type for each in graph.get_operations()})


def _bytes(parts: list[Any], sized: Callable[[Any], Any]) -> int | None:
    """Total bytes of the parts, after `sized` has converted their shapes; None if unknown."""
    size = 0
    for part in parts:
        shape: Any = None if part.shape is None else sized(part.shape)
        is_open = shape is None or not shape.is_fully_defined()
        if is_open or part.dtype.name in ("string", "variant"):
            return None
        size += int(shape.num_elements()) * int(part.dtype.size)
    return size


def _row(shape: Any) -> Any:
    """The shape without the first axis if the number of rows is unknown; else None."""
    return shape[1:] if shape.rank and shape[0] is None else None


def _python_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _making:
            with FACTS.guarded():
                _making[-1].python_calls.append(who_called()[0])
        return original(*args, **kwargs)

    return call


def _watch_randomness(tf: Any) -> None:
    for module in (tf.random, tf.image):
        for name in dir(module):
            is_random = (
                module is tf.random or "random" in name or name == "sample_distorted_bounding_box"
            )
            value = getattr(module, name)
            if is_random and callable(value) and not isinstance(value, type) and name[0].islower():
                wrap(module, name, _marks_random)
    for name in ("uniform", "normal", "uniform_full_int", "truncated_normal", "make_seeds"):
        wrap(tf.random.Generator, name, _marks_random)


def _marks_random(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        mark_random()
        return original(*args, **kwargs)

    return call
