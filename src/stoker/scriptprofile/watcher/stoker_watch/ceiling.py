"""The same compiled step on a batch in memory: the best that the input can reach.

Nothing in the script is lost or changed: the batch is one that the script's own step has
used, every variable that the step can change is restored, and a step that does more than change
variables is not run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from .loops import clock
from .wall import LOAD, now
from .watch import FACTS

MAX_STATE_BYTES = 1 << 30
"""Largest size of the variables, which are copied to the host's memory and back: 1 GiB takes about a second each way."""

_MORE_THAN_VARIABLES = re.compile(
    r"^(EagerPyFunc|PyFunc.*|Print.*|.*Summary.*|LookupTable(Insert|Import|Remove).*|Random.*"
    r"|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial|.*Enqueue.*|.*Dequeue.*|Save.*"
    r"|WriteFile|WriteImage.*|Collective.*|Nccl.*|Assert.*File|TensorListFromFile)$"
)
"""Operations that cannot be undone: they call Python, print, write, or draw random numbers."""


LONGEST_STEP_S = 2.0
"""A longer step is not run again, seconds."""

MAX_CEILING_S = 1.0
"""Duration of one window on a resident batch, seconds: the training waits meanwhile."""

ROUNDS = 3
"""Number of pairs of windows, with real data and on a resident batch."""

MAX_DRAINED = 100
"""Steps after a resident window that are left out: the input has run ahead meanwhile."""

COPIES = 10
"""Copies of a batch to a GPU, one after the other: waiting for the end then costs little per copy."""


class StepInput:
    """The batches of one real step, as an input that ends after them."""

    def __init__(self, batches: list[Any], once: Any) -> None:
        self.batches, self.once = batches, once


class Prepared:
    """What can be measured, before its batch has been read."""

    def __init__(
        self, function: Callable[[Any], Any], concrete: Any, variables: list[Any], *, calls: int
    ) -> None:
        self._function, self._variables, self._per_call = function, variables, calls
        self.concrete = concrete
        """The function to run."""

    def take(self, iterator: Any) -> tuple[StepInput, Ceiling | None]:
        """Take the batches of one call from the script's iterator.

        Returns:
            The step's input, with which it must be run now; and the measurement, None if it
            could not be created.

        Raises:
            StopIteration: the input has ended, as for the step itself.
        """
        batches = [next(iterator)]
        for _ in range(self._per_call - 1):
            try:
                batches.append(next(iterator))
            except StopIteration:
                break
        try:
            parts = [resident(batch, iterator.element_spec) for batch in batches]
            once = parts[0]
            for part in parts[1:]:
                once = once.concatenate(part)
            again = iter(plain(parts[0].repeat()))
            ceiling = Ceiling(self._function, again, self._variables, batches=batches)
            return StepInput(batches, iter(plain(once))), ceiling
        except Exception as error:  # noqa: BLE001 - the batch was read: training must use it
            FACTS.failed(error)
            # A train function of Keras accepts any iterator, and is traced again for it.
            return StepInput(batches, iter(batches)), None


class Ceiling:
    """Runs the step on the resident batch."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        iterator: Any,
        variables: list[Any],
        *,
        batches: list[Any],
    ) -> None:
        self._function, self._iterator, self._variables = function, iterator, variables
        self._batches = batches

    def transfer_s(self) -> float:
        """Seconds that the copies of a call's batches to a GPU take alone; 0 without a GPU."""
        return transfer_s(self._batches[0]) * len(self._batches)

    def settle(self) -> float:
        """Wait until the device has finished; return the time that this took, seconds."""
        return settle(self._variables)

    def measure(self, calls: int) -> tuple[float, float]:
        """Seconds of this many calls, and the share that other programs took; variables are restored."""
        return timed(lambda: self._function(self._iterator), self._variables, calls=calls)


def settle(variables: list[Any]) -> float:
    """Wait until the device has finished; return the time that this took, seconds."""
    begun_s = clock()
    if variables:
        min(variables, key=lambda each: each.shape.num_elements() or 0).numpy()
    return clock() - begun_s


def timed(
    call: Callable[[], Any], variables: list[Any], *, calls: int, warm: bool = True
) -> tuple[float, float]:
    """Time calls of a step; its variables are restored.

    Args:
        call: Runs the step.
        variables: All variables that it can change.
        calls: Number of timed calls.
        warm: Whether another call precedes them.

    Returns:
        Seconds, and the share of them that other programs took.
    """
    kept = [variable.numpy() for variable in variables]
    try:
        if warm:
            call()
            settle(variables)
        moment, begun_s = now(), clock()
        for _ in range(calls):
            call()
        settle(variables)
        took_s = clock() - begun_s
        return took_s, LOAD.between(moment, now()).away()
    finally:
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)


def prepare(
    function: Callable[[Any], Any], iterator: Any, model: Any
) -> tuple[Prepared | None, str]:
    """Check whether the step may be run on its own; reads no batch yet.

    Args:
        function: The train function of a model.
        iterator: Its argument.
        model: The model of the train function.

    Returns:
        The measurement, or None and the reason.
    """
    tf: Any = sys.modules["tensorflow"]
    if model is None or not isinstance(iterator, tf.data.Iterator):
        return None, "the batches are spread over a strategy's replicas"
    compiled = _compiled(function)
    if compiled is None:
        return None, "the step is not compiled: Python runs each of its operations"
    if any(not isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(iterator.element_spec)):
        return None, "the batches hold ragged or sparse tensors"
    if resident(_zeros(iterator.element_spec), iterator.element_spec).element_spec != (
        iterator.element_spec
    ):
        return None, "a batch cannot be given again with the shapes that its dataset declares"
    traced = compiled.experimental_get_tracing_count()
    concrete = compiled.get_concrete_function(iterator)
    if compiled.experimental_get_tracing_count() != traced:
        return None, "the step is traced again for each batch"
    if found := does_more(concrete):
        return None, f"the step does what cannot be undone ({', '.join(sorted(found)[:3])})"
    variables = _variables(concrete, model)
    size = sum(each.shape.num_elements() * each.dtype.size for each in variables)
    if size > MAX_STATE_BYTES:
        return None, f"the step's variables take {size / 2**30:.1f} GiB, which would be copied"
    calls = int(getattr(model, "steps_per_execution", 1))
    return Prepared(function, concrete, variables, calls=calls), ""


def _compiled(function: Any) -> Any:
    """The `tf.function` that a train function is, or closes over."""
    tf: Any = sys.modules["tensorflow"]
    kind = type(tf.function(lambda: None))
    if isinstance(function, kind):
        return function
    for cell in getattr(function, "__closure__", None) or ():
        if isinstance(cell.cell_contents, kind):
            return cell.cell_contents
    return None


def operations(concrete: Any) -> set[str]:
    """Types of all operations of a compiled step."""
    graph = concrete.graph.as_graph_def()
    nodes = [graph.node, *(inner.node_def for inner in graph.library.function)]
    return {node.op for each in nodes for node in each}


def does_more(concrete: Any) -> set[str]:
    """Operations of a step that do more than change variables."""
    return {kind for kind in operations(concrete) if _MORE_THAN_VARIABLES.match(kind)}


def _variables(concrete: Any, model: Any) -> list[Any]:
    """Every variable that the step captures, and every one of the model and its optimizer."""
    known = [*model.variables, *getattr(model.optimizer, "variables", ())]
    found = {}
    for variable in [*concrete.graph.variables, *(each.value for each in known)]:
        if hasattr(variable, "assign") and hasattr(variable, "ref"):
            found[variable.ref()] = variable
    return list(found.values())


def _zeros(element_spec: Any) -> Any:
    """A batch of one row, to check whether such batches can be given again."""
    tf: Any = sys.modules["tensorflow"]

    def zeros(spec: Any) -> Any:
        shape = [1 if size is None else size for size in spec.shape]
        return tf.zeros(shape, spec.dtype)

    return tf.nest.map_structure(zeros, element_spec)


def plain(dataset: Any) -> Any:
    """The dataset without the autotuner, which can delay the end of its iterator by seconds."""
    tf: Any = sys.modules["tensorflow"]
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def resident(batch: Any, spec: Any) -> Any:
    """A dataset with only this batch, and with the shapes that the script's own dataset declares."""
    tf: Any = sys.modules["tensorflow"]

    def relaxed(_: Any) -> Any:
        return tf.nest.map_structure(
            lambda value, like: tf.compat.v1.placeholder_with_default(value, like.shape),
            batch,
            spec,
        )

    return tf.data.Dataset.range(1).map(relaxed)


def transfer_s(batch: Any) -> float:
    """Seconds that a copy of a batch to the first GPU takes; 0 without a GPU, or if the batch is on it.

    Args:
        batch: Tensors; they are not changed.
    """
    tf: Any = sys.modules["tensorflow"]
    if not tf.config.list_logical_devices("GPU"):
        return 0.0
    try:
        return copied_s(batch, device="GPU:0")
    except tf.errors.OpError as error:
        # Not enough memory for a copy: the step itself is still measured.
        FACTS.failed(error)
        return 0.0


def copied_s(batch: Any, *, device: str) -> float:
    """Seconds that a copy of a batch to a device takes.

    Args:
        batch: Tensors or NumPy arrays.
        device: TensorFlow's name of it.
    """
    tf: Any = sys.modules["tensorflow"]
    with tf.device("CPU:0"):
        # Strings stay on the host, and tensors on a GPU are not copied.
        parts = [tf.convert_to_tensor(part) for part in tf.nest.flatten(batch) if _moves(part)]
    if not parts:
        return 0.0
    # The first copy allocates its memory.
    _wait(_copies(tf, parts, device))
    begun_s = clock()
    for _ in range(COPIES):
        copies = _copies(tf, parts, device)
    _wait(copies)
    return (clock() - begun_s) / COPIES


def _moves(part: Any) -> bool:
    kind = getattr(getattr(part, "dtype", None), "name", "string")
    return kind not in ("string", "object", "resource", "variant") and "GPU" not in str(
        getattr(part, "device", "")
    )


def _copies(tf: Any, parts: list[Any], device: str) -> list[Any]:
    with tf.device(device):
        return [tf.identity(part) for part in parts]


def _wait(copies: list[Any]) -> None:
    """Wait until all copies exist: a device finishes them in order; one number of each is read."""
    tf: Any = sys.modules["tensorflow"]
    for copy in copies:
        tf.reshape(copy, [-1])[:1].numpy()
