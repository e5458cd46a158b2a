"""The state of one trace of the user's function: its analyzer calls, their results, and created tables."""

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
    """Path of the file while the transform is built."""

    terms: int
    """Number of lines."""

    escaped: bool = False
    """Whether line breaks and backslashes in terms are escaped, because a term has a line break."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One analyzer call of the user's function."""

    kind: Kind
    """The analyzer."""

    tensor: tf.Tensor
    """Input of the analyzer: its values over all rows of the training split are analyzed."""

    params: dict[str, Any]
    """Other arguments of the call."""

    placeholder: tf.Tensor
    """Scalar float64 placeholder that is used in the graph until the result is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """The ids in an integer tensor."""

    num_buckets: int
    """Ids are below this, and at least 0."""

    vocabulary: str | None = None
    """Name of the vocabulary that the ids come from; None for buckets and hashes."""

    terms: int | None = None
    """Number of terms of the vocabulary; ids from this number on are out-of-vocabulary buckets."""


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
            answers: Result of each analyzer call, by its index; a result that is None, or missing at the
                end, is not known yet.
            requests: The calls of the previous trace, in order; empty in the first trace.
            objects: Tables and other trackables of earlier traces, in the order of their creation. They
                are reused; new ones are added to this list.
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
        """Add an analyzer call; a repeated call is added only once.

        Returns:
            The call's index.

        Raises:
            ConfigError: the previous trace made a different call at this point.
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
        """Create a table outside the graph, once for all traces, and keep it for saving."""
        if self._made == len(self._objects):
            with tf.init_scope():
                self._objects.append(factory())
        self._made += 1
        return self._objects[self._made - 1]

    def domain(self, tensor: tf.Tensor) -> Domain | None:
        """Return what is known about the ids in a tensor, even if its shape or type was changed; else None."""
        while tensor.ref() not in self.domains and tensor.op.type in _TRANSPARENT_OPS:
            tensor = tensor.op.inputs[_TRANSPARENT_OPS[tensor.op.type]]
        return self.domains.get(tensor.ref())


_TRANSPARENT_OPS = {
    **dict.fromkeys(("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze"), 0),
    "RaggedTensorToTensor": 1,
}
"""Operation that keeps the values -> index of the input that has them."""

_ACTIVE: ContextVar[Trace | None] = ContextVar("stoker_trace", default=None)


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Make this trace the current one for the functions of `stoker.transform`."""
    token = _ACTIVE.set(trace)
    try:
        yield trace
    finally:
        _ACTIVE.reset(token)


def active() -> Trace | None:
    """Return the current trace; None outside a trace."""
    return _ACTIVE.get()


def required(function: str, tensor: object) -> Trace:
    """Return the current trace, for a function that needs an analyzer.

    Raises:
        ConfigError: no function is being traced, or `tensor` is not a tensor of the traced graph.
    """
    trace = active()
    if trace is None:
        raise ConfigError(
            f"stoker.transform.{function} must be called inside preprocessing_fn",
            got=Plain("a call while no transform is being built"),
            fix="It needs a full pass over the training split. Call it in a function, and set "
            "`preprocessing` to that function.",
        )
    if not isinstance(tensor, tf.Tensor) or tensor.dtype == tf.resource:
        raise ConfigError(
            f"stoker.transform.{function} must be given a dense tensor",
            got=Plain(type(tensor).__name__),
            fix="Turn a sparse tensor into a dense one first (`tf.sparse.to_dense`).",
        )
    if getattr(tensor, "graph", None) is not trace.graph:
        raise ConfigError(
            f"stoker.transform.{function} must be called at the top level of preprocessing_fn",
            got=Plain("a tensor of a different graph: of tf.map_fn, tf.cond, or a tf.function"),
            fix="Call it outside these functions, and use its result inside.",
        )
    return trace


def sources(tensors: Sequence[tf.Tensor]) -> set[str]:
    """Return the names of the placeholders on which the tensors depend, also through control inputs."""
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
    """Return the error for a function that calls different analyzers when it is traced again."""
    return ConfigError(
        "preprocessing_fn must call the same analyzers each time that it is traced",
        got=Plain("different analyzers or arguments than in the first trace"),
        fix="Remove what changes between traces (random numbers, global state) from the function.",
    )


def required_numbers(function: str, tensor: object) -> None:
    """Refuse anything but a tensor of numbers.

    Raises:
        ConfigError: the argument is a tensor of strings or booleans, or not a tensor.
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
        ConfigError: the value is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}", got=value)
