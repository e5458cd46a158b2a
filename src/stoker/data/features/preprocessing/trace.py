"""One walk through the user's function: what it asks the data for, and what hangs on what."""

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
    """A vocabulary that was computed: one term a line, the line's number is its id."""

    name: str
    """Name of the file, and of the asset."""

    path: str
    """Where it lies while the transform is built."""

    terms: int
    """Number of lines."""

    escaped: bool = False
    """Whether line breaks and backslashes in terms are escaped, because a term has a line break."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One question to the data, in the order in which the function asked."""

    kind: Kind
    """What is computed."""

    tensor: tf.Tensor
    """Of which tensor, over all rows of the training split."""

    params: dict[str, Any]
    """The rest of the question."""

    stand_in: tf.Tensor
    """Scalar float64 placeholder: what hangs on the answer hangs on this, until it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """Which ids an integer tensor holds."""

    num_buckets: int
    """Ids go from 0 to this, exclusive."""

    vocabulary: str | None = None
    """The vocabulary that they come from."""

    terms: int | None = None
    """How many terms that vocabulary has; ids above are out-of-vocabulary buckets."""


class Trace:
    """The state of one walk."""

    def __init__(
        self,
        graph: tf.Graph,
        *,
        answers: Sequence[Any],
        asked: Sequence[tuple[Kind, dict[str, Any]]],
        objects: list[Any],
    ) -> None:
        """Begin.

        Args:
            graph: The graph that is being built.
            answers: Answer to the first, second ... call; None or beyond the end: not known yet.
            asked: The questions of the walk before, in order; empty in the first.
            objects: Tables and other trackables of earlier walks, in the order of their making;
                used again, and added to.
        """
        self.graph = graph
        self.calls: list[Call] = []
        self.domains: dict[Any, Domain] = {}
        self.vocabularies: dict[Any, int] = {}
        self._answers = answers
        self._asked_before = asked
        self._objects = objects
        self._made = 0
        self._index: dict[Any, int] = {}

    def ask(self, kind: Kind, tensor: tf.Tensor, **params: Any) -> int:
        """Put a question to the data; the same question twice is one call.

        Returns:
            The call's index.

        Raises:
            ConfigError: the walk before put another question in this place.
        """
        key = (kind, tensor.ref(), tuple(sorted(params.items())))
        if key not in self._index:
            index = self._index[key] = len(self.calls)
            if self._asked_before and self._asked_before[index : index + 1] != [(kind, params)]:
                raise asks_otherwise()
            stand_in = tf.compat.v1.placeholder(tf.float64, [], name=f"answer_{index}")
            self.calls.append(Call(kind=kind, tensor=tensor, params=params, stand_in=stand_in))
        return self._index[key]

    def answer(self, index: int) -> Any:
        """The answer to a call, None while it is not known."""
        return self._answers[index] if index < len(self._answers) else None

    def track(self, factory: Any) -> Any:
        """Make a table outside the graph, once, and keep it for saving."""
        if self._made == len(self._objects):
            with tf.init_scope():
                self._objects.append(factory())
        self._made += 1
        return self._objects[self._made - 1]

    def domain(self, tensor: tf.Tensor) -> Domain | None:
        """Which ids a tensor holds, seen through what only changes its shape or type."""
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
    """Make a walk the one that the functions of `stoker.transform` speak to."""
    token = _ACTIVE.set(trace)
    try:
        yield trace
    finally:
        _ACTIVE.reset(token)


def active() -> Trace | None:
    """The walk that is on, if any."""
    return _ACTIVE.get()


def required(function: str, tensor: object) -> Trace:
    """The walk that is on, for a function that asks the data about a tensor.

    Raises:
        ConfigError: there is none, the argument is no tensor of its graph.
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
    """Names of the placeholders that tensors hang on, through inputs and control inputs."""
    seen: set[str] = set()
    found: set[str] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type == "Placeholder":
            found.add(op.name)
        waiting.extend(tensor.op for tensor in op.inputs)
        waiting.extend(op.control_inputs)
    return found


def asks_otherwise() -> ConfigError:
    """The error of a function that asks one thing now, and another when it is called again."""
    return ConfigError(
        "preprocessing_fn must ask the same of the data each time that it is called",
        got=Plain("other analyzers, or other arguments, than the first time"),
        fix="Take what changes between calls (random numbers, global state) out of it.",
    )


def required_numbers(function: str, tensor: object) -> None:
    """Refuse what is no tensor of numbers.

    Raises:
        ConfigError: it is a tensor of strings or booleans, or none at all.
    """
    dtype = tensor.dtype if isinstance(tensor, tf.Tensor) else None
    if dtype is None or not (dtype.is_floating or dtype.is_integer):
        raise ConfigError(
            f"stoker.transform.{function} must be given a dense tensor of numbers",
            got=Plain(type(tensor).__name__ if dtype is None else dtype.name),
            fix="Cast it first (tf.cast, tf.strings.to_number).",
        )


def required_whole(name: str, value: object, *, least: int) -> None:
    """Refuse what is no whole number, or too small.

    Raises:
        ConfigError: as said.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}", got=value)
