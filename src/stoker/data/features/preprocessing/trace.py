"""The state of one trace of the user's function: its analyzer calls, and what depends on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain

Kind = Literal["moments", "range", "quantiles", "vocabulary", "classes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyFile:
    """A computed vocabulary: one term per line; the line number is the id."""

    name: str
    """Name of the file, and of the asset."""

    path: str
    """Its path while the transform is built."""

    terms: int
    """Number of lines."""

    escaped: bool = False
    """Whether line breaks and backslashes in terms are escaped, because a term has a line break."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One analyzer call, in the order in which the function makes them."""

    kind: Kind
    """The analyzer."""

    tensor: tf.Tensor
    """Its input, over all rows of the training split."""

    params: dict[str, Any]
    """Its other arguments."""

    placeholder: tf.Tensor
    """Scalar float64 placeholder for the result until it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """The ids in an integer tensor."""

    num_buckets: int
    """Ids are below this, and at least 0."""

    vocabulary: str | None = None
    """The vocabulary that they come from."""

    terms: int | None = None
    """Number of terms of that vocabulary; higher ids are out-of-vocabulary buckets."""


class Trace:
    """The state of one trace."""

    def __init__(
        self,
        graph: tf.Graph,
        *,
        answers: Sequence[Any],
        requests: Sequence[tuple[Kind, dict[str, Any]]],
        objects: list[Any],
    ) -> None:
        """Start without calls.

        Args:
            graph: The graph that is being built.
            answers: Result of the first, second ... call; None or beyond the end: not known yet.
            requests: The calls of the previous trace, in order; empty in the first.
            objects: Tables and other trackables of earlier traces, in the order of their creation;
                reused and extended.
        """
        self.graph = graph
        self.calls: list[Call] = []
        self.domains: dict[Any, Domain] = {}
        self.vocabularies: dict[Any, int] = {}
        self._answers = answers
        self._earlier = requests
        self._objects = objects
        self._made = 0
        self._index: dict[Any, int] = {}

    def request(self, kind: Kind, tensor: tf.Tensor, **params: Any) -> int:
        """Add an analyzer call; the same call twice counts once.

        Returns:
            The call's index.

        Raises:
            ConfigError: the previous trace made another call at this point.
        """
        key = (kind, tensor.ref(), tuple(sorted(params.items())))
        if key not in self._index:
            index = self._index[key] = len(self.calls)
            if self._earlier and self._earlier[index : index + 1] != [(kind, params)]:
                raise changed_requests()
            placeholder = tf.compat.v1.placeholder(tf.float64, [], name=f"answer_{index}")
            self.calls.append(
                Call(kind=kind, tensor=tensor, params=params, placeholder=placeholder)
            )
        return self._index[key]

    def answer(self, index: int) -> Any:
        """Return the result of a call; None while it is not known."""
        return self._answers[index] if index < len(self._answers) else None

    def track(self, factory: Any) -> Any:
        """Create a table outside the graph, once, and keep it for saving."""
        if self._made == len(self._objects):
            with tf.init_scope():
                self._objects.append(factory())
        self._made += 1
        return self._objects[self._made - 1]

    def domain(self, tensor: tf.Tensor) -> Domain | None:
        """Return the ids in a tensor, also after operations that only change its shape or type."""
        while tensor.ref() not in self.domains and tensor.op.type in _TRANSPARENT_OPS:
            tensor = tensor.op.inputs[_TRANSPARENT_OPS[tensor.op.type]]
        return self.domains.get(tensor.ref())


_TRANSPARENT_OPS = {
    **dict.fromkeys(("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze"), 0),
    "RaggedTensorToTensor": 1,
}
"""Operation -> which of its inputs has the values."""

_ACTIVE: ContextVar[Trace | None] = ContextVar("stoker_trace", default=None)


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Make a trace the current one for the functions of `stoker.transform`."""
    token = _ACTIVE.set(trace)
    try:
        yield trace
    finally:
        _ACTIVE.reset(token)


def active() -> Trace | None:
    """Return the current trace, if any."""
    return _ACTIVE.get()


def required(function: str, tensor: object) -> Trace:
    """Return the current trace, for a function that needs an analyzer.

    Raises:
        ConfigError: there is none, or the argument is not a tensor of its graph.
    """
    trace = active()
    if trace is None:
        raise ConfigError(
            f"stoker.transform.{function} must be called inside preprocessing_fn",
            got=Plain("a call while no transform is being built"),
            fix="It needs a full pass over the training split: name the function that calls it "
            "under `preprocessing`.",
        )
    if not isinstance(tensor, tf.Tensor) or tensor.dtype == tf.resource:
        raise ConfigError(
            f"stoker.transform.{function} must be given a dense tensor",
            got=Plain(type(tensor).__name__),
            fix="Turn a sparse tensor into a dense one first (`tf.sparse.to_dense`).",
        )
    if getattr(tensor, "graph", None) is not trace.graph:
        raise ConfigError(
            f"stoker.transform.{function} must be called at the top of preprocessing_fn",
            got=Plain("a tensor of another graph: of tf.map_fn, tf.cond, or a tf.function"),
            fix="Call it outside of them, and use its result inside.",
        )
    return trace


def sources(tensors: Sequence[tf.Tensor]) -> set[str]:
    """Return the names of the placeholders that tensors depend on, control inputs included."""
    visited: set[str] = set()
    found: set[str] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if op.name in visited:
            continue
        visited.add(op.name)
        if op.type == "Placeholder":
            found.add(op.name)
        waiting.extend(tensor.op for tensor in op.inputs)
        waiting.extend(op.control_inputs)
    return found


def changed_requests() -> ConfigError:
    """Return the error for a function that calls other analyzers when it is traced again."""
    return ConfigError(
        "preprocessing_fn must call the same analyzers each time that it is traced",
        got=Plain("other analyzers, or other arguments, than in the first trace"),
        fix="Take what changes between calls (random numbers, global state) out of it.",
    )


def required_numbers(function: str, tensor: object) -> None:
    """Refuse anything but a tensor of numbers.

    Raises:
        ConfigError: it is a tensor of strings or booleans, or not a tensor.
    """
    dtype = tensor.dtype if isinstance(tensor, tf.Tensor) else None
    if dtype is None or not (dtype.is_floating or dtype.is_integer):
        raise ConfigError(
            f"stoker.transform.{function} must be given a dense tensor of numbers",
            got=Plain(type(tensor).__name__ if dtype is None else dtype.name),
            fix="Cast it first (tf.cast, tf.strings.to_number).",
        )


def required_whole(name: str, value: object, *, least: int) -> None:
    """Refuse anything but a whole number of at least `least`.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}", got=value)
